"""Adam-mini (Zhang et al. 2024, arXiv 2406.16793): AdamW with one second moment per block of a matrix."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config
from megatron.parallel.layout.shard import LogicalTensor

from .matrix import MatrixOptimizer, blocks, has_matrices, sizes
from .whole import OwnedUnit

BY_HEAD = ("query", "key")


def block_rows(logical: LogicalTensor) -> list[tuple[int, int]]:
    """(rows, rows of a block) of each matrix that is fused in a tensor. A block is a head of queries or keys, else
    one row."""
    heads = logical.heads or (("", 1),) * len(sizes(logical))
    return [(rows, each if what in BY_HEAD else 1) for (rows, _), (what, each) in zip(sizes(logical), heads)]


class AdamMini(MatrixOptimizer):
    """Of matrices [rows, columns]: AdamW with the mean of a block's squares for each of its squares. A block is a head
    of queries or keys, or else a row. Vectors are AdamW's.

    State, at the owner of a matrix: `exp_avg`, and `exp_avg_sq` of a number per block."""

    @classmethod
    def treats(cls, config: Config, logical: LogicalTensor) -> bool:
        return has_matrices(logical)

    def owner_states(self, logical: LogicalTensor) -> dict[str, int | None]:
        return {"exp_avg": None, "exp_avg_sq": sum(rows // each for rows, each in block_rows(logical))}

    def direction(
        self, group: Mapping[str, Any], unit: OwnedUnit, whole: Tensor, states: dict[str, Tensor], done: int
    ) -> Tensor:
        (beta1, beta2), t, gradient = group["betas"], done + 1, whole.float()
        average = states["exp_avg"].lerp_(gradient, 1 - beta1)
        places, steps = 0, []
        fused = zip(blocks(unit, gradient), blocks(unit, average), block_rows(unit.tensor))
        for part, mean, (rows, each) in fused:
            begin, places = places, places + rows // each
            squares = part.unflatten(1, (-1, each)).square().mean((2, 3))
            square = states["exp_avg_sq"][:, begin:places].mul_(beta2).add_(squares, alpha=1 - beta2)
            size = (square / (1 - beta2**t)).sqrt().add_(group["eps"])
            steps.append(mean / (1 - beta1**t) / size.repeat_interleave(each, 1).unsqueeze(2))
        return torch.cat(steps, dim=1).view(unit.shape)
