"""Whole logical tensors for optimizers that need them, distributed by owner over the ranks that hold parts of them.

On any layout, a rank holds runs of flattened shards. Tensor parallelism cuts a tensor into shards, and ZeRO a shard
into runs. Expert parallelism gives a rank some of the experts. One rank of the pipeline stage *owns* each tensor. It
receives the missing parts, computes on the whole, and sends each holder its part of the result. Each direction is
one all-to-all, so a part travels to one rank and back. The owner is one of the ranks that hold the most of the
tensor, the one with the least work. Under ZeRO 1 and 2, where most tensors lie whole on one rank, only those on a
cut travel. Where all ranks hold the same, the work is shared and the results are sent."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.layout.mesh import ALONE, Axis
from megatron.parallel.layout.shard import LogicalTensor, Span

ROUND = 2**27  # elements of whole tensors that travel at one time, over all ranks. Bounds the buffers


@dataclass(frozen=True)
class Held:
    """Elements [start, start + count) of the flattened shard `cut` (rank, ranks) of a logical tensor. This rank has
    them at `place` of its flat tensor number `flat`."""

    tensor: LogicalTensor
    cut: tuple[int, int]
    start: int
    count: int
    flat: int
    place: int


@dataclass(frozen=True)
class OwnedUnit:
    """A tensor with one owner: a logical tensor, or `count` of its experts from number `first` on."""

    tensor: LogicalTensor
    first: int = 0
    count: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.tensor.shape[1:]) if self.tensor.stacked else self.tensor.shape

    @property
    def work(self) -> int:
        """Multiplications of one product of the matrix with itself: about the cost of orthogonalising it."""
        rows, columns = (1, 1, *self.shape)[-2:]
        return prod(self.shape) * min(rows, columns)

    @property
    def _experts(self) -> Span | None:
        return Span(0, self.count, 0) if self.tensor.stacked else None

    def segment(self, cut: tuple[int, int]) -> tuple[int, int]:
        """Begin and end of its elements in the flattened shard."""
        size = prod(self.tensor.local_shape(*cut))
        if not self.tensor.stacked:
            return 0, size
        each = size // self.tensor.shape[0]
        return self.first * each, (self.first + self.count) * each

    def paste(self, whole: Tensor, cut: tuple[int, int], segment: Tensor) -> None:
        """Put the elements of a shard (1-D) into the whole."""
        for there, here in self._places(cut):
            whole[there] = segment.view(self.tensor.local_shape(*cut, self._experts))[here]

    def shard(self, whole: Tensor, cut: tuple[int, int]) -> Tensor:
        """The elements of a shard, 1-D."""
        if cut[1] == 1:
            return whole.reshape(-1)
        local = whole.new_empty(self.tensor.local_shape(*cut, self._experts))
        for there, here in self._places(cut):
            local[here] = whole[there]
        return local.view(-1)

    def _places(self, cut: tuple[int, int]) -> Iterable[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        for spans in itertools.product(*self.tensor.spans(*cut, self._experts)):
            yield (
                tuple(slice(span.start, span.stop) for span in spans),
                tuple(slice(span.local, span.local + span.length) for span in spans),
            )


@dataclass(frozen=True)
class UnitPart:
    """Elements [start, start + count) of a unit's segment of a shard, on `rank` at `place` of its tensor `flat`."""

    unit: int
    cut: tuple[int, int]
    start: int
    count: int
    rank: int
    flat: int
    place: int


Work = Callable[..., Tensor]


