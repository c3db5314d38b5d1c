"""Adafactor (Shazeer & Stern 2018, arXiv 1804.04235): squares of gradients by row and column, no momentum.

It uses the schedule's rate and does not multiply by the weights' own size, as usual for language models. It treats
all matrices, embeddings and head included. AdamW treats vectors."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config
from megatron.parallel.layout.shard import LogicalTensor

from .facts import ADAFACTOR
from .matrix import MatrixOptimizer, blocks, has_matrices, sizes
from .whole import OwnedUnit

EPSILON = 1e-30  # the paper's, added to squares. A larger one would outweigh the small gradients of a large model


class Adafactor(MatrixOptimizer):
    """With row means r and column means c of G^2 + 1e-30, averaged with b = 1 - t^-decay: U = G / sqrt(r c / mean(r)),
    and the step is U / max(1, rms(U) / clip).

    State, at the owner of a matrix: `row`, `column`."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, decay: float = 0.8, clip: float = 1.0, **adamw: Any
    ) -> None:
        super().__init__(groups, {"decay": decay, "clip": clip}, **adamw)

    @classmethod
    def settings(cls, config: Config) -> dict[str, Any]:
        return ADAFACTOR.options_of(config)

    @classmethod
    def treats(cls, config: Config, logical: LogicalTensor) -> bool:
        return has_matrices(logical)

    def owner_states(self, logical: LogicalTensor) -> dict[str, int | None]:
        return {"row": sum(rows for rows, _ in sizes(logical)), "column": sum(columns for _, columns in sizes(logical))}

    def direction(
        self, group: Mapping[str, Any], unit: OwnedUnit, whole: Tensor, states: dict[str, Tensor], done: int
    ) -> Tensor:
        share, places, steps = (done + 1.0) ** -group["decay"], [0, 0], []
        for gradient in blocks(unit, whole.float()):
            squares, means = gradient.square() + EPSILON, []
            for side, name in enumerate(("row", "column")):
                begin, places[side] = places[side], places[side] + gradient.size(1 + side)
                mean = states[name][:, begin : places[side]]
                means.append(mean.lerp_(squares.mean(2 - side), share))
            row, column = means
            share_of_rows = row / row.mean(1, keepdim=True)  # the product of both would underflow
            update = gradient * share_of_rows.rsqrt().unsqueeze(2) * column.rsqrt().unsqueeze(1)
            size = update.square().mean((1, 2), keepdim=True).sqrt()
            steps.append(update / (size / group["clip"]).clamp(min=1.0))
        return torch.cat(steps, dim=1).view(unit.shape)
