"""The recurrence of RWKV-7 by the kernels of flash-linear-attention (fla), which is loaded at the first call."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kinds.common.documents import document_bounds

from . import wkv7 as plain


def wkv7_of_fla(
    *inputs: Tensor, chunk: int, starts_BS: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor | None]:
    """`wkv7.wkv7` of whole sequences without a past. No state is returned. The kernels choose their own chunks.

    Args:
        dtype: of the inputs of matrix products. torch computes fp32, which the kernels would round.
    """
    if dtype == torch.float32:
        return plain.wkv7(*inputs, chunk=chunk, starts_BS=starts_BS)
    from fla.ops.rwkv7 import chunk_rwkv7

    v_BShN, rows, bounds = inputs[3], list(inputs), None
    if starts_BS is not None:  # documents of all samples one after another, as one sample
        rows, bounds = [each.flatten(0, 1).unsqueeze(0) for each in inputs], document_bounds(starts_BS)
    r, log_w, k, v, a, b = (each.contiguous() for each in rows)
    r, k, v, a, b = (each.to(dtype) for each in (r, k, v, a, b))
    y, _ = chunk_rwkv7(r, log_w, k, v, a, b, scale=1.0, cu_seqlens=bounds, safe_gate=True)  # decays are in its range
    return y.view_as(v_BShN).to(v_BShN.dtype), None