class WholeTensors:
    """The units of some flat tensors, and the exchange of their parts.

    Args:
        held: what each rank of the axis holds, in the order of its ranks.
        axis: ranks of the pipeline stage.
        device: of messages and whole tensors. None: that of the values.
    """

    def __init__(self, held: Sequence[Sequence[Held]], axis: Axis = ALONE, device: torch.device | None = None) -> None:
        self.axis, self.device = axis, device
        tensors = {each.tensor.name: each.tensor for row in held for each in row}
        self.units = [unit for name in sorted(tensors) for unit in units_of(tensors[name], axis.size)]
        self.parts = _parts(self.units, held)
        self.owners = _owners(self.units, self.parts, axis.size)
        self.sources = [_cover(parts, owner) for parts, owner in zip(self.parts, self.owners)]

    @property
    def owned(self) -> list[OwnedUnit]:
        return [unit for unit, owner in zip(self.units, self.owners) if owner == self.axis.rank]

    @cached_property
    def rounds(self) -> list[list[int]]:
        """Numbers of the units that travel together. Rounds bound the size of buffers."""
        found: list[list[int]] = []
        filled = ROUND
        for number, unit in enumerate(self.units):
            filled += prod(unit.shape)
            if filled > ROUND:
                found.append([])
                filled = prod(unit.shape)
            found[-1].append(number)
        return found

    def transform(
        self,
        values: Sequence[Tensor],
        work: Work,
        dtype: torch.dtype | None = None,
        further: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Apply `work` to each whole tensor. Returns the results in the form of the values. Every rank of the axis
        calls it.

        Args:
            values: one per flat tensor, of its shape. Elements in no unit (padding) become 0.
            work: from a unit and its whole tensor (and that of `further`) to a result of the same shape. Called on the
                unit's owner.
            dtype: in which the values travel to the owner. Their own by default.
            further: values of the same form. `work` gets their whole tensor as a third argument.
        """
        results = [torch.zeros_like(value) for value in values]
        flats, found = [value.reshape(-1) for value in values], [result.view(-1) for result in results]
        others = [value.reshape(-1) for value in further or ()]
        for numbers in self.rounds:
            wholes = self._gather(flats, numbers, dtype)
            more = self._gather(others, numbers, None) if others else {}
            done = {n: work(self.units[n], whole, *([more[n]] if more else ())) for n, whole in wholes.items()}
            self._scatter(done, numbers, found)
        return results

    def _gather(self, flats: list[Tensor], numbers: list[int], dtype: torch.dtype | None) -> dict[int, Tensor]:
        """Whole tensors of those units that this rank owns."""
        me, kind = self.axis.rank, dtype or flats[0].dtype
        parts = [part for number in numbers for part in self.sources[number]]

        def mine(part: UnitPart) -> Tensor:
            return flats[part.flat][part.place : part.place + part.count].to(self.device, kind)

        arrived = self._exchange([(p.rank, self.owners[p.unit], p) for p in parts], mine, flats[0], kind)
        wholes: dict[int, Tensor] = {}
        for number in (number for number in numbers if self.owners[number] == me):
            unit, segments = self.units[number], {}
            for part in self.sources[number]:
                if part.cut not in segments:
                    begin, end = unit.segment(part.cut)
                    segments[part.cut] = torch.empty(end - begin, dtype=kind, device=self.device or flats[0].device)
                value = mine(part) if part.rank == me else arrived[part]
                segments[part.cut][part.start : part.start + part.count] = value
            if list(segments) == [(0, 1)]:
                wholes[number] = segments[0, 1].view(unit.shape)
                continue
            wholes[number] = next(iter(segments.values())).new_empty(unit.shape)
            for cut, segment in segments.items():
                unit.paste(wholes[number], cut, segment)
        return wholes

    def _scatter(self, done: dict[int, Tensor], numbers: list[int], results: list[Tensor]) -> None:
        """Send each holder its parts of the results, and put them into its flat tensors."""
        me, kind = self.axis.rank, results[0].dtype
        parts = [part for number in numbers for part in self.parts[number]]
        cuts: dict[tuple[int, tuple[int, int]], Tensor] = {}

        def of_result(part: UnitPart) -> Tensor:
            key = part.unit, part.cut
            if key not in cuts:
                cuts[key] = self.units[part.unit].shard(done[part.unit], part.cut)
            return cuts[key][part.start : part.start + part.count].to(kind)

        arrived = self._exchange([(self.owners[p.unit], p.rank, p) for p in parts], of_result, results[0], kind)
        for part in parts:
            if part.rank == me:
                value = of_result(part) if self.owners[part.unit] == me else arrived[part]
                results[part.flat][part.place : part.place + part.count] = value

    def _exchange(
        self, moves: list[tuple[int, int, UnitPart]], of: Callable[[UnitPart], Tensor], like: Tensor, dtype: torch.dtype
    ) -> dict[UnitPart, Tensor]:
        """Send and receive parts, (sender, receiver, part) in the same order on all ranks. Returns the received
        values by part."""
        me, ranks = self.axis.rank, range(self.axis.size)
        moves = [each for each in moves if each[0] != each[1]]
        if not moves:
            return {}
        outgoing = [[part for source, to, part in moves if source == me and to == rank] for rank in ranks]
        incoming = [[part for source, to, part in moves if to == me and source == rank] for rank in ranks]
        device = self.device or like.device
        received = torch.empty(sum(part.count for row in incoming for part in row), dtype=dtype, device=device)
        dist.all_to_all_single(
            received,
            torch.cat([received.new_empty(0), *(of(part) for row in outgoing for part in row)]),
            group=self.axis.group,
            output_split_sizes=[sum(part.count for part in row) for row in incoming],
            input_split_sizes=[sum(part.count for part in row) for row in outgoing],
        )
        order = [part for row in incoming for part in row]
        return dict(zip(order, received.split([part.count for part in order]), strict=True))


def units_of(tensor: LogicalTensor, ranks: int) -> list[OwnedUnit]:
    """A tensor as one unit. A stack of experts as one run per rank, so that no expert axis cuts a run."""
    if not tensor.stacked:
        return [OwnedUnit(tensor)]
    experts = tensor.shape[0]
    runs = min(experts, ranks)
    borders = [number * experts // runs for number in range(runs + 1)]
    return [OwnedUnit(tensor, first, last - first) for first, last in itertools.pairwise(borders)]


def _parts(units: Sequence[OwnedUnit], held: Sequence[Sequence[Held]]) -> list[list[UnitPart]]:
    """For each unit its parts on all ranks, replicas included."""
    by_tensor: dict[str, list[tuple[int, Held]]] = {}
    for rank, row in enumerate(held):
        for each in row:
            by_tensor.setdefault(each.tensor.name, []).append((rank, each))
    found: list[list[UnitPart]] = []
    for number, unit in enumerate(units):
        parts = []
        for rank, each in by_tensor[unit.tensor.name]:
            begin, end = unit.segment(each.cut)
            first, last = max(begin, each.start), min(end, each.start + each.count)
            if first < last:
                place = each.place + first - each.start
                parts.append(UnitPart(number, each.cut, first - begin, last - first, rank, each.flat, place))
        found.append(sorted(parts, key=lambda part: (part.cut, part.start, part.rank)))
    return found


def _owners(units: Sequence[OwnedUnit], parts: Sequence[Sequence[UnitPart]], ranks: int) -> list[int]:
    """Owners of units, large units first: among the ranks that hold the most of a unit, the one with the least work."""
    load, owners = [0] * ranks, [0] * len(units)
    for number in sorted(range(len(units)), key=lambda number: -units[number].work):
        held: Counter[int] = Counter()
        for part in parts[number]:
            held[part.rank] += part.count
        most = max(held.values())
        owners[number] = min((rank for rank in held if held[rank] == most), key=lambda rank: (load[rank], rank))
        load[owners[number]] += units[number].work
    return owners


def _cover(parts: Sequence[UnitPart], owner: int) -> list[UnitPart]:
    """One of several replicas of the same elements: the owner's own, or else another's, in turn.

    Raises:
        ValueError: elements of the unit are missing, or parts overlap.
    """
    same: dict[tuple[tuple[int, int], int, int], list[UnitPart]] = {}
    for part in parts:
        same.setdefault((part.cut, part.start, part.count), []).append(part)
    ends: dict[tuple[int, int], int] = {}
    for (cut, start, count), _ in sorted(same.items()):
        if ends.get(cut, 0) != start:
            raise ValueError(f"the ranks' parts of a matrix do not fit together at element {start} of shard {cut}")
        ends[cut] = start + count
    return [next((one for one in copies if one.rank == owner), copies[owner % len(copies)]) for copies in same.values()]
