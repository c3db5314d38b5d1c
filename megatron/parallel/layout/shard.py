"""Logical tensors and how a layout cuts them.

A *logical tensor* has a name, a shape and a role that no layout changes. A `Shard` has the dimension that the tensor
parallel ranks cut, and the parts of this dimension. The rows of a fused `gate_up` matrix are two parts (gate, up), and
each rank owns a slice of each. Initialisation, checkpoints and export read the place of an element here.

Where the residual stream is cut over columns (`parallel.columns`), a matrix is also cut along its channels: in both
directions, over a grid of ranks.

Dimension 0 of a tensor of experts counts them, and no tensor parallel rank cuts it. An expert parallel rank has a run
of experts: a run of the flattened shard, and so a fragment, as under ZeRO. A run of a matrix's rows is the same."""

from dataclasses import dataclass, field
from enum import Enum


class Role(str, Enum):
    """Purpose of a parameter, for optimizer groups and initialisation schemes."""

    EMBEDDING = "embedding"
    POSITION = "position"
    HEAD = "head"
    NORM = "norm"
    BIAS = "bias"
    HIDDEN = "hidden"  # reads the residual stream: query, key, value, gate, up
    OUTPUT = "output"  # writes to the residual stream: attention output, down
    ROUTER = "router"
    STATE = "state"  # decays, time steps and other parameters of state-space mixers
    DECAY = "decay"  # base of the decay rates of RWKV's channels, which its authors train faster than the rest
    CONVOLUTION = "convolution"  # taps of short convolutions along the sequence


class Growth(str, Enum):
    """Fans of a tensor that grow with the width of the model: inputs, outputs, both or neither."""

    BOTH = "both"
    INPUTS = "inputs"
    OUTPUTS = "outputs"  # or neither: vectors, tables, matrices between fixed sizes
    HEAD = "head"  # only inputs, for which a multiplier of the logits compensates


_GROWTH = {Role.HIDDEN: Growth.BOTH, Role.OUTPUT: Growth.BOTH, Role.ROUTER: Growth.INPUTS, Role.HEAD: Growth.HEAD}


def growth_of(role: Role) -> Growth:
    """How tensors of a role grow by default."""
    return _GROWTH.get(role, Growth.OUTPUTS)


@dataclass(frozen=True)
class Scales:
    """Factors of a tensor's learning rate, weight decay and epsilon, in addition to its role's."""

    lr: float = 1.0
    weight_decay: float = 1.0
    epsilon: float = 1.0


UNSCALED = Scales()


@dataclass(frozen=True)
class Span:
    """A run of indices of a logical dimension, and where it starts in the local one."""

    start: int
    length: int
    local: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Shard:
    """Cut dimension `dim` over the tensor parallel ranks, each of its `parts` separately.

    Attributes:
        dim: the logical dimension that is cut.
        parts: sizes of the concatenated parts of that dimension. None is one part, the whole.
        unit: cuts fall on multiples of this (head_dim, so that heads stay whole). A part of u units gives
            rank r the units [r*u//n, (r+1)*u//n): sizes may differ by one unit, so a vocabulary needs no padding.
        across: the dimension that columns of ranks cut, equally. Where it is `dim`, only columns cut the tensor.
        columns: their number. Rank r * columns + c has the cut r along `dim` and c along `across`.
    """

    dim: int
    parts: tuple[int, ...] | None = None
    unit: int = 1
    across: int | None = None
    columns: int = 1

    @property
    def last(self) -> int:
        """The last dimension that is cut."""
        return self.dim if self.across is None else max(self.dim, self.across)

    @property
    def uncrossed(self) -> "Shard | None":
        """The cut of a layout without columns."""
        return None if self.across == self.dim else Shard(self.dim, self.parts, self.unit)

    def spans(self, size: int, rank: int, ranks: int) -> list[Span]:
        """The runs of the logical dimension (of length `size`) that `rank` of `ranks` owns, in local order."""
        spans, begin, local = [], 0, 0
        for part in self.parts or (size,):
            units = part // self.unit
            first, last = rank * units // ranks * self.unit, (rank + 1) * units // ranks * self.unit
            spans.append(Span(begin + first, last - first, local))
            begin, local = begin + part, local + last - first
        return spans


@dataclass(frozen=True)
class LogicalTensor:
    """A parameter without its layout. Each local parameter has it as `.logical`."""

    name: str  # such as `layers.7.attention.query.weight`
    shape: tuple[int, ...]  # logical shape
    role: Role  # its purpose
    shard: Shard | None = None  # how tensor parallel ranks cut it. None: each holds it whole.
    keep_fp32: bool = False  # it stays in fp32 in every precision.
    # sizes, along dim 0, of the matrices fused in it (Muon updates each separately)
    matrices: tuple[int, ...] | None = None
    scales: Scales = field(default=UNSCALED, compare=False)  # factors of its training. Not in checkpoints.
    # Of projections to heads, for each of `matrices`: "query", "key" or "value", and the rows of a head. Not in
    # checkpoints.
    heads: tuple[tuple[str, int], ...] | None = field(default=None, compare=False)

    @property
    def stacked(self) -> bool:
        """Whether dimension 0 counts experts with matrices of their own."""
        return len(self.shape) == 3 and self.matrices is not None

    def spans(self, rank: int, ranks: int, run: Span | None = None) -> list[list[Span]]:
        """For each dimension, the runs that `rank` of `ranks` tensor parallel ranks owns.

        Args:
            run: of the shard's first dimension (experts, or rows of a matrix). None: all of it.
        """
        cut, spans = self.shard, [[Span(0, size, 0)] for size in self.shape]
        if cut is not None and ranks == 1:  # with the whole, which no columns cut
            cut = cut.uncrossed
        if cut is not None and cut.dim != cut.across:
            spans[cut.dim] = cut.spans(self.shape[cut.dim], rank // cut.columns, ranks // cut.columns)
        if cut is not None and cut.across is not None:
            each = self.shape[cut.across] // cut.columns
            spans[cut.across] = [Span(rank % cut.columns * each, each, 0)]
        return spans if run is None else [_within(spans[0], run), *spans[1:]]

    def local_shape(self, rank: int, ranks: int, run: Span | None = None) -> tuple[int, ...]:
        return tuple(sum(span.length for span in spans) for spans in self.spans(rank, ranks, run))


def _within(spans: list[Span], run: Span) -> list[Span]:
    """The parts of spans inside a run of their local indices, which it counts from 0."""
    found = []
    for span in spans:
        first, last = max(span.local, run.start), min(span.local + span.length, run.stop)
        if first < last:
            found.append(Span(span.start + first - span.local, last - first, first - run.start))
    return found
