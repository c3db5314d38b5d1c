"""A table chooses the algorithm of each collective, of layers, backward passes and DeepSpeed.

While a router is installed, the table has an algorithm for each all-gather, reduce-scatter, all-reduce or all-to-all in
a group of the mesh. It depends on operation, hosts of the group and bytes. These are equal on all ranks of a group, so
all choose the same. The backend does collectives without equal blocks (an all-to-all of uneven parts, a list of
tensors), and all reductions but sum, maximum and minimum.

A call by another algorithm than the backend's is complete when it returns, also where the caller asked for a handle:
it does not overlap with computation."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed.distributed_c10d import ProcessGroup

from megatron.config.arithmetic.algorithm_table import BACKEND, LEVELS, OTHER, THREE, AlgorithmTable, read_table
from megatron.config.sections.layout import CommunicationOptions

from ..layout.layout import AXES, Coordinates, Layout
from ..layout.mesh import new_group
from ..messages.interception import ROUTES, complete, intercept, release
from . import hierarchy
from .hierarchy import COMBINE, HostGrid, MakeGroup, places_by_host

Gather = Callable[[Tensor, Tensor], Any]


class _Batch:
    """Gathers of one type in one group: (result [n b], block [b]) of each."""

    def __init__(self, gather: Gather, ranks: int) -> None:
        self._gather, self._ranks = gather, ranks
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.sent = False

    def send(self) -> None:
        """Send once. Complete when it returns."""
        if self.sent:
            return
        self.sent = True
        if len(self.parts) == 1:
            self._gather(*self.parts[0])
            return
        together = torch.cat([block.view(-1) for _, block in self.parts])
        everyone = together.new_empty((self._ranks, together.numel()))
        self._gather(everyone.view(-1), together)
        pieces = everyone.split([block.numel() for _, block in self.parts], 1)
        for (result, _), piece in zip(self.parts, pieces):
            result.view(self._ranks, -1).copy_(piece)


class _Kept(Work):
    """The handle of a gather that is sent at the first wait."""

    def __init__(self, batch: _Batch) -> None:
        super().__init__()
        self._batch = batch

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._batch.send()
        return True

    def is_completed(self) -> bool:
        return self._batch.sent


class Joiner:
    """Joins small all-gathers that are called one after the other, and waited for later, into one message.

    A message of any size has a cost of its own. ZeRO 3 gathers each norm and bias after the update, and waits after the
    last call. The joiner keeps such a message until a wait for it, and then sends all of its kind together. Every rank
    calls and waits in the same order. The results have the same bits."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Batch] = {}

    def keep(self, key: Hashable, result: Tensor, block: Tensor, ranks: int, gather: Gather) -> Work:
        """A handle of the gather of `block` [b] into `result` [ranks b].

        Args:
            key: group and type. Gathers with one key are sent together.
            gather: sends one message of this kind, and waits for it.
        """
        batch = self._open.get(key)
        if batch is None or batch.sent:
            batch = self._open[key] = _Batch(gather, ranks)
        batch.parts.append((result, block))
        return _Kept(batch)


ALL_GATHER = "all_gather"
# Method of a process group -> operation. Arguments: (tensors, options) of an all-reduce, else (result, input, ...).
METHODS = {
    "allreduce": "all_reduce",
    "_allgather_base": ALL_GATHER,
    "all_gather_single": ALL_GATHER,
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True)
class Way:
    """The algorithms of a group."""

    hosts: int  # hosts, ranks: numbers of hosts and of ranks
    ranks: int
    grid: HostGrid | None  # for algorithms in levels. None where the table has none for the group.
    pairs: HostGrid | None  # for three levels. None where the group has no pairs, and `grid` replaces it.
    # Groups of the same ranks, by the name of another backend. The groups are None in a description.
    others: dict[str, ProcessGroup | None]
    join_below: int = 0  # all-gathers of fewer bytes that are waited for later are joined


