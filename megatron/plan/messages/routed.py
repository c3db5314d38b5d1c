"""Messages under a table of algorithms, in closed form: each predicted message as its parts.

Of S bytes over n hosts with l ranks each, in elements that are padded to whole parts for an all-reduce:
    all-gather       n S / (n l) between hosts, then S inside
    reduce-scatter   S inside, then S / l between hosts
    all-reduce       a reduce-scatter inside, an all-reduce of S / l between hosts, an all-gather inside
    all-to-all       S inside, then S between hosts
Between hosts T bytes are one message of the backend, or n - 1 sends of T / n in a ring. With recursive doubling and
halving they are sends of T / n, 2 T / n, 4 T / n, ... to log n ranks (`hierarchy`). In three levels what is between
pairs is done in hosts by the same formulas. Small all-gathers that are joined first are one of their sum. An all-reduce
by doubling sends T / l whole to each of log n ranks.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron.config.arithmetic.algorithm_table import BACKEND, DOUBLING, OPERATIONS, RECURSIVE, TWO_LEVEL

from ...parallel.layout.layout import Layout
from ...parallel.layout.mesh import Axis
from ...parallel.messages.account import group_name, pair_name
from ...parallel.messages.traffic import LATER, SIZES, SPLIT, Call, Messages, Tally
from ...parallel.transport.hierarchy import BETWEEN, INSIDE, PAIR, HostGrid, doubling
from ...parallel.transport.routes import Routes, Way, groups_of

ENDS = ("send", "recv")


class Part(NamedTuple):
    """One message: its level, its ranks (for a send only the other one), and its bytes."""

    level: str
    ranks: tuple[int, ...]
    operation: str
    size: int


def parts(operation: str, grid: HostGrid, algorithm: str, size: int, width: int) -> Iterator[Part]:
    """The messages of one rank for a call of `size` bytes.

    Args:
        algorithm: one with two levels.
        width: bytes of an element.
    """
    inner = grid.inside.size
    if operation == "all_gather":
        yield from _between(operation, grid, algorithm, size // inner, width)
        yield from _inside(operation, grid, size)
    elif operation == "reduce_scatter":
        yield from _inside(operation, grid, size)
        yield from _between(operation, grid, algorithm, size // inner, width)
    elif operation == "all_to_all":
        yield from _inside(operation, grid, size)
        yield from _between(operation, grid, TWO_LEVEL, size, width)
    else:
        uncut = algorithm in (TWO_LEVEL, DOUBLING) or grid.outer is not None
        whole = inner if uncut else inner * grid.between.size
        padded = -(-size // (whole * width)) * whole * width
        yield from _inside("reduce_scatter", grid, padded)
        if uncut:
            yield from _between(operation, grid, algorithm, padded // inner, width)
        else:
            yield from _between("reduce_scatter", grid, algorithm, padded // inner, width)
            yield from _between("all_gather", grid, algorithm, padded // inner, width)
        yield from _inside("all_gather", grid, padded)


def _inside(operation: str, grid: HostGrid, size: int) -> Iterator[Part]:
    if grid.inside.size > 1:
        yield Part(PAIR if grid.outer else INSIDE, grid.inside.ranks, operation, size)


def _between(operation: str, grid: HostGrid, algorithm: str, size: int, width: int) -> Iterator[Part]:
    """`size` bytes of all hosts together."""
    axis = grid.between
    if grid.outer is not None:
        yield from parts(operation, grid.outer, algorithm, size, width)
    elif algorithm == TWO_LEVEL:
        yield Part(BETWEEN, axis.ranks, operation, size)
    else:
        for to, source, bytes_ in _swaps(axis, algorithm, size):
            for peer, end in ((to, "send"), (source, "recv")):
                if peer is not None:
                    yield Part(BETWEEN, (axis.ranks[peer],), end, bytes_)


def _swaps(axis: Axis, algorithm: str, size: int) -> list[tuple[int | None, int | None, int]]:
    """(to, from, bytes) of a rank's messages, of any operation: recursive halving is doubling from its end."""
    n, rank, block = axis.size, axis.rank, size // axis.size
    if algorithm == DOUBLING:
        return [(to, source, size) for to, source in doubling(n, rank)]
    if algorithm == RECURSIVE:
        return [(rank ^ 1 << at, rank ^ 1 << at, block << at) for at in range(n.bit_length() - 1)]
    return [((rank + 1) % n, (rank - 1) % n, block)] * (n - 1)


class RoutedTraffic:
    """Converts predicted messages of a rank into the messages that are sent.

    Args:
        routes: None without a table.
    """

    def __init__(self, routes: Routes | None, layout: Layout, rank: int) -> None:
        self.routes, self.layout, self.at = routes, layout, layout.coordinates(rank)
        self._ways: dict[tuple[str, int], Way] = {}
        for ranks in groups_of(layout, self.at) if routes is not None else ():
            way = routes.way(ranks, rank, _nothing) if routes is not None else None
            if way is not None:
                self._ways[group_name(ranks, layout, self.at), len(ranks)] = way

    def tally(self, messages: Messages) -> Tally:
        """The account of these messages."""
        return Tally(self._sent(self._joined(messages)))

    def _joined(self, messages: Messages) -> Messages:
        """The messages, with one in place of all small ones of a kind that are waited for together."""
        found, together = Messages(), dict[Call, int]()
        for call, count, size, kind in messages.each():
            way = self._ways.get((call.group, call.ranks))
            if kind == LATER and way is not None and 0 < size < way.join_below:
                together[call] = together.get(call, 0) + count * size
            else:
                found.add(call, count, count * size, kind)
        for call, size in together.items():
            found.add(call, 1, size)
        return found

    def _sent(self, messages: Messages) -> Iterator[tuple[Call, int, int]]:
        for call, count, size, kind in messages.each():
            routed = call.operation in OPERATIONS and kind != SPLIT
            way = self._ways.get((call.group, call.ranks)) if routed else None
            algorithm, grid = (BACKEND, None)
            if way is not None and self.routes is not None:
                algorithm, grid = self.routes.algorithm(call.operation, way, size)
            if grid is None:
                yield call, count, count * size
                continue
            for part in parts(call.operation, grid, algorithm, size, SIZES[call.dtype]):
                yield self._call(call, part), count, count * part.size

    def _call(self, call: Call, part: Part) -> Call:
        ends = part.operation in ENDS
        name = (
            pair_name(self.at, self.layout.coordinates(part.ranks[0]))
            if ends
            else group_name(part.ranks, self.layout, self.at)
        )
        ranks = 2 if ends else len(part.ranks)
        return call._replace(group=f"{name}/{part.level}", ranks=ranks, operation=part.operation)


def _nothing(ranks: Sequence[int], **_: Any) -> None:
    """No process group: the group is only described."""
