"""Fragments: the part of a logical tensor that a rank owns.

With tensor parallelism a rank has a *shard* of a tensor. With ZeRO it owns a piece of that shard, cut anywhere. Both
are elements [start, start + length) of the flattened (row-major) local shard, for one state.

A shard cuts one dimension. The tensor is seen as a matrix [rows, width]: `rows` runs over the dimensions
before the cut one, `width` over the cut one and those after it. A shard is a set of column ranges of it, one per part
of the cut dimension. A row of the local shard is those ranges side by side. A flat range of the local shard is a
partial first row, whole rows and a partial last row: a few rectangles, however large the tensor is. Rectangles
intersect in rectangles, and one strided copy moves a rectangle."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from megatron.parallel.layers.parameters import logical_of, shard_index, shard_start, stored_tensors
from megatron.parallel.layout.shard import LogicalTensor, Span

WEIGHT = "weight"  # in the type that the forward pass uses
MASTER = "master"  # the fp32 copy that the optimizer updates
AVERAGE = "average"  # fp32, of the weights over steps
TRAINED = "trained"  # fp32, the point of the gradients, for optimizers that take them elsewhere than at the master


@dataclass(frozen=True)
class FragmentSpec:
    """Elements start ... start + length of shard `tensor_rank` of `tensor_ranks`, flattened, without their values.

    The state is "weight", "master", "exp_avg", "exp_avg_sq", "momentum_buffer" or another with one value per element.

    Raises:
        ValueError: the range does not lie in the shard.
    """

    tensor: LogicalTensor
    state: str
    tensor_rank: int
    tensor_ranks: int
    start: int
    length: int

    def __post_init__(self) -> None:
        if not 0 <= self.tensor_rank < self.tensor_ranks:
            raise ValueError(f"{self.label}: tensor rank {self.tensor_rank} is not one of {self.tensor_ranks}")
        if self.start < 0 or self.length < 0 or self.stop > self.shard_size:
            raise ValueError(f"{self.label}: elements {self.start} to {self.stop} exceed a shard of {self.shard_size}")

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def shard_size(self) -> int:
        """Elements of the whole local shard."""
        return prod(self.tensor.local_shape(self.tensor_rank, self.tensor_ranks))

    @property
    def label(self) -> str:
        return f"{self.tensor.name} ({self.state})"

    @classmethod
    def whole(cls, tensor: LogicalTensor, state: str, tensor_rank: int = 0, tensor_ranks: int = 1) -> FragmentSpec:
        """All of a shard. By default all of the logical tensor."""
        return cls(tensor, state, tensor_rank, tensor_ranks, 0, prod(tensor.local_shape(tensor_rank, tensor_ranks)))

    def part(self, offset: int, length: int) -> FragmentSpec:
        """`length` elements from `offset` (counted from this fragment's start)."""
        return FragmentSpec(self.tensor, self.state, self.tensor_rank, self.tensor_ranks, self.start + offset, length)

    def parts(self, length: int) -> list[FragmentSpec]:
        """This range in pieces of at most `length` elements."""
        return [self.part(offset, min(length, self.length - offset)) for offset in range(0, self.length, length)]


@dataclass(frozen=True, eq=False)
class Fragment:
    """A fragment with its values, a contiguous 1-D tensor on any device."""

    tensor: LogicalTensor
    state: str
    tensor_rank: int
    tensor_ranks: int
    start: int
    data: torch.Tensor

    def __post_init__(self) -> None:
        if self.data.dim() != 1 or not self.data.is_contiguous():
            raise ValueError(
                f"{self.tensor.name} ({self.state}): a fragment's data must be 1-D and contiguous, "
                f"not {tuple(self.data.shape)} with strides {self.data.stride()}"
            )

    @property
    def spec(self) -> FragmentSpec:
        return FragmentSpec(self.tensor, self.state, self.tensor_rank, self.tensor_ranks, self.start, self.data.numel())

    @classmethod
    def of(cls, spec: FragmentSpec, data: torch.Tensor) -> Fragment:
        if data.numel() != spec.length:
            raise ValueError(f"{spec.label}: {data.numel()} values for a range of {spec.length}")
        return cls(spec.tensor, spec.state, spec.tensor_rank, spec.tensor_ranks, spec.start, data)

    @classmethod
    def empty(cls, spec: FragmentSpec, dtype: torch.dtype, device: torch.device | str = "cpu") -> Fragment:
        return cls.of(spec, torch.empty(spec.length, dtype=dtype, device=device))


@dataclass(frozen=True)
class FragmentRectangle:
    """Elements of the logical matrix, and their position in the fragment."""

    row: int  # row, rows, column, columns: the rectangle, in the logical tensor seen as a matrix
    rows: int
    column: int
    columns: int
    local: int  # index in the fragment of its first element
    stride: int  # distance in the fragment from one row of the rectangle to the next


@dataclass(frozen=True)
class Piece:
    """`count` runs of `length` elements to copy from one fragment (source) to another (target).

    Run i is at source + i * source_stride in the source and at target + i * target_stride in the target."""

    count: int
    length: int
    source: int
    source_stride: int
    target: int
    target_stride: int


def natural_width(tensor: LogicalTensor) -> int:
    """Width of the matrix in which the shards are column ranges. All elements, for a tensor that is not cut."""
    return prod(tensor.shape[tensor.shard.last :]) if tensor.shard is not None else prod(tensor.shape)


def common_width(*tensors: LogicalTensor) -> int:
    """The matrix width that serves several cuts of one logical tensor. It divides each natural width."""
    return min(natural_width(tensor) for tensor in tensors)


def rectangles(spec: FragmentSpec, width: int | None = None) -> list[FragmentRectangle]:
    """The fragment as rectangles of the logical matrix of `width` columns, in the order of its elements.

    Args:
        width: a divisor of the natural width that is a product of trailing dimensions. None: the natural width.
    """
    own_width = natural_width(spec.tensor)
    runs = _row_runs(spec)
    local_width = runs[-1][1] + runs[-1][2] if runs else 0
    if not spec.length or not local_width:
        return []
    found, rows = [], _rows(spec, local_width)
    for first, count, begin, end in _row_bands(spec.start, spec.stop, local_width):
        for column, local, length in runs:
            low, high = max(begin, local), min(end, local + length)
            for span in rows if low < high else ():
                top, bottom = max(first, span.local), min(first + count, span.local + span.length)
                if top < bottom:
                    row, position = span.start + top - span.local, top * local_width + low - spec.start
                    columns = (column + low - local, high - low)
                    found.append(FragmentRectangle(row, bottom - top, *columns, position, local_width))
    found.sort(key=lambda rectangle: rectangle.local)
    if width in (None, own_width):
        return found
    return [part for rectangle in found for part in _refine(rectangle, own_width, width)]


def overlap(source: list[FragmentRectangle], target: list[FragmentRectangle]) -> list[Piece]:
    """Intersect two fragments, as rectangles of one matrix width: how to copy from source to target."""
    pieces = []
    for ours in target:
        for theirs in source:
            row, column = max(ours.row, theirs.row), max(ours.column, theirs.column)
            rows = min(ours.row + ours.rows, theirs.row + theirs.rows) - row
            columns = min(ours.column + ours.columns, theirs.column + theirs.columns) - column
            if rows > 0 and columns > 0:
                begin, place = _position(theirs, row, column), _position(ours, row, column)
                pieces.append(_joined(Piece(rows, columns, begin, theirs.stride, place, ours.stride)))
    return pieces


def _position(rectangle: FragmentRectangle, row: int, column: int) -> int:
    return rectangle.local + (row - rectangle.row) * rectangle.stride + column - rectangle.column


def _joined(piece: Piece) -> Piece:
    """Join runs that are contiguous on both sides."""
    if piece.count == 1 or piece.length == piece.source_stride == piece.target_stride:
        length = piece.count * piece.length
        return Piece(1, length, piece.source, length, piece.target, length)
    return piece


def _row_runs(spec: FragmentSpec) -> list[tuple[int, int, int]]:
    """The shard's column ranges: (logical column, local column, length) of each part."""
    tensor = spec.tensor
    if tensor.shard is None:
        return [(0, 0, prod(tensor.shape))]
    dim = tensor.shard.last
    inner = prod(tensor.shape[dim + 1 :])
    spans = tensor.spans(spec.tensor_rank, spec.tensor_ranks)[dim]
    return [(span.start * inner, span.local * inner, span.length * inner) for span in spans]


def _rows(spec: FragmentSpec, width: int) -> list[Span]:
    """The fragment's rows of the logical matrix of natural width, and where they are in the shard, whose rows have this
    `width`. The shard has some rows only where two dimensions are cut, which are neighbours. Those before are whole."""
    tensor, shard = spec.tensor, spec.tensor.shard
    if shard is None or shard.across in (None, shard.dim):
        return [Span(0, prod(tensor.shape) // max(1, natural_width(tensor)), 0)]
    spans, size = tensor.spans(spec.tensor_rank, spec.tensor_ranks)[shard.last - 1], tensor.shape[shard.last - 1]
    held = sum(span.length for span in spans)
    first, end = spec.start // (held * width), -(-spec.stop // (held * width))  # matrices of a stack
    return [Span(m * size + s.start, s.length, m * held + s.local) for m in range(first, end) for s in spans]


def _row_bands(start: int, stop: int, width: int) -> list[tuple[int, int, int, int]]:
    """A flat range as bands of rows with one column range: (first row, rows, first column, end column)."""
    first, begin = divmod(start, width)
    last, end = divmod(stop, width)
    if first == last:
        return [(first, 1, begin, end)]
    bands = []
    if begin:
        bands.append((first, 1, begin, width))
        first += 1
    if first < last:
        bands.append((first, last - first, 0, width))
    if end:
        bands.append((last, 1, 0, end))
    return bands


def _refine(rectangle: FragmentRectangle, width: int, finer: int) -> list[FragmentRectangle]:
    """The same elements as rectangles of a narrower matrix. One row of the wide matrix is several of its rows."""
    refined = []
    for row in range(rectangle.rows):
        start = (rectangle.row + row) * width + rectangle.column
        local = rectangle.local + row * rectangle.stride
        for first, count, begin, end in _row_bands(start, start + rectangle.columns, finer):
            position = local + first * finer + begin - start
            refined.append(FragmentRectangle(first, count, begin, end - begin, position, finer))
    return refined


def weight_fragments(model: nn.Module) -> list[Fragment]:
    """This rank's weights of a model without an optimizer, to be filled. Buffers are whole on every rank."""
    return [
        Fragment(
            logical_of(each),
            WEIGHT,
            *((*shard_index(each), shard_start(each)) if isinstance(each, nn.Parameter) else (0, 1, 0)),
            each.detach().view(-1),
        )
        for each in stored_tensors(model)
    ]
