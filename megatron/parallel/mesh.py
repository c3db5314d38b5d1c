"""A layout brought to life: this rank's place and its process groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from .layout import Coordinates, Layout


@dataclass(frozen=True)
class Axis:
    """One axis as this rank sees it. `group` is None where the axis has a single rank: nothing is sent."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    ranks: tuple[int, ...] = (0,)


ALONE = Axis()


@dataclass(frozen=True)
class Mesh:
    """This rank's axes. Layers receive it; nothing about the layout is global state."""

    layout: Layout
    rank: int
    at: Coordinates
    tensor: Axis
    data: Axis
    pipeline: Axis

    @classmethod
    def single(cls) -> Mesh:
        """One process that holds everything."""
        return cls(Layout(), 0, Coordinates(), Axis(), Axis(), Axis())

    @classmethod
    def describe(cls, layout: Layout, rank: int) -> Mesh:
        """A mesh without process groups, for shapes and counts on the meta device."""
        at = layout.coordinates(rank)
        axes = {name: Axis(getattr(at, name), getattr(layout, name)) for name in ("tensor", "data", "pipeline")}
        return cls(layout, rank, at, **axes)

    @classmethod
    def build(cls, layout: Layout) -> Mesh:
        """Create this rank's groups; call on every rank after `torch.distributed.init_process_group`.

        Only members synchronise, axis by axis, so the cost per rank is three groups however large the run is.

        Raises:
            ValueError: the layout does not have as many ranks as the process group.
        """
        if layout.world_size == 1:
            return cls(layout, 0, Coordinates(), Axis(), Axis(), Axis())
        if layout.world_size != dist.get_world_size():
            raise ValueError(f"layout {layout} needs {layout.world_size} ranks, the job has {dist.get_world_size()}")
        rank = dist.get_rank()
        at = layout.coordinates(rank)
        axes = {name: _axis(layout, name, rank) for name in ("tensor", "data", "pipeline")}
        return cls(layout, rank, at, **axes)


def _axis(layout: Layout, name: str, rank: int) -> Axis:
    at = layout.coordinates(rank)
    size, place = getattr(layout, name), getattr(at, name)
    ranks = tuple(
        layout.rank(Coordinates(**{**vars(at), name: index})) for index in range(size)
    )
    if size == 1:
        return Axis(0, 1, None, ranks)
    return Axis(place, size, dist.new_group(list(ranks), use_local_synchronization=True), ranks)
