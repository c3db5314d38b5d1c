"""Updates of DeepSpeed's optimizers on a GPU, decided on the device: the host waits for no norm."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor


def decide_on_device(optimizer: Any, inner: torch.optim.Optimizer) -> None:
    """Norm, clipping, and the choice to skip an update whose norm is not finite stay on the GPU.

    DeepSpeed's bf16 optimizer reads the norm four times in a step, and the GPU is idle each time. Here torch's fused
    AdamW divides by what clips the gradients and skips the update where the norm is not finite. The step then counts as
    applied, with an infinite norm, at which the guard ends the run when it arrives. Other optimizers keep DeepSpeed's
    way.

    Args:
        optimizer: DeepSpeed's.
        inner: the one of torch's form that it calls.
    """
    from deepspeed.runtime import bf16_optimizer, utils

    if not isinstance(optimizer, bf16_optimizer.BF16_Optimizer) or not (skips_on_device(inner) and _on_gpu(optimizer)):
        return
    step, fused = optimizer.step, inner

    def valid(norm: Any) -> bool:
        """In the place of DeepSpeed's question whether the norm is invalid."""
        fused.found_inf = (~torch.isfinite(norm)).to(torch.float32)  # type: ignore[attr-defined]
        return False

    def clip(input_tensors: Any, max_norm: float, global_norm: Tensor, mpu: Any = None, eps: float = 1e-6) -> Tensor:
        divisor = ((global_norm + eps) / max_norm).clamp(min=1.0)
        fused.grad_scale = divisor.to(torch.float32)  # type: ignore[attr-defined]
        return global_norm

    replaced = mock.patch.multiple(bf16_optimizer, is_invalid_grad_norm=valid, clip_tensors_by_global_norm=clip)
    unmasked = mock.patch.object(utils, "mask_nan_or_inf_with_val_inplace", lambda *_, **__: None)

    def update(*arguments: Any, **options: Any) -> Any:
        with replaced, unmasked:
            try:
                return step(*arguments, **options)
            finally:
                norm = optimizer._global_grad_norm
                optimizer._global_grad_norm = norm.nan_to_num(nan=torch.inf, posinf=torch.inf)

    optimizer.step = update


def _on_gpu(optimizer: Any) -> bool:
    return all(each.device.type == "cuda" for each in optimizer.fp32_groups_flat_partition)


def skips_on_device(inner: torch.optim.Optimizer) -> bool:
    """Whether an optimizer takes `found_inf` and `grad_scale`, and nothing stands before its step."""
    plain = isinstance(inner, torch.optim.AdamW) and "step" not in vars(inner)
    return plain and bool(inner.defaults.get("fused"))
