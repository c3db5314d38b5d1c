"""The causal convolution by packages of kernels, which are loaded at the first call.

Each has the arguments and results of the torch function, for whole sequences without a past. torch computes numbers of
taps that the kernels of causal_conv1d lack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron.config.arithmetic.machine import installed

from ..documents import document_bounds
from . import convolution


def of_causal_conv1d(
    x_BSC: Tensor, weight_C1K: Tensor, bias_C: Tensor | None, past_BKC: None = None, starts_BS: Tensor | None = None
) -> Tensor:
    """See `convolution.causal_convolution`."""
    if not (installed("causal_conv1d") and 2 <= weight_C1K.shape[-1] <= 4 and x_BSC.shape[-1] % 8 == 0):
        return convolution.causal_convolution(x_BSC, weight_C1K, bias_C, None, starts_BS)
    from causal_conv1d import causal_conv1d_fn

    y_BCS = causal_conv1d_fn(
        x_BSC.transpose(1, 2), weight_C1K.squeeze(1), bias_C, seq_idx=sequences(starts_BS), activation="silu"
    )
    return y_BCS.transpose(1, 2)


def of_fla(
    x_BSC: Tensor, weight_C1K: Tensor, bias_C: Tensor | None, past_BKC: None = None, starts_BS: Tensor | None = None
) -> Tensor:
    """See `convolution.causal_convolution`."""
    from fla.modules.causal_conv1d import causal_conv1d

    x, bounds = x_BSC, None
    if starts_BS is not None:  # documents of all samples one after another, as one sample
        x, bounds = x_BSC.flatten(0, 1).unsqueeze(0), document_bounds(starts_BS)
    y, _ = causal_conv1d(x, weight_C1K.squeeze(1), bias_C, activation="silu", cu_seqlens=bounds)
    return y.view(x_BSC.shape)


def sequences(starts_BS: Tensor | None) -> Tensor | None:
    """Numbers of documents: tokens are of one document where their starts are equal."""
    return None if starts_BS is None else starts_BS.to(torch.int32)


CONVOLUTIONS: Mapping[str, Callable[..., Tensor]] = {
    "torch": convolution.causal_convolution,
    "mamba_ssm": of_causal_conv1d,
    "fla": of_fla,
}
