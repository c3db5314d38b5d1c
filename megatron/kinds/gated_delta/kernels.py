"""The gated delta rule by the kernels of flash-linear-attention (fla), which is loaded at the first call."""

from __future__ import annotations

import torch
from torch import Tensor

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
    """See `delta_rule.gated_delta_rule`; for whole sequences without a past, and no state is returned.

    The kernels choose their own chunks. Inputs in fp32 and very wide keys, which they do not take, are left to torch.
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
        inputs, sequences = [each.flatten(0, 1).unsqueeze(0) for each in inputs], _bounds(starts_BS)
    q, k, v, decay, beta = (each.contiguous() for each in inputs)
    y, _ = chunk_gated_delta_rule(
        q, k, v, decay, beta, scale=q.shape[-1] ** -0.5, use_qk_l2norm_in_kernel=True, cu_seqlens=sequences
    )
    return y.view_as(v_BShV), None


def _bounds(starts_BS: Tensor) -> Tensor:
    """Where documents begin in all samples laid end to end, and the end, int64."""
    places = torch.arange(starts_BS.shape[1], device=starts_BS.device)
    begins = (starts_BS == places).flatten().nonzero().flatten()
    return torch.cat([begins, begins.new_tensor([starts_BS.numel()])])
