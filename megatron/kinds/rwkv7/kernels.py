"""The recurrence of RWKV-7 by the kernels of flash-linear-attention (fla), which is loaded at the first call."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kinds.common.documents import document_bounds

from . import wkv7 as plain


def wkv7_of_fla(
    r_BShN: Tensor,
    log_w_BShN: Tensor,
    k_BShN: Tensor,
    v_BShN: Tensor,
    a_BShN: Tensor,
    b_BShN: Tensor,
    *,
    chunk: int,
    initial_BhNN: None = None,
    starts_BS: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor | None]:
    """See `wkv7.wkv7`. For whole sequences without a past, and no state is returned.

    Args:
        dtype: of what the matrix products read. The kernels choose their own chunks. fp32, which they would round, is
            left to torch.
    """
    inputs = [r_BShN, log_w_BShN, k_BShN, v_BShN, a_BShN, b_BShN]
    if dtype == torch.float32:
        return plain.wkv7(*inputs, chunk=chunk, starts_BS=starts_BS)
    from fla.ops.rwkv7 import chunk_rwkv7

    bounds = None
    if starts_BS is not None:  # documents of all samples one after another, as one sample
        inputs, bounds = [each.flatten(0, 1).unsqueeze(0) for each in inputs], document_bounds(starts_BS)
    r, log_w, k, v, a, b = (each.contiguous() for each in inputs)
    r, k, v, a, b = (each.to(dtype) for each in (r, k, v, a, b))
    y, _ = chunk_rwkv7(r, log_w, k, v, a, b, scale=1.0, cu_seqlens=bounds, safe_gate=True)  # decays are in its range
    return y.view_as(v_BShN).to(v_BShN.dtype), None