@dataclass(frozen=True)
class Routes:
    """The algorithms of a job, equal on all ranks."""

    table: AlgorithmTable  # of the choices
    hosts: Sequence[Hashable]  # name of the host of each rank of the job.
    # Name of the pair of each rank of the job, which has the fastest link. May be empty.
    pairs: Sequence[Hashable] = ()

    def way(self, ranks: tuple[int, ...], rank: int, make: MakeGroup) -> Way | None:
        """The algorithms of a group. None: only the backend's. All its ranks call it.

        Args:
            rank: one of them.
            make: makes groups, or describes them by None.
        """
        places = places_by_host(ranks, self.hosts)
        if places is None or len(ranks) == 1:
            return None
        wanted = self.table.algorithms(len(places), len(ranks))
        join_below = self.table.joins.get((ALL_GATHER, len(places), len(ranks)), 0)
        if not wanted and not join_below:
            return None
        by_pair = places_by_host(ranks, self.pairs) if self.pairs else None
        pairs = None
        if by_pair is not None and len(places) < len(by_pair) < len(ranks) and wanted & set(THREE):
            pairs = HostGrid.build(ranks, by_pair, rank, make, self.hosts)
        flat = set(LEVELS) if pairs else {*LEVELS, *THREE}
        grid = HostGrid.build(ranks, places, rank, make) if wanted & flat else None
        names = sorted(name.removeprefix(OTHER) for name in wanted if name.startswith(OTHER))
        others = {name: make(ranks, backend=name) for name in names}
        return Way(len(places), len(ranks), grid, pairs, others, join_below)

    def algorithm(self, operation: str, way: Way, size: int) -> tuple[str, HostGrid | None]:
        """The algorithm of a call of `size` bytes, and the grid in which one in levels works."""
        name = self.table.choose(operation, way.hosts, way.ranks, size) if size else BACKEND
        if name == BACKEND or name.startswith(OTHER):
            return name, None
        return THREE.get(name, name), way.pairs if name in THREE and way.pairs else way.grid


