"""AdamW with both moments in 8 bits, by blocks of 256 (Dettmers et al. 2021, arXiv 2110.02861), through torchao.

Blocks are cut from the flattened logical tensor (of each expert), so that they do not depend on the layout. Its owner
has it whole and keeps the codes and their scales."""

from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torchao.optim import subclass_8bit

from megatron.config import Config
from megatron.parallel.layout.shard import LogicalTensor

from .facts import ADAMW_8BIT
from .matrix import MatrixOptimizer, has_matrices
from .whole import OwnedUnit

BLOCK = 256


@cache
def levels(signed: bool, device: torch.device) -> Tensor:
    """Values of the 256 codes, as shares of a block's scale."""
    found = subclass_8bit.get_qmap_signed() if signed else subclass_8bit.get_qmap_unsigned()
    return torch.tensor(found, dtype=torch.float32, device=device)


class AdamW8bit(MatrixOptimizer):
    """AdamW with moments in 8 bits for matrices of `smallest` elements or more and whole blocks. AdamW for the rest.

    State, at the owner of a matrix: the codes `exp_avg_8bit`, `exp_avg_sq_8bit`, and a scale per block,
    `exp_avg_scale`, `exp_avg_sq_scale`.
    """

    @classmethod
    def treats(cls, config: Config, logical: LogicalTensor) -> bool:
        smallest, elements = ADAMW_8BIT.options_of(config)["smallest"], prod(logical.shape[-2:])
        return has_matrices(logical) and elements >= smallest and elements % BLOCK == 0

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
    """The running average with `share` of a new value, fp32. The states keep it in 8 bits."""
    codes, scales = states[f"{name}_8bit"].view(-1), states[f"{name}_scale"].view(-1)
    kept = subclass_8bit.OptimState8bit(codes, scales, levels(signed, codes.device), signed, dtype=torch.float32)
    average = kept.dequantize().lerp(value, share)
    kept.copy_(average)
    return average
