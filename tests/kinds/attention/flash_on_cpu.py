"""FlashAttention of variable lengths for CPUs: what its kernels give, by their definition, one document at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def documents(begins: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Tokens of each document, and which keys [Q, K] of it a query reads, causally."""
    for first, stop in zip(begins[:-1].tolist(), begins[1:].tolist()):
        if stop > first:
            place = torch.arange(stop - first)
            yield slice(first, stop), place.unsqueeze(1) - place


def probabilities(q: Tensor, k: Tensor, behind: Tensor, scale: float, left: int | None) -> tuple[Tensor, Tensor]:
    """Of queries [Q, n, D] and keys [K, n, D]: softmax [n, Q, K] and its normalizer [n, Q]."""
    allowed = (behind >= 0) & (behind <= (len(behind) if left is None else left))
    logits = torch.einsum("qnd,knd->nqk", q, k) * scale
    logits = logits.masked_fill(~allowed, -torch.inf)
    return logits.softmax(-1), logits.logsumexp(-1)


def forward(q, k, v, begins, begins_k, longest, _longest_k, dropout, causal, debug, **options):
    """As the schema of `aten::_flash_attention_forward`."""
    left = options.get("window_size_left")
    assert causal == (left is None) and (left is None or options["window_size_right"] == 0)
    assert begins is begins_k and not dropout and begins.dtype == torch.int32 and begins[-1] == len(q)
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    y, normalizer = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for at, behind in documents(begins):
        assert at.stop - at.start <= longest
        p, normalizer[:, at] = probabilities(q[at], k[at], behind, options["scale"], left)
        y[at] = torch.einsum("nqk,knd->qnd", p, v[at])
    nothing = q.new_zeros(2, dtype=torch.int64)
    return y, normalizer, nothing, nothing[:0], q.new_empty(0)


def backward(grad, q, k, v, y, normalizer, begins, _begins_k, *_rest, scale, window_size_left=None, **_options):
    """As the schema of `aten::_flash_attention_backward`: by the formulas of FlashAttention (Dao et al. 2022)."""
    group, keys = q.shape[1] // k.shape[1], k.shape[1]
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    dq, dk, dv = (torch.zeros_like(each) for each in (q, k, v))
    for at, behind in documents(begins):
        p, again = probabilities(q[at], k[at], behind, scale, window_size_left)
        torch.testing.assert_close(again, normalizer[:, at])
        dv[at] = torch.einsum("nqk,qnd->knd", p, grad[at])
        dp = torch.einsum("qnd,knd->nqk", grad[at], v[at])
        ds = p * (dp - (grad[at] * y[at]).sum(-1).T.unsqueeze(-1)) * scale
        dq[at] = torch.einsum("nqk,knd->qnd", ds, k[at])
        dk[at] = torch.einsum("nqk,qnd->knd", ds, q[at])
    return dq, *(each.unflatten(1, (keys, group)).sum(2) for each in (dk, dv))


@contextmanager
def flash_attention() -> Iterator[None]:
    """torch's operations with these in place of kernels, on CPUs. Only torch's own function remembers gradients."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield
    finally:
        library._destroy()
