"""Plain causal attention on a CPU, a tile of queries at a time, with products of torch and a gradient that is written
out.

torch's flash attention for CPUs takes queries by 256 and keys by 512, so it computes all pairs of a sequence of 512,
and causal attention needs half of them. Here a tile has no keys behind its queries, its logits stay in the processor's
cache, and only the inputs are kept for the backward pass. Logits, their softmax, the gradients of both, and sums over
queries are fp32 (or the type of the inputs, if that is wider).

Shapes: B samples, S tokens, n query heads, m key/value heads, g = n / m. A key has D channels and a value E. A tile has
h heads, Q queries and K keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.model.recompute import keep_whole
from megatron.parallel.layout.precision import wide_type

QUERIES = 128  # of a tile
LOGITS = 1 << 18  # of a tile on each thread: 1 MiB, about the cache of one core


def attend_in_tiles(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale * q kᵀ) v over the keys up to each query.

    Args:
        q: [B, n, S, D], k: [B, m, S, D], v: [B, m, S, E].

    Returns:
        [B, n, S, E], with the heads of a token side by side in memory.
    """
    return _Tiles.apply(q, k, v, scale)


def attend_as_tiles(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    """The same for a tile of each sample, with its rounding and without gradients.

    Args:
        q: [B, n, Q, D], k: [B, m, K, D], v: [B, m, K, E].
        mask: added to logits.
    """
    group, wide = q.shape[1] // k.shape[1], wide_type(q.dtype)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = (q.to(wide) * scale) @ k.to(wide).transpose(-1, -2)
    return (logits + mask).softmax(-1).to(q.dtype) @ v


@dataclass(frozen=True)
class _Heads:
    """Some heads of one sample: query heads, key/value heads, and the number of query heads per key/value head."""

    sample: int
    queries: slice
    keys: slice
    group: int

    def q(self, tensor: Tensor) -> Tensor:
        """Of a tensor [B, n, S, ...]: [h, S, ...]."""
        return tensor[self.sample, self.queries]

    def kv(self, tensor: Tensor) -> Tensor:
        """Of a tensor [B, m, S, ...]: [h, S, ...], one key/value head for each query head."""
        part = tensor[self.sample, self.keys]
        return part if self.group == 1 else part.repeat_interleave(self.group, 0)

    def add_up(self, gradient_hSD: Tensor) -> Tensor:
        """The gradient of key/value heads from the gradients of query heads."""
        return gradient_hSD if self.group == 1 else gradient_hSD.unflatten(0, (-1, self.group)).sum(1)


def _heads(q: Tensor, k: Tensor) -> Iterator[_Heads]:
    samples, heads, length, _ = q.shape
    group = heads // k.shape[1]
    room = LOGITS * torch.get_num_threads() // (min(QUERIES, length) * length * group)
    for sample in range(samples):
        for first in range(0, k.shape[1], max(1, room)):
            last = min(first + max(1, room), k.shape[1])
            yield _Heads(sample, slice(first * group, last * group), slice(first, last), group)


class _Softmax:
    """Probabilities of tile after tile, in the same memory."""

    def __init__(self, q: Tensor, scale: float):
        self.scale, length = scale, q.shape[2]
        self.dtype = wide_type(q.dtype)
        rows = min(QUERIES, length)
        self.mask = torch.full((rows, rows), float("-inf"), dtype=self.dtype, device=q.device).triu(1)
        self.room: dict[str, Tensor] = {}

    def wide(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype)

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a @ b where the last product of this name was."""
        shape = (a.shape[0], a.shape[1], b.shape[2])
        size = shape[0] * shape[1] * shape[2]
        if name not in self.room or self.room[name].numel() < size:
            self.room[name] = a.new_empty(size)
        return torch.bmm(a, b, out=self.room[name][:size].view(shape))

    def __call__(self, q_hQD: Tensor, k_hDK: Tensor) -> Tensor:
        """[h, Q, K], of queries at the end of the keys. They are scaled already."""
        logits = self.product("logits", q_hQD, k_hDK)
        rows = logits.shape[1]
        logits[:, :, -rows:] += self.mask[:rows, :rows]
        return torch.softmax(logits, -1, out=logits)

    def tiles(self, length: int) -> Iterator[tuple[slice, int]]:
        """Queries of each tile, and the number of keys that they see."""
        for begin in range(0, length, QUERIES):
            end = min(begin + QUERIES, length)
            yield slice(begin, end), end


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        return keep_whole(lambda: _forward(q, k, v, scale)).detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v = ctx.saved_tensors
        of_q, of_k, of_v = (torch.empty_like(each) for each in (q, k, v))
        softmax = _Softmax(q, ctx.scale)
        for each in _heads(q, k):
            more_q, more_k, more_v = _gradients(each, softmax, q, k, v, of_y)
            each.q(of_q).copy_(more_q)
            of_k[each.sample, each.keys] = each.add_up(more_k)
            of_v[each.sample, each.keys] = each.add_up(more_v)
        return of_q, of_k, of_v, None


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    samples, heads, length, _ = q.shape
    y = q.new_empty(samples, length, heads, v.shape[-1]).transpose(1, 2)
    softmax = _Softmax(q, scale)
    for each in _heads(q, k):
        scaled, keys_mT = softmax.wide(each.q(q)) * scale, softmax.wide(each.kv(k)).mT
        values, out = each.kv(v), each.q(y)
        for rows, seen in softmax.tiles(length):
            shares = softmax(scaled[:, rows], keys_mT[:, :, :seen]).to(q.dtype)
            out[:, rows] = torch.bmm(shares, values[:, :seen])
    return y


def _gradients(
    heads: _Heads, softmax: _Softmax, q: Tensor, k: Tensor, v: Tensor, of_y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of these heads' queries, and of keys and values for each query head: [h, S, D or E], wide."""
    queries, keys, of_out = heads.q(q), heads.kv(k), heads.q(of_y)
    scaled, keys_mT = softmax.wide(queries) * softmax.scale, softmax.wide(keys).mT
    of_wide, values_mT = softmax.wide(of_out), softmax.wide(heads.kv(v)).mT
    of_q = torch.empty_like(scaled)
    of_k, of_v = torch.zeros_like(scaled), torch.zeros_like(of_wide)
    for rows, seen in softmax.tiles(q.shape[2]):
        shares = softmax(scaled[:, rows], keys_mT[:, :, :seen])
        of_v[:, :seen] += torch.bmm(shares.to(q.dtype).mT, of_out[:, rows])
        of_shares = softmax.product("gradient", of_wide[:, rows], values_mT[:, :, :seen])
        of_logits = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype).to(q.dtype)
        of_q[:, rows] = torch.bmm(of_logits, keys[:, :seen])
        of_k[:, :seen] += torch.bmm(of_logits.mT, queries[:, rows])
    return of_q.mul_(softmax.scale), of_k.mul_(softmax.scale), of_v
