"""A layout: how many ranks each axis has, and where a rank stands. Pure arithmetic, no process groups."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Coordinates:
    """A rank's place on each axis."""

    tensor: int = 0
    data: int = 0
    pipeline: int = 0


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes. Ranks are numbered with tensor innermost, then data, then pipeline outermost.

    Tensor parallel ranks talk most, so they are neighbours (one node); stages talk least. This is also the
    order of DeepSpeed's `PipeModelDataParallelTopology`.

    Experts are spread over the data axis: `expert` neighbours on it share the experts of a layer, and every
    `expert`-th rank holds the same ones.
    """

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    sequence: bool = False
    zero_stage: int = 0
    expert: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.data * self.pipeline

    @property
    def expert_data(self) -> int:
        """Data parallel ranks that hold the same experts."""
        return self.data // self.expert

    @classmethod
    def of(cls, config, ranks: int) -> Layout:
        """The layout of a resolved `Config` on `ranks` processes.

        Raises:
            ValueError: ranks is not a multiple of tensor * pipeline, or the data axis not one of expert.
        """
        parallel = config.parallel
        inner = parallel.tensor * parallel.pipeline * parallel.context
        if ranks % inner:
            raise ValueError(f"{ranks} ranks cannot be cut into tensor {parallel.tensor} x pipeline {parallel.pipeline}")
        if ranks // inner % parallel.expert:
            raise ValueError(f"{ranks // inner} data parallel ranks cannot be cut into groups of {parallel.expert} for the experts")
        return cls(
            tensor=parallel.tensor, data=ranks // inner, pipeline=parallel.pipeline,
            sequence=parallel.sequence and parallel.tensor > 1, zero_stage=config.zero.stage,
            expert=parallel.expert,
        )

    def coordinates(self, rank: int) -> Coordinates:
        return Coordinates(
            tensor=rank % self.tensor,
            data=rank // self.tensor % self.data,
            pipeline=rank // (self.tensor * self.data),
        )

    def same_experts(self, at: Coordinates) -> list[Coordinates]:
        """The ranks along the data axis that hold the same experts as the one at `at`."""
        return [replace(at, data=data) for data in range(at.data % self.expert, self.data, self.expert)]

    def all_experts(self, at: Coordinates) -> list[Coordinates]:
        """The ranks along the data axis that share the experts with the one at `at`."""
        first = at.data // self.expert * self.expert
        return [replace(at, data=data) for data in range(first, first + self.expert)]

    def rank(self, at: Coordinates) -> int:
        return (at.pipeline * self.data + at.data) * self.tensor + at.tensor

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of ranks that differ on `axis` alone ("tensor", "data" or "pipeline"), in rank order."""
        members: dict[tuple, list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            fixed = tuple(getattr(at, other) for other in ("tensor", "data", "pipeline") if other != axis)
            members.setdefault(fixed, []).append(rank)
        return list(members.values())
