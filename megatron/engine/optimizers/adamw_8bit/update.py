"""AdamW with both moments in 8 bits, by blocks of 256 (Dettmers et al. 2021, arXiv 2110.02861), through torchao.

A block's numbers depend on which elements are in it. So that they do not depend on the layout, blocks are those of the
flattened logical tensor (of each expert): its owner has it whole and keeps the codes and their scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torchao.optim import subclass_8bit

from megatron.config import Config
from megatron.parallel.layout.shard import LogicalTensor

from ..groups import use_fused
from ..matrix import MatrixOptimizer
from ..whole import OwnedUnit
from .options import OPTIMIZER

BLOCK = 256


@cache
def levels(signed: bool, device: torch.device) -> Tensor:
    """What the 256 codes stand for, as shares of a block's scale."""
    found = subclass_8bit.get_qmap_signed() if signed else subclass_8bit.get_qmap_unsigned()
    return torch.tensor(found, dtype=torch.float32, device=device)


class AdamW8bit(MatrixOptimizer):
    """AdamW with moments in 8 bits for matrices of `smallest` elements or more and whole blocks; AdamW for the rest.

    State, at the owner of a matrix: the codes `exp_avg_8bit`, `exp_avg_sq_8bit`, and of each block a scale,
    `exp_avg_scale`, `exp_avg_sq_scale`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **adamw: Any) -> None:
        super().__init__(groups, {}, **adamw)

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> AdamW8bit:
        common = config.optimizer
        return cls(groups, betas=common.betas, eps=common.epsilon, fused=use_fused(config, groups))

    @classmethod
    def group_settings(cls, config: Config, logical: LogicalTensor) -> dict[str, Any]:
        smallest = OPTIMIZER.options_of(config)["smallest"]
        matrix, elements = len(logical.shape) == 2 or logical.stacked, prod(logical.shape[-2:])
        narrow = matrix and elements >= smallest and elements % BLOCK == 0
        return {"matrix": narrow, "algorithm": "adamw_8bit" if narrow else "adamw"}

    def matrix_states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("step",)

    def owner_states(self, logical: LogicalTensor) -> dict[str, int | None]:
        scales = prod(logical.shape[-2:]) // BLOCK
        return {"exp_avg_8bit": None, "exp_avg_scale": scales, "exp_avg_sq_8bit": None, "exp_avg_sq_scale": scales}

    def owner_type(self, name: str) -> torch.dtype:
        return torch.uint8 if name.endswith("_8bit") else torch.float32

    def direction(
        self, group: Mapping[str, Any], unit: OwnedUnit, whole: Tensor, states: dict[str, Tensor], done: int
    ) -> Tensor:
        (beta1, beta2), t, gradient = group["betas"], done + 1, whole.float().reshape(-1)
        average = _advance(states, "exp_avg", gradient, 1 - beta1, signed=True)
        square = _advance(states, "exp_avg_sq", gradient.square(), 1 - beta2, signed=False)
        size = square.sqrt() / (1 - beta2**t) ** 0.5 + group["eps"]
        return (average / (1 - beta1**t) / size).view(unit.shape)


def _advance(states: Mapping[str, Tensor], name: str, value: Tensor, share: float, signed: bool) -> Tensor:
    """The average with `share` of a value, fp32, of which the states keep 8 bits."""
    codes, scales = states[f"{name}_8bit"].view(-1), states[f"{name}_scale"].view(-1)
    kept = subclass_8bit.OptimState8bit(codes, scales, levels(signed, codes.device), signed, dtype=torch.float32)
    average = kept.dequantize().lerp(value, share)
    kept.copy_(average)
    return average
