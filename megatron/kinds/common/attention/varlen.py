"""Attention of documents that follow each other in memory: FlashAttention of variable lengths.

Its kernels take all tokens of a micro-batch as one row, and the begin of each document. The host would have to wait for
the GPU to know the number of documents, so it is always the largest allowed number. Missing documents have no tokens,
and cost the kernels almost no time.

Shapes: B samples of S tokens, T = B S tokens, N documents at most, n query heads, m key/value heads, D head_dim."""

import torch
from torch import Tensor

from .pattern import Pattern


def begins(documents_BS: Tensor, most: int) -> Tensor:
    """Where each of `most` documents a sample begins among all tokens, and at the end their number T. int32 [N + 1].

    Args:
        documents_BS: number of each token's document. Tokens of one document are adjacent. A micro-batch has at most N
            documents, which `engine/parts/document_limit.py` checks on the host.
    """
    samples, device = documents_BS.shape[0], documents_BS.device
    first = torch.ones(samples, 1, dtype=torch.bool, device=device)
    firsts_T = torch.cat([first, documents_BS[:, 1:] != documents_BS[:, :-1]], 1).flatten()
    number_T = firsts_T.cumsum(0) - 1
    return torch.searchsorted(number_T, torch.arange(samples * most + 1, device=device), out_int32=True)


def attend_by_documents(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, begins_N: Tensor) -> Tensor:
    """Causal attention within documents: q [B, n, S, D], k and v [B, m, S, D] to [B, n, S, D].

    torch's `varlen_attn` has changed its arguments from release to release. This is its operation, which has a gradient
    of its own."""
    samples, length = q.shape[0], q.shape[2]
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
    window = pattern.window if pattern.window is not None and pattern.window < length else None
    y_TnD = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        begins_N,
        begins_N,
        length,  # of the longest document
        length,
        0.0,
        window is None,  # causal, as the window is otherwise
        False,
        scale=pattern.scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return y_TnD.unflatten(0, (samples, length)).transpose(1, 2)
