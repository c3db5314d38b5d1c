"""The causal convolution by the kernels of causal_conv1d, which is loaded at the first call.

It takes what the torch function of its name takes and gives the same, for whole sequences without a past. Other numbers
of taps than the kernels have are left to torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config.kernels import installed

from . import convolution


def causal_convolution(
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


def sequences(starts_BS: Tensor | None) -> Tensor | None:
    """Numbers of documents: tokens are of one document where their starts are equal."""
    return None if starts_BS is None else starts_BS.to(torch.int32)
