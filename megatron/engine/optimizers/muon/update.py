"""Muon (Jordan et al. 2024): momentum, orthogonalised by a Newton-Schulz iteration, for matrices; AdamW for the rest.

The iteration needs whole matrices, which `whole` brings together on one rank each. A parameter may hold several, fused
along a dimension (query, key and value; gate and up), or one per expert: each is orthogonalised alone. The momentum is
an average per element, kept by whoever holds the element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config
from megatron.parallel.layout.shard import LogicalTensor, Scales

from ..groups import use_fused
from ..matrix import MatrixOptimizer
from ..whole import OwnedUnit
from .options import OPTIMIZER

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the quintic with the steepest slope at 0, from the authors
ITERATIONS = 5
EPSILON = 1e-7


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Roughly U V^T of the singular value decomposition U S V^T of each of `matrices` [..., rows, columns].

    Singular values end between about 0.7 and 1.2, which is as good for training as 1 and much cheaper.

    Args:
        dtype: of the computation and the result.
    """
    a, b, c = COEFFICIENTS
    x = matrices.to(dtype)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def factor(rows: int, columns: int, scale: str) -> float:
    """What an orthogonal matrix is multiplied by.

    "original": sqrt(max(1, rows / columns)), which keeps the change of a layer's output independent of its shape.
    "moonlight": 0.2 sqrt(max(rows, columns)), which gives the update the size of AdamW's, so that AdamW's rates suit
    (Liu et al. 2025, arXiv 2502.16982).
    """
    return 0.2 * max(rows, columns) ** 0.5 if scale == "moonlight" else max(1.0, rows / columns) ** 0.5


def muon_direction(
    update: Tensor,
    matrices: tuple[int, ...] | None,
    dtype: torch.dtype = torch.bfloat16,
    scale: str = "original",
    heads: tuple[int, ...] | None = None,
) -> Tensor:
    """The orthogonalised `update` [rows, columns] in fp32 or wider, each fused matrix alone, times its `factor`.

    Of experts [E, rows, columns] each is treated alone. `matrices` are the rows of each fused matrix, and `heads` the
    rows of each of its heads, if these are matrices of their own.
    """
    wide = torch.promote_types(update.dtype, torch.float32)
    parts = update.split(list(matrices or (update.size(-2),)), dim=-2)
    if heads is not None:
        parts = tuple(part.unflatten(-2, (-1, rows)) for part, rows in zip(parts, heads, strict=True))
    found = [orthogonalize(part, dtype).to(wide) * factor(part.size(-2), part.size(-1), scale) for part in parts]
    return torch.cat([part if heads is None else part.flatten(-3, -2) for part in found], dim=-2)


class Muon(MatrixOptimizer):
    """Muon for groups whose `matrix` is true, AdamW for the others, in one optimizer.

    State: `momentum_buffer` of the matrices; `step`, `exp_avg`, `exp_avg_sq` of the rest.

    Args:
        groups, lr, betas, eps, fused: see `MatrixOptimizer`.
        momentum: averaging coefficient of the matrices' gradients (Nesterov form).
        scale: see `factor`.
        per_head: each head of queries, keys and values is a matrix of its own, where a layer says what they are.
        dtype: of the Newton-Schulz iteration. bf16 is enough for training and the fastest, but a last digit of a
            gradient may tip a rounding in it, so that two layouts of a run differ by more than fp32 does.

    Raises:
        ValueError: a parameter of a matrix group is not a matrix.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        momentum: float = 0.95,
        scale: str = "original",
        per_head: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        **adamw: Any,
    ) -> None:
        super().__init__(groups, {"momentum": momentum, "scale": scale}, **adamw)
        self.dtype, self.per_head = dtype, per_head
        self.travels = dtype  # the iteration begins by rounding to it

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> Muon:
        options = config.optimizer
        return cls(
            groups,
            momentum=options.muon_momentum,
            scale=options.muon_scale,
            per_head=OPTIMIZER.options_of(config)["per_head"],
            dtype=torch.float32 if config.precision.compute == "fp32" else torch.bfloat16,
            betas=options.betas,
            eps=options.epsilon,
            fused=use_fused(config, groups),
        )

    @classmethod
    def group_settings(cls, config: Config, logical: LogicalTensor) -> dict[str, Any]:
        """The rate of matrices follows the schedule as a multiple of `optimizer.lr`.

        Raises:
            ValueError: `optimizer.lr` is 0.
        """
        options, settings = config.optimizer, super().group_settings(config, logical)
        if options.lr == 0:
            raise ValueError("optimizer.lr: muon's matrices follow the schedule of optimizer.lr, which must be above 0")
        if not settings["matrix"]:
            return settings
        # An orthogonalised step changes what a layer gives by as much at every width; moonlight's factor grows with the
        # root of the width, and Adam's steps, which the tensor's scales are for, with the width.
        width = logical.scales.weight_decay ** (0.5 if options.muon_scale == "moonlight" else 0.0)
        scales = Scales(logical.scales.lr * logical.scales.weight_decay / width, width)
        return settings | {"lr_scale": options.muon_lr / options.lr, "scales": scales}

    def matrix_states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def values(self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
        """Advance the momentum; what is to be orthogonalised."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(average, group["momentum"])

    def direction(
        self, group: Mapping[str, Any], unit: OwnedUnit, whole: Tensor, states: dict[str, Tensor], done: int
    ) -> Tensor:
        heads = unit.tensor.heads if self.per_head else None
        rows = None if heads is None else tuple(each for _, each in heads)
        return muon_direction(whole, unit.tensor.matrices, self.dtype, group["scale"], rows)
