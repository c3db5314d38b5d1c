"""RMSNorm as one kernel, as on GPUs, for tensors without values. On CPUs torch uses several operations, which keep 6
more bytes per bf16 element for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor


class _Fused(torch.autograd.Function):
    """Keeps the same tensors as torch's GPU kernel: the input, the weight, and a scale for each vector."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        scales = x.new_empty((*x.shape[:-dims], *dims * (1,)), dtype=torch.float32)
        context.save_for_backward(x, weight, scales)
        return torch.empty_like(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = context.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, epsilon: float | None = None) -> Tensor:
    """[..., *shape] of the same shape and type, without values."""
    return _Fused.apply(x, weight, len(shape))


@contextlib.contextmanager
def fused_norms() -> Iterator[None]:
    """Replace torch's RMSNorm by one kernel."""
    with mock.patch.object(F, "rms_norm", rms_norm):
        yield
