"""Collectives take the way that a table chooses for them, whoever calls: layers, backward passes, DeepSpeed.

While a router is installed, an all-gather, reduce-scatter, all-reduce or all-to-all in a group of the mesh is looked up
by its operation, the hosts of its group and its bytes. Every rank of a group knows the same three, so all choose the
same. What cannot be cut into equal blocks (an all-to-all of uneven parts, a list of tensors), or is no plain sum,
maximum or minimum, is done by the backend as ever.

A call that takes another way than the backend's is complete when it returns, also where the caller asked for a handle:
it hides nothing behind computation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from megatron.config.algorithm_table import BACKEND, LEVELS, OTHER, THREE, AlgorithmTable

from . import hierarchy
from .hierarchy import COMBINE, HostGrid, places_by_host
from .interception import ROUTES, intercept, release
from .mesh import Axis, Mesh, new_group

# Method of a process group -> operation. Arguments: (tensors, options) of an all-reduce, else (result, input, ...).
METHODS = {
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True)
class Way:
    """How a group's calls may go.

    Attributes:
        hosts, ranks: over how many of the one so many of the other are.
        grid: for algorithms in levels; None where the table has none for such a group.
        pairs: the same in three levels; None where the group has no pairs, and then `grid` does it.
        others: groups of the same ranks, by the name of another backend.
    """

    hosts: int
    ranks: int
    grid: HostGrid | None
    pairs: HostGrid | None
    others: dict[str, ProcessGroup]


class Router:
    """Chooses for every call of the groups that it knows.

    Args:
        table: what is chosen.
        groups: the ranks of each group that this rank is in, in the same order on all ranks.
        hosts: of each rank of the job, a name.
        rank: this one.
        pairs: of each rank of the job, a name of the ranks of a host among which links are the fastest; may be empty.
        timeout: of the groups that are made.

    All ranks make it together. As with the mesh, only members of a group meet.
    """

    def __init__(
        self,
        table: AlgorithmTable,
        groups: Sequence[tuple[int, ...]],
        hosts: Sequence[Hashable],
        rank: int,
        timeout: timedelta | None = None,
        pairs: Sequence[Hashable] = (),
    ) -> None:
        self.table, self._pairs = table, pairs
        self.ways: dict[tuple[int, ...], Way] = {}
        self._known: dict[str, Way | None] = {}  # by the name of a group
        self._own: set[str] = set()
        for ranks in dict.fromkeys(groups):
            if (way := self._way(ranks, hosts, rank, timeout)) is not None:
                self.ways[ranks] = way

    def _way(
        self, ranks: tuple[int, ...], hosts: Sequence[Hashable], rank: int, timeout: timedelta | None
    ) -> Way | None:
        places = places_by_host(ranks, hosts)
        if places is None or len(ranks) == 1:
            return None
        wanted = self.table.algorithms(len(places), len(ranks))
        if not wanted:
            return None
        by_pair = places_by_host(ranks, self._pairs) if self._pairs else None
        deep = by_pair is not None and len(places) < len(by_pair) < len(ranks)
        pairs = (
            HostGrid.build(ranks, by_pair, rank, timeout, hosts) if by_pair and deep and wanted & set(THREE) else None
        )
        flat = set(LEVELS) if pairs else {*LEVELS, *THREE}
        grid = HostGrid.build(ranks, places, rank, timeout) if wanted & flat else None
        names = sorted(name.removeprefix(OTHER) for name in wanted if name.startswith(OTHER))
        others = {name: new_group(ranks, timeout, backend=name) for name in names}
        made = [axis.group for each in (grid, pairs) if each for axis in each.axes if axis.group]
        self._own |= {group.group_name for group in (*made, *others.values())}
        return Way(len(places), len(ranks), grid, pairs, others)

    def wrap(self, method: str, plain: Callable) -> Callable:
        """A layer over a method of process groups; see `interception`."""
        operation = METHODS[method]

        def routed(group: ProcessGroup, *args: Any, **options: Any) -> Any:
            way = self._find(group)
            if way is None or options:
                return plain(group, *args, **options)
            call = self.choose(operation, way, args)
            if call is None:
                return plain(group, *args)
            call()
            return _complete(args[0])

        return routed

    def _find(self, group: ProcessGroup) -> Way | None:
        key = group.group_name
        if key not in self._known:
            known = key not in self._own and group in dist.distributed_c10d._world.pg_group_ranks
            self._known[key] = self.ways.get(tuple(dist.get_process_group_ranks(group))) if known else None
        return self._known[key]

    def choose(self, operation: str, way: Way, args: tuple) -> Callable[[], Any] | None:
        """What does a call in another way than the backend's; None where the backend shall do it."""
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
        algorithm = self.table.choose(operation, way.hosts, way.ranks, size)
        if algorithm == BACKEND or size == 0:
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
        grid = way.pairs if algorithm in THREE and way.pairs else way.grid
        algorithm = THREE.get(algorithm, algorithm)
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
        intercept(ROUTES, METHODS, self.wrap)
        try:
            yield
        finally:
            release(ROUTES)


def _plain(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_contiguous() and not tensor.is_sparse


def _complete(result: Any) -> dist.Work:
    """A handle of what is done."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(result)
    work: dist.Work = getattr(torch._C._distributed_c10d, "_create_work_from_future")(future)  # noqa: B009
    return work


def groups_of(mesh: Mesh) -> list[tuple[int, ...]]:
    """The ranks of each group of several ranks that this rank is in: its axes, and all ranks."""
    axes: list[Axis] = [mesh.tensor, mesh.context, mesh.data, mesh.pipeline]
    axes += [mesh.replicas, mesh.expert, mesh.expert_data, mesh.expert_tensor]
    found = [axis.ranks for axis in axes if axis.group is not None]
    return list(dict.fromkeys([*found, tuple(range(mesh.layout.world_size))]))