def planned_routes(options: CommunicationOptions, ranks: int) -> Routes | None:
    """The algorithms of a job that has not started, on hosts with equal numbers of ranks. None without a table.

    Raises:
        OSError, ValueError: the table cannot be read, or is for another number of ranks.
    """
    if options.table is None or ranks == 1:
        return None
    table = read_table(options.table)
    if wrong := table.differs({"ranks": ranks}):
        raise ValueError("; ".join(wrong))
    own = options.island or -(-ranks // table.facts["hosts"])
    pairs = [rank // options.pair for rank in range(ranks)] if options.pair else []
    return Routes(table, [rank // own for rank in range(ranks)], pairs)


class Router:
    """Chooses the algorithm of every call of some groups. All ranks make it together.

    Args:
        routes: of the job.
        groups: the ranks of each group of this rank, in the same order on all ranks.
        rank: this rank.
        timeout: of the groups that are made.
    """

    def __init__(
        self, routes: Routes, groups: Sequence[tuple[int, ...]], rank: int, timeout: timedelta | None = None
    ) -> None:
        self.routes = routes
        self.ways: dict[tuple[int, ...], Way] = {}
        self._known: dict[str, Way | None] = {}  # by the name of a group
        self._own: set[str] = set()
        self._joiner = Joiner()

        def make(ranks: Sequence[int], **words: str) -> ProcessGroup:
            group = new_group(ranks, timeout, **words)
            self._own.add(group.group_name)
            return group

        for ranks in dict.fromkeys(groups):
            if (way := routes.way(ranks, rank, make)) is not None:
                self.ways[ranks] = way

    def wrap(self, method: str, plain: Callable) -> Callable:
        """A layer of `interception`."""
        operation = METHODS[method]

        def routed(group: ProcessGroup, *args: Any, **options: Any) -> Any:
            way = self._find(group)
            if way is None or options:
                return plain(group, *args, **options)
            if operation == ALL_GATHER and self._joins(way, args):
                gather = partial(self._gather, plain, group, way, args[2:])
                return self._joiner.keep((group.group_name, args[0].dtype), args[0], args[1], way.ranks, gather)
            call = self.choose(operation, way, args)
            if call is None:
                return plain(group, *args)
            call()
            return complete(args[0])

        return routed

    def _joins(self, way: Way, args: tuple) -> bool:
        whole = args[0]
        return all(map(_plain, args[:2])) and 0 < whole.numel() * whole.element_size() < way.join_below

    def _gather(
        self, plain: Callable, group: ProcessGroup, way: Way, rest: tuple, result: Tensor, part: Tensor
    ) -> None:
        """One message, by the way that its size has."""
        call = self.choose(ALL_GATHER, way, (result, part, *rest))
        if call is None:
            plain(group, result, part, *rest).wait()
        else:
            call()

    def _find(self, group: ProcessGroup) -> Way | None:
        key = group.group_name
        if key not in self._known:
            known = key not in self._own and group in dist.distributed_c10d._world.pg_group_ranks
            self._known[key] = self.ways.get(tuple(dist.get_process_group_ranks(group))) if known else None
        return self._known[key]

    def choose(self, operation: str, way: Way, args: tuple) -> Callable[[], Any] | None:
        """A function that does a call by another algorithm than the backend's. None: by the backend."""
        tensors = args[0] if operation == "all_reduce" else args[:2]
        if len(tensors) != (1 if operation == "all_reduce" else 2) or not all(map(_plain, tensors)):
            return None
        if operation == "all_to_all" and (any(args[2]) or any(args[3])):
            return None
        op = getattr(args[-1], "reduceOp", dist.ReduceOp.SUM)
        op = next((each for each in COMBINE if op == each), None)
        if op is None:
            return None
        size = max(each.numel() * each.element_size() for each in tensors)
        algorithm, grid = self.routes.algorithm(operation, way, size)
        if algorithm == BACKEND:
            return None
        first, last = tensors[0], tensors[-1]  # result and input, or both in one
        if algorithm.startswith(OTHER):
            group = way.others[algorithm.removeprefix(OTHER)]
            return {
                "all_reduce": partial(dist.all_reduce, first, op=op, group=group),
                "all_gather": partial(dist.all_gather_into_tensor, first, last, group=group),
                "reduce_scatter": partial(dist.reduce_scatter_tensor, first, last, op=op, group=group),
                "all_to_all": partial(dist.all_to_all_single, first, last, group=group),
            }[operation]
        assert grid is not None
        return {
            "all_reduce": partial(hierarchy.all_reduce, first, grid, algorithm, op),
            "all_gather": partial(hierarchy.all_gather, first, last, grid, algorithm),
            "reduce_scatter": partial(hierarchy.reduce_scatter, first, last, grid, algorithm, op),
            "all_to_all": partial(hierarchy.all_to_all, first, last, grid),
        }[operation]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Every call goes through the router until the end of the block."""
        global _installed
        intercept(ROUTES, METHODS, self.wrap)
        _installed = self
        try:
            yield
        finally:
            release(ROUTES)
            _installed = None


_installed: Router | None = None


def installed_routes() -> Routes | None:
    """The routes of this process's collectives now. None: all by the backend."""
    return None if _installed is None else _installed.routes


def _plain(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_contiguous() and not tensor.is_sparse


def groups_of(layout: Layout, at: Coordinates) -> list[tuple[int, ...]]:
    """The ranks of each group of several ranks that a rank is in: its axes, and all ranks."""
    lines = [[replace(at, **{name: place}) for place in range(getattr(layout, name))] for name in AXES]
    lines += [[layout.at_replica(at, place) for place in range(layout.replicas)]]
    lines += [layout.all_experts(at), layout.same_experts(at)]
    found = [tuple(map(layout.rank, line)) for line in lines if len(line) > 1]
    return list(dict.fromkeys([*found, tuple(range(layout.world_size))]))
