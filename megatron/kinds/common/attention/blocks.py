"""A rectangle of causal attention, queries of one run of tokens and keys of another: its part of the output, and of the
gradients where the whole output is known.

A part is normalised by itself. The log-sum-exp of its logits gives its weight among the parts (Milakov and Gimelshein
2018). Gradients need the log-sum-exp of all parts together (Dao et al. 2022).

Shapes: B samples, n query heads, m key/value heads, Q queries and K keys of the rectangle, D and E channels of a key
and of a value."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.parallel.layout.precision import at_least_fp32, to_device, wide_type
from megatron.parallel.layout.random import uniform

from .pattern import Dropped, Pattern

CHUNK = 1 << 24  # logits that are written out at once
LEAST_ROWS = 256  # of a window's queries
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class AttentionTile:
    """Queries from place `first_query` of the sequence on, and keys from `first_key` on.

    Attributes:
        mask: "none" where each query sees each key, "causal" where both are the same tokens and nothing else is masked,
            "some" where places, a window and documents decide.
        documents: of the queries [B, Q] and of the keys [B, K]. None where they mask nothing.
    """

    pattern: Pattern
    first_query: int
    first_key: int
    mask: str
    documents: tuple[Tensor, Tensor] | None = None
    dropout: Dropped | None = None

    def fused(self, q: Tensor, v: Tensor) -> bool:
        """Whether torch's kernel for CPUs, which gives the log-sum-exp, computes the rectangle."""
        plain = self.mask != "some" and not self.pattern.softcap and self.pattern.slopes is None and not self.dropout
        return plain and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]

    def pieces(self, q: Tensor, k: Tensor) -> "Iterator[tuple[slice, slice, AttentionTile]]":
        """Rows of queries, the keys that any of them may see by place and window (perhaps none), and their
        rectangle."""
        Q, K, window = q.shape[2], k.shape[2], self.pattern.window
        rows = max(1, CHUNK // max(1, q.shape[0] * q.shape[1] * K))
        if window is not None:
            rows = min(rows, max(window, LEAST_ROWS))  # more rows would read many keys that most of them do not see
        for begin in range(0, Q, rows):
            stop = min(begin + rows, Q)
            first, behind = 0, self.first_query + stop - self.first_key
            if window is not None:
                first = self.first_query + begin - window + 1 - self.first_key
            keys = slice(min(max(first, 0), K), min(max(behind, 0), K))
            mask = "some" if self.mask == "causal" else self.mask
            documents = None
            if self.documents is not None:
                documents = self.documents[0][:, begin:stop], self.documents[1][:, keys]
            place, key = self.first_query + begin, self.first_key + keys.start
            yield slice(begin, stop), keys, AttentionTile(self.pattern, place, key, mask, documents, self.dropout)

    def places(self, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Places in the sequence [Q, 1] and [K]."""
        q = torch.arange(self.first_query, self.first_query + queries, device=device).unsqueeze(1)
        return q, torch.arange(self.first_key, self.first_key + keys, device=device)

    def hidden(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """The mask, bool [1 or B, 1, Q, K]. True is hidden."""
        if self.mask == "none":
            return None
        q, k = self.places(queries, keys, device)
        hidden = k > q
        if self.pattern.window is not None:
            hidden = hidden | (q - k >= self.pattern.window)
        hidden = hidden[None, None]
        if self.documents is not None:
            own, other = self.documents
            hidden = hidden | (own[:, None, :, None] != other[:, None, None, :])
        return hidden

    def kept(self, heads: int, queries: int, keys: int, like: Tensor) -> Tensor | None:
        """Factors of dropout on probabilities, [B, n, Q, K]. None without dropout."""
        drop = self.dropout
        if drop is None:
            return None
        if drop.length is None:
            raise ValueError("a draw's key is the place in the whole sequence, so its length must be known")
        q, k = self.places(queries, keys, like.device)
        head = torch.arange(drop.first_head, drop.first_head + heads, device=like.device).view(-1, 1, 1)
        keep = uniform(drop.key, drop.samples_B, (head * drop.length + q) * drop.length + k) >= drop.rate
        return keep.to(like.dtype) / (1.0 - drop.rate)


def _product(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """scale a @ b of [B, n, ., .]. Several of the n may share one matrix b [B, m, ., .]."""
    B, n, rows, inner = a.shape
    own = torch.bmm(a.reshape(B * b.shape[1], -1, inner), b.flatten(0, 1))
    return own.view(B, n, rows, -1) * scale if scale != 1.0 else own.view(B, n, rows, -1)


def _summed(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """The transpose of a [B, n, Q, K] times b [B, n, Q, D], summed over the heads that share a key: [B, m, K, D]."""
    B = a.shape[0]
    a, b = a.reshape(B * heads, -1, a.shape[-1]), b.reshape(B * heads, -1, b.shape[-1])
    return torch.bmm(a.transpose(1, 2), b).unflatten(0, (B, heads))


def _logits(q: Tensor, k: Tensor, at: AttentionTile) -> tuple[Tensor, Tensor | None]:
    """Masked logits [B, n, Q, K], at least fp32, and their tanh where they are capped."""
    pattern, bent = at.pattern, None
    logits = at_least_fp32(_product(q, k.transpose(-1, -2))) * pattern.scale
    if pattern.softcap:
        bent = torch.tanh(logits / pattern.softcap)
        logits = pattern.softcap * bent
    if pattern.slopes is not None:
        place_q, place_k = at.places(q.shape[2], k.shape[2], q.device)
        slopes = to_device(torch.tensor(pattern.slopes, dtype=logits.dtype), q.device).view(-1, 1, 1)
        logits = logits + slopes * (place_k - place_q)
    hidden = at.hidden(q.shape[2], k.shape[2], q.device)
    return (logits if hidden is None else logits.masked_fill(hidden, float("-inf"))), bent


def tile_output(q: Tensor, k: Tensor, v: Tensor, at: AttentionTile) -> tuple[Tensor, Tensor]:
    """The output of only this rectangle [B, n, Q, E], and the log-sum-exp of its logits [B, n, Q], at least fp32.

    A query that sees no key has zeros, and -inf.

    Args:
        q: [B, n, Q, D], k: [B, m, K, D], v: [B, m, K, E].
    """
    if at.fused(q, v):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y, normalizer = _flash(q, k, v, 0.0, at.mask == "causal", scale=at.pattern.scale)
        return at_least_fp32(y), at_least_fp32(normalizer)
    y, normalizer = nothing_seen(q, v)
    for rows, keys, piece in at.pieces(q, k):
        if keys.start < keys.stop:
            y[:, :, rows], normalizer[:, :, rows] = tile_with_logits(q[:, :, rows], k[:, :, keys], v[:, :, keys], piece)
    return y, normalizer


def nothing_seen(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries that see no key, at least fp32."""
    wide = wide_type(q.dtype)
    return q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=wide), q.new_full(q.shape[:3], -torch.inf, dtype=wide)


def tile_with_logits(q: Tensor, k: Tensor, v: Tensor, at: AttentionTile) -> tuple[Tensor, Tensor]:
    """`tile_output`, with all logits at once."""
    logits, _ = _logits(q, k, at)
    normalizer = logits.logsumexp(-1)
    shares = (logits - finite(normalizer).unsqueeze(-1)).exp()
    keep = at.kept(q.shape[1], q.shape[2], k.shape[2], shares)
    shares = shares if keep is None else shares * keep
    return at_least_fp32(_product(shares.to(v.dtype), v)), normalizer


def finite(normalizer: Tensor) -> Tensor:
    """The same with 0 in the place of -inf, so that exp of a difference is 0 and not NaN where no key is seen."""
    return normalizer.masked_fill(normalizer == float("-inf"), 0.0)


def tile_gradients(
    of_y: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, normalizer: Tensor, shared: Tensor, at: AttentionTile
) -> tuple[Tensor, Tensor, Tensor]:
    """The rectangle's terms of the gradients of q, k and v, at least fp32.

    Args:
        of_y: gradient of the whole output, [B, n, Q, E].
        y: the whole output of these queries.
        normalizer: the log-sum-exp over all keys, [B, n, Q].
        shared: [B, n, Q], the sum of y * of_y over channels.
    """
    m = k.shape[1]
    if at.fused(q, v):
        group = q.shape[1] // m
        wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        found = _flash_backward(
            of_y, q, wide_k, wide_v, y, normalizer.contiguous(), 0.0, at.mask == "causal", scale=at.pattern.scale
        )
        of_q, of_k, of_v = (at_least_fp32(each) for each in found)
        return of_q, of_k.unflatten(1, (m, group)).sum(2), of_v.unflatten(1, (m, group)).sum(2)
    of_q, of_k, of_v = (torch.zeros_like(each, dtype=shared.dtype) for each in (q, k, v))
    for rows, keys, piece in at.pieces(q, k):
        if keys.start == keys.stop:
            continue
        own = [each[:, :, rows] for each in (of_y, q, normalizer, shared)]
        seen = [each[:, :, keys] for each in (k, v)]
        more_q, more_k, more_v = _written_gradients(own[0], own[1], own[2], own[3], seen[0], seen[1], piece)
        of_q[:, :, rows] = more_q
        of_k[:, :, keys] += more_k
        of_v[:, :, keys] += more_v
    return of_q, of_k, of_v


def _written_gradients(
    of_y: Tensor, q: Tensor, normalizer: Tensor, shared: Tensor, k: Tensor, v: Tensor, at: AttentionTile
) -> tuple[Tensor, Tensor, Tensor]:
    logits, bent = _logits(q, k, at)
    shares = (logits - finite(normalizer).unsqueeze(-1)).exp()
    of_shares = at_least_fp32(_product(of_y, v.transpose(-1, -2)))
    keep = at.kept(q.shape[1], q.shape[2], k.shape[2], shares)
    used = shares if keep is None else shares * keep
    of_shares = of_shares if keep is None else of_shares * keep
    of_logits = shares * (of_shares - shared.unsqueeze(-1))
    if bent is not None:
        of_logits = of_logits * (1.0 - bent * bent)
    of_logits = (of_logits * at.pattern.scale).to(q.dtype)
    of_v = _summed(used.to(of_y.dtype), of_y, v.shape[1])
    of_q, of_k = _product(of_logits, k), _summed(of_logits, q, k.shape[1])
    return at_least_fp32(of_q), at_least_fp32(of_k), at_least_fp32(of_v)
