"""A layout: how many ranks each axis has, and where a rank stands. Pure arithmetic, no process groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron.config.sequences import choose_cut

if TYPE_CHECKING:
    from megatron.config import Config

AXES = ("tensor", "context", "data", "pipeline")  # in the order of rank numbers, innermost first


@dataclass(frozen=True)
class Coordinates:
    """A rank's place on each axis."""

    tensor: int = 0
    data: int = 0
    pipeline: int = 0
    context: int = 0


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes. Ranks are numbered with tensor innermost, then context, then data, then pipeline outermost.

    Tensor parallel ranks send most, so they are neighbours (one node). Stages send least. This is also the order of
    DeepSpeed's `PipeModelDataParallelTopology`, whose data axis is the axis of `replicas` here: all ranks with the same
    parameters, over the context and data axes. Gradients are summed over them, and ZeRO shares its states among them.

    Experts are spread over the replicas: `expert` neighbours among them share the experts of a layer, and every
    `expert`-th rank holds the same ones. Tensor parallel ranks then have slices of each expert. Where experts are
    `folded` over the tensor axis, no rank has a slice: both axes together are one line of ranks with whole experts.

    Ranks that share sequences may share the rows of matrices, too (`shares_rows`). For gradients, states and
    checkpoints such a matrix is a stack of experts, one per row, spread over these ranks. With `depth`, that many
    neighbours among the replicas share rows in the same way, and gather whole matrices. Their ranks are the axis of
    experts, so experts are spread over the same ranks. Tokens travel to them, or each rank gathers whole experts too
    (`gathers_experts`).

    Tensor parallel ranks may be a grid. `columns` neighbours among them have other channels of the residual stream."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    sequence: bool = False
    zero_stage: int = 0
    expert: int = 1
    folded: bool = False
    context: int = 1
    context_method: str = "auto"
    context_ulysses: int | None = None
    zigzag: bool = False
    shares_rows: bool = False
    depth: int = 1
    columns: int = 1
    gathers_experts: bool = False
    async_tensor: bool = False  # messages of tensor parallel ranks overlap with products. Goes with `sequence`
    tensor_wire: str = "none"  # form of activations on the tensor axis (`config/arithmetic/wire.py`)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters, except experts: the context and data axes."""
        return self.context * self.data

    @property
    def world_size(self) -> int:
        return self.tensor * self.replicas * self.pipeline

    @property
    def expert_line(self) -> int:
        """Ranks over which experts may be spread: the replicas, or all ranks of a stage where they are folded."""
        return self.replicas * self.tensor if self.folded else self.replicas

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts (or the same slices of them)."""
        return self.expert_line // self.expert

    @property
    def spreads_experts(self) -> bool:
        """Whether the experts' gradients are summed over other ranks than the replicas."""
        return self.expert > 1 or self.folded

    @property
    def sends_tokens(self) -> bool:
        """Whether tokens travel to the ranks of their experts."""
        return self.spreads_experts and not self.gathers_experts

    @property
    def sizes(self) -> dict[str, int]:
        """A layout in records, with experts where they are spread."""
        sizes = {name: getattr(self, name) for name in ("tensor", "data", "pipeline", "zero_stage")}
        if self.context > 1:
            sizes |= {"context": self.context}
        if self.columns > 1:
            sizes |= {"columns": self.columns}
        if self.shares_rows:
            sizes |= {"folded": self.context}
        elif self.depth > 1:
            sizes |= {"depth": self.depth}
        elif self.spreads_experts:
            sizes |= {"expert": self.expert, "expert_tensor": 1 if self.folded else self.tensor}
        return sizes

    @classmethod
    def of(cls, config: Config, ranks: int) -> Layout:
        """The layout of a resolved `Config` on `ranks` processes.

        Raises:
            ValueError: ranks is not a multiple of tensor * pipeline * context, or the experts' ranks not one of expert.
        """
        parallel = config.parallel
        tensor = parallel.tensor * parallel.columns
        inner = tensor * parallel.pipeline * parallel.context
        if ranks % inner:
            raise ValueError(
                f"{ranks} ranks cannot be cut into tensor {tensor} x pipeline {parallel.pipeline} x context "
                f"{parallel.context}"
            )
        layout = cls(
            tensor=tensor,
            columns=parallel.columns,
            data=ranks // inner,
            pipeline=parallel.pipeline,
            sequence=parallel.sequence and parallel.tensor > 1,
            zero_stage=config.zero.stage,
            expert=max(parallel.expert, parallel.folded, parallel.depth),
            depth=parallel.depth,
            gathers_experts=parallel.expert == 1 < parallel.depth,
            folded=parallel.expert_tensor < parallel.tensor,
            context=parallel.context,
            context_method=parallel.context_method,
            context_ulysses=parallel.context_ulysses,
            async_tensor=parallel.async_tensor and parallel.sequence and parallel.tensor > 1,
            tensor_wire=parallel.communication.compress.tensor,
            shares_rows=parallel.folded > 1,
            zigzag=parallel.context > 1 and choose_cut(config)[0] == "zigzag",
        )
        if layout.expert_line % layout.expert:
            raise ValueError(f"{layout.expert_line} ranks cannot be cut into groups of {layout.expert} for the experts")
        return layout

    def on_grid(self, at: Coordinates) -> tuple[list[Coordinates], list[Coordinates]]:
        """The ranks with other rows than the one at `at`, and those with other columns, itself included."""
        row, column = divmod(at.tensor, self.columns)
        rows = [replace(at, tensor=each * self.columns + column) for each in range(self.tensor // self.columns)]
        return rows, [replace(at, tensor=row * self.columns + each) for each in range(self.columns)]

    def coordinates(self, rank: int) -> Coordinates:
        replica, tensor = divmod(rank, self.tensor)
        pipeline, replica = divmod(replica, self.replicas)
        data, context = divmod(replica, self.context)
        return Coordinates(tensor=tensor, data=data, pipeline=pipeline, context=context)

    def replica(self, at: Coordinates) -> int:
        """The place of a rank among the replicas."""
        return at.data * self.context + at.context

    def at_replica(self, at: Coordinates, place: int) -> Coordinates:
        """The rank of this place among the replicas of the one at `at`."""
        data, context = divmod(place, self.context)
        return replace(at, data=data, context=context)

    def stage_ranks(self, at: Coordinates) -> list[Coordinates]:
        """Ranks of the pipeline stage of the one at `at`: replica by replica, each with its tensor parallel ranks."""
        replicas = (self.at_replica(at, place) for place in range(self.replicas))
        return [replace(each, tensor=tensor) for each in replicas for tensor in range(self.tensor)]

    def expert_place(self, at: Coordinates) -> int:
        """The place of a rank on the line over which experts are spread."""
        return self.replica(at) * self.tensor + at.tensor if self.folded else self.replica(at)

    def same_experts(self, at: Coordinates) -> list[Coordinates]:
        """The ranks that hold the same experts as the one at `at`."""
        return self._on_line(at, range(self.expert_place(at) % self.expert, self.expert_line, self.expert))

    def all_experts(self, at: Coordinates) -> list[Coordinates]:
        """The ranks that share the experts with the one at `at`."""
        first = self.expert_place(at) // self.expert * self.expert
        return self._on_line(at, range(first, first + self.expert))

    def _on_line(self, at: Coordinates, places: range) -> list[Coordinates]:
        if not self.folded:
            return [self.at_replica(at, place) for place in places]
        pairs = (divmod(place, self.tensor) for place in places)
        return [replace(self.at_replica(at, replica), tensor=tensor) for replica, tensor in pairs]

    def rank(self, at: Coordinates) -> int:
        return (at.pipeline * self.replicas + self.replica(at)) * self.tensor + at.tensor

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of ranks that differ only on `axis` (one of `AXES`), in rank order."""
        members: dict[tuple, list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            fixed = tuple(getattr(at, other) for other in AXES if other != axis)
            members.setdefault(fixed, []).append(rank)
        return list(members.values())
