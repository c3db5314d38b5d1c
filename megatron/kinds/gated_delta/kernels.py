"""The gated delta rule by the kernels of flash-linear-attention (fla), which is loaded at the first call."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kinds.common.documents import document_bounds

from . import delta_rule

WIDEST_KEY = 256  # channels of a head of keys that the kernels take


def gated_delta_rule(
    q_BSgK: Tensor,
    k_BSgK: Tensor,
    v_BShV: Tensor,
    decay_BSh: Tensor,
    beta_BSh: Tensor,
    *,
    chunk: int,
    initial_BhKV: None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`delta_rule.gated_delta_rule` of whole sequences without a past. No state is returned.

    The kernels choose their own chunks. torch computes inputs in fp32 and very wide keys.
    """
    if v_BShV.dtype == torch.float32 or q_BSgK.shape[-1] > WIDEST_KEY:
        return delta_rule.gated_delta_rule(
            q_BSgK, k_BSgK, v_BShV, decay_BSh, beta_BSh, chunk=chunk, starts_BS=starts_BS
        )
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    share = v_BShV.shape[2] // k_BSgK.shape[2]
    q, k = (each.repeat_interleave(share, 2) for each in (q_BSgK, k_BSgK))
    inputs, sequences = [q, k, v_BShV, decay_BSh, beta_BSh], None
    if starts_BS is not None:  # documents of all samples one after another, as one sample
        inputs, sequences = [each.flatten(0, 1).unsqueeze(0) for each in inputs], document_bounds(starts_BS)
    q, k, v, decay, beta = (each.contiguous() for each in inputs)
    y, _ = chunk_gated_delta_rule(
        q, k, v, decay, beta, scale=q.shape[-1] ** -0.5, use_qk_l2norm_in_kernel=True, cu_seqlens=sequences
    )
    return y.view_as(v_BShV), None
