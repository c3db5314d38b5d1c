"""The gated delta rule by the kernels of flash-linear-attention (fla), which is loaded at the first call."""

import torch
from torch import Tensor

from megatron.kinds.common.recurrence.pieces import document_bounds

from . import delta_rule

WIDEST_KEY = 256  # channels of a head of keys that the kernels take


def gated_delta_rule(
    *inputs: Tensor, chunk: int, initial_BhKV: None = None, starts_BS: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """`delta_rule.gated_delta_rule` of whole sequences without a past. No state is returned.

    The kernels choose their own chunks. torch computes inputs in fp32, very wide keys and decays by channel."""
    q, k, v, decay, beta = inputs
    if v.dtype == torch.float32 or q.shape[-1] > WIDEST_KEY or decay.dim() == 4:
        return delta_rule.gated_delta_rule(*inputs, chunk=chunk, starts_BS=starts_BS)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    share = v.shape[2] // k.shape[2]
    rows = [q.repeat_interleave(share, 2), k.repeat_interleave(share, 2), v, decay, beta]
    sequences = None
    if starts_BS is not None:  # documents of all samples one after another, as one sample
        rows, sequences = [each.flatten(0, 1).unsqueeze(0) for each in rows], document_bounds(starts_BS)
    q, k, v, decay, beta = (each.contiguous() for each in rows)
    y, _ = chunk_gated_delta_rule(
        q, k, v, decay, beta, scale=q.shape[-1] ** -0.5, use_qk_l2norm_in_kernel=True, cu_seqlens=sequences
    )
    return y.view_as(inputs[2]), None
