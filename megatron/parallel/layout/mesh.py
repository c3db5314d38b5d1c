"""A layout brought to life: this rank's place and its process groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from .layout import AXES, Coordinates, Layout


@dataclass(frozen=True)
class Axis:
    """This rank's place on an axis. `group` is None where the axis has a single rank."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    ranks: tuple[int, ...] = (0,)


ALONE = Axis()


@dataclass(frozen=True)
class Mesh:
    """This rank's axes. Layers receive it. Nothing about the layout is global state."""

    layout: Layout
    rank: int
    at: Coordinates
    tensor: Axis
    data: Axis
    pipeline: Axis
    context: Axis = ALONE  # ranks that share each sample's tokens
    replicas: Axis = ALONE  # ranks with the same parameters: the context and data axes together
    expert: Axis = ALONE  # ranks that share the experts of a layer: part of the replicas, or of these and tensor
    expert_data: Axis = ALONE  # the rest of it: ranks that hold the same experts
    expert_tensor: Axis = ALONE  # ranks that have slices of the same experts: the tensor axis, or none where folded
    columns: Axis = ALONE  # tensor parallel ranks with other channels of the residual stream
    rows: Axis = ALONE  # those with the same channels, where there are columns
    grid: Axis | None = None  # in the mesh of a block: all tensor parallel ranks, where there are columns
    timeout: timedelta | None = None  # of collectives in every group. None: torch's own

    @property
    def depth(self) -> Axis:
        """Ranks that share rows of matrices and gather them (`parallel.depth`)."""
        return self.expert if self.layout.depth > 1 else ALONE

    @property
    def gathered_experts(self) -> Axis:
        """Ranks that share experts and gather them."""
        return self.expert if self.layout.gathers_experts else ALONE

    @property
    def of_blocks(self) -> Mesh:
        """The mesh of layers that read and write the residual stream. With columns their tensor axis is the rows."""
        if self.layout.columns == 1:
            return self
        return replace(self, tensor=self.rows, expert_tensor=self.rows, grid=self.tensor)

    @classmethod
    def single(cls) -> Mesh:
        """One process that holds everything."""
        return cls(Layout(), 0, Coordinates(), Axis(), Axis(), Axis())

    @classmethod
    def describe(cls, layout: Layout, rank: int) -> Mesh:
        """A mesh without process groups, for shapes and counts on the meta device."""
        at = layout.coordinates(rank)
        axes = {name: Axis(getattr(at, name), getattr(layout, name)) for name in AXES}
        group, place = divmod(layout.expert_place(at), layout.expert)
        row, column = divmod(at.tensor, layout.columns)
        return cls(
            layout,
            rank,
            at,
            axes["tensor"],
            axes["data"],
            axes["pipeline"],
            axes["context"],
            replicas=Axis(layout.replica(at), layout.replicas),
            expert=Axis(place, layout.expert),
            expert_data=Axis(group, layout.expert_data),
            expert_tensor=ALONE if layout.folded else axes["tensor"],
            columns=Axis(column, layout.columns),
            rows=Axis(row, layout.tensor // layout.columns),
        )

    @classmethod
    def build(cls, layout: Layout, timeout: timedelta | None = None) -> Mesh:
        """Create this rank's groups. Every rank calls it after `torch.distributed.init_process_group`.

        Only members synchronise, axis by axis, so the cost per rank is at most seven groups for every number of ranks.

        Raises:
            ValueError: layout and process group have different numbers of ranks.
        """
        if layout.world_size == 1:
            return cls(layout, 0, Coordinates(), Axis(), Axis(), Axis(), timeout=timeout)
        if layout.world_size != dist.get_world_size():
            raise ValueError(f"layout {layout} needs {layout.world_size} ranks, the job has {dist.get_world_size()}")
        rank = dist.get_rank()
        at = layout.coordinates(rank)
        lines = {name: [replace(at, **{name: index}) for index in range(getattr(layout, name))] for name in AXES}
        axes = {name: _axis(layout, line, rank, timeout) for name, line in lines.items()}
        everyone = [layout.at_replica(at, place) for place in range(layout.replicas)]
        axes["replicas"] = _axis(layout, everyone, rank, timeout, tuple(axes.values()))
        sharing = _axis(layout, layout.all_experts(at), rank, timeout, tuple(axes.values()))
        same = _axis(layout, layout.same_experts(at), rank, timeout, tuple(axes.values()))
        rows, columns = ALONE, ALONE
        if layout.columns > 1:
            rows, columns = (_axis(layout, line, rank, timeout, tuple(axes.values())) for line in layout.on_grid(at))
        return cls(
            layout,
            rank,
            at,
            **axes,
            columns=columns,
            rows=rows,
            expert=sharing,
            expert_data=same,
            expert_tensor=ALONE if layout.folded else axes["tensor"],
            timeout=timeout,
        )


def stage_axis(mesh: Mesh) -> Axis:
    """The ranks of this rank's pipeline stage, which hold parts of the same layers. All of them call it together.

    It makes a group unless one of the mesh's axes has these ranks."""
    layout, at = mesh.layout, mesh.at
    if layout.replicas * layout.tensor == 1:
        return ALONE
    return _axis(layout, layout.stage_ranks(at), mesh.rank, mesh.timeout, (mesh.tensor, mesh.replicas))


def new_group(
    ranks: Sequence[int], timeout: timedelta | None, *, backend: str | None = None, description: str | None = None
) -> dist.ProcessGroup:
    """A process group. Only its members create it. torch gives each group a timeout of its own.

    Args:
        backend: where not that of the job.
        description: torch's `group_desc`.
    """
    return dist.new_group(
        list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True, group_desc=description
    )


def limit_groups(timeout: timedelta) -> None:
    """Give every process group of this rank the timeout, also groups that a library has made without one.

    On gloo the error comes after that time. With NCCL its watchdog ends the process."""
    for group in dist.distributed_c10d._world.pg_map:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def _axis(
    layout: Layout, line: list[Coordinates], rank: int, timeout: timedelta | None, known: tuple[Axis, ...] = ()
) -> Axis:
    """The axis of this rank and the others at these coordinates: one of the known axes, or one with a new group."""
    ranks = tuple(layout.rank(at) for at in line)
    for axis in known:
        if axis.ranks == ranks:
            return axis
    if len(ranks) == 1:
        return Axis(0, 1, None, ranks)
    group = new_group(ranks, timeout)
    return Axis(ranks.index(rank), len(ranks), group, ranks)
