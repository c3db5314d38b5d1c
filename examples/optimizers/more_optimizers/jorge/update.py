"""Jorge (Singh et al. 2023, arXiv 2310.12298): Shampoo's preconditioners without inverses, for matrices.

The roots X of the inverse of Shampoo's factors are X = L^(-1/4), with L an average of G G^T. They follow each new
gradient by the first terms of the binomial series of (b L + (1 - b) G G^T)^(-1/4). The series needs a small argument,
so the coefficient b goes with its norm: with a fixed one the first steps diverge. The update has the size of that of
SGD with momentum (grafting). X and the product in the series do not commute exactly, so X is made symmetric again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config
from megatron.engine.optimizers.groups import use_fused
from megatron.engine.optimizers.matrix import MatrixOptimizer, blocks, sizes
from megatron.engine.optimizers.whole import OwnedUnit
from megatron.parallel.layout.shard import LogicalTensor

from .options import OPTIMIZER


def follow(root: Tensor, factor: Tensor) -> Tensor:
    """The new root of the inverse [n, m, m] after the symmetric `factor` G G^T (or G^T G) of the same shape.

    With A = X^4 G G^T / |X^4 G G^T| and b = |.| / (|.| + 1): b^(-1/4) X (1 - A/4 + 5/32 A^2).
    """
    squared = root @ root
    product = squared @ squared @ factor
    norm = torch.linalg.matrix_norm(product, keepdim=True)
    some = norm > 0
    a = product / torch.where(some, norm, 1.0)
    coefficient = torch.where(some, norm / (norm + 1), 1.0)
    found = coefficient ** (-0.25) * (root - root @ a / 4 + root @ a @ a * (5 / 32))
    return (found + found.mT) / 2


class Jorge(MatrixOptimizer):
    """Jorge for groups whose `matrix` is true, AdamW for the others.

    State, at the owner of a matrix: `momentum_buffer` (SGD's), `exp_avg` (of preconditioned gradients), `left`, `right`
    (the roots).

    Args:
        groups, lr, betas, eps, fused: see `MatrixOptimizer`.
        momentum: of both averages.
        frequency: steps between two updates of the roots.
        start: the factors begin as this times the identity.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        momentum: float = 0.9,
        frequency: int = 10,
        start: float = 1e-6,
        **adamw: Any,
    ) -> None:
        super().__init__(groups, {"momentum": momentum, "frequency": frequency, "start": start}, **adamw)

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> Jorge:
        common, own = config.optimizer, OPTIMIZER.options_of(config)
        return cls(
            groups,
            momentum=common.momentum,
            frequency=own["frequency"],
            start=own["start"],
            betas=common.betas,
            eps=common.epsilon,
            fused=use_fused(config, groups),
        )

    @classmethod
    def group_settings(cls, config: Config, logical: LogicalTensor) -> dict[str, Any]:
        """The rate of matrices follows the schedule as a multiple of `optimizer.lr`."""
        settings, rate = super().group_settings(config, logical), OPTIMIZER.options_of(config)["lr"]
        if rate is None or not settings["matrix"]:
            return settings
        if config.optimizer.lr == 0:
            raise ValueError(
                "optimizer.lr: jorge's matrices follow the schedule of optimizer.lr, which must be above 0"
            )
        return settings | {"lr_scale": rate / config.optimizer.lr}

    def matrix_states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("step",)

    def owner_states(self, logical: LogicalTensor) -> dict[str, int | None]:
        left, right = (sum(pair[side] ** 2 for pair in sizes(logical)) for side in (0, 1))
        return {"momentum_buffer": None, "exp_avg": None, "left": left, "right": right}

    def direction(
        self, group: Mapping[str, Any], unit: OwnedUnit, whole: Tensor, states: dict[str, Tensor], done: int
    ) -> Tensor:
        places, steps = [0, 0], []
        averages = [blocks(unit, states[name]) for name in ("momentum_buffer", "exp_avg")]
        for gradient, plain, average in zip(blocks(unit, whole.float()), *averages):
            roots = []
            for side, name in enumerate(("left", "right")):
                length = gradient.size(1 + side)
                begin, places[side] = places[side], places[side] + length**2
                root = states[name][:, begin : places[side]].unflatten(1, (length, length))
                if done == 0:
                    root.copy_(torch.eye(length, device=root.device) * group["start"] ** (-0.25))
                if done % group["frequency"] == 0:
                    root.copy_(follow(root, gradient.mT @ gradient if side else gradient @ gradient.mT))
                roots.append(root)
            plain.mul_(group["momentum"]).add_(gradient)
            average.lerp_(roots[0] @ gradient @ roots[1], 1 - group["momentum"])
            norms = [torch.linalg.matrix_norm(each, keepdim=True) for each in (plain, average)]
            steps.append(average * (norms[0] / torch.where(norms[1] > 0, norms[1], 1.0)))
        return torch.cat(steps, dim=1).view(unit.shape)
