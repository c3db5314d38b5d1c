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
    `expert`-th rank holds the same ones. Tensor parallel ranks then have slices of each expert. Where experts are
    `folded`
    over the tensor axis, no rank has a slice: both axes together are one line of ranks with whole experts.
    """

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    sequence: bool = False
    zero_stage: int = 0
    expert: int = 1
    folded: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor * self.data * self.pipeline

    @property
    def expert_line(self) -> int:
        """Ranks over which experts may be spread: those of the data axis, or of a stage where they are folded."""
        return self.data * self.tensor if self.folded else self.data

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts (or the same slices of them)."""
        return self.expert_line // self.expert

    @property
    def spreads_experts(self) -> bool:
        """Whether the experts' gradients are summed over other ranks than those of the data axis."""
        return self.expert > 1 or self.folded

    @property
    def sizes(self) -> dict[str, int]:
        """What records say of a layout; of experts where they are spread."""
        sizes = {name: getattr(self, name) for name in ("tensor", "data", "pipeline", "zero_stage")}
        if self.spreads_experts:
            sizes |= {"expert": self.expert, "expert_tensor": 1 if self.folded else self.tensor}
        return sizes

    @classmethod
    def of(cls, config, ranks: int) -> Layout:
        """The layout of a resolved `Config` on `ranks` processes.

        Raises:
            ValueError: ranks is not a multiple of tensor * pipeline, or the experts' ranks not one of expert.
        """
        parallel = config.parallel
        inner = parallel.tensor * parallel.pipeline * parallel.context
        if ranks % inner:
            raise ValueError(
                f"{ranks} ranks cannot be cut into tensor {parallel.tensor} x pipeline {parallel.pipeline}"
            )
        layout = cls(
            tensor=parallel.tensor,
            data=ranks // inner,
            pipeline=parallel.pipeline,
            sequence=parallel.sequence and parallel.tensor > 1,
            zero_stage=config.zero.stage,
            expert=parallel.expert,
            folded=parallel.expert_tensor < parallel.tensor,
        )
        if layout.expert_line % layout.expert:
            raise ValueError(f"{layout.expert_line} ranks cannot be cut into groups of {layout.expert} for the experts")
        return layout

    def coordinates(self, rank: int) -> Coordinates:
        return Coordinates(
            tensor=rank % self.tensor, data=rank // self.tensor % self.data, pipeline=rank // (self.tensor * self.data)
        )

    def expert_place(self, at: Coordinates) -> int:
        """The place of a rank on the line over which experts are spread."""
        return at.data * self.tensor + at.tensor if self.folded else at.data

    def same_experts(self, at: Coordinates) -> list[Coordinates]:
        """The ranks that hold the same experts as the one at `at`."""
        return self._on_line(at, range(self.expert_place(at) % self.expert, self.expert_line, self.expert))

    def all_experts(self, at: Coordinates) -> list[Coordinates]:
        """The ranks that share the experts with the one at `at`."""
        first = self.expert_place(at) // self.expert * self.expert
        return self._on_line(at, range(first, first + self.expert))

    def _on_line(self, at: Coordinates, places: range) -> list[Coordinates]:
        if not self.folded:
            return [replace(at, data=place) for place in places]
        return [replace(at, data=place // self.tensor, tensor=place % self.tensor) for place in places]

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
