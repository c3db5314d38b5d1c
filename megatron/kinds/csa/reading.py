"""Attention of a few heads' queries to single vectors that are key and value of all heads.

Shapes: B samples, n query heads of this rank, R queries, K keys, D channels."""

import math

import torch
from torch import Tensor

from megatron.parallel.layout.precision import at_least_fp32

ELEMENTS = 2**26  # of the logits of all heads at one time
FEW = 128  # queries, which a GPU computes about as fast as one


def logits(q_BnRD: Tensor, keys_BKD: Tensor, sinks_n: Tensor, read_BRK: Tensor) -> Tensor:
    """Of the keys that are read, and last of the sinks, [B, n, R, K + 1] in fp32. Queries are scaled."""
    heads = q_BnRD.shape[1]
    products = (q_BnRD.flatten(1, 2) @ keys_BKD.transpose(1, 2)).unflatten(1, (heads, -1))
    found = at_least_fp32(products).masked_fill(~read_BRK.unsqueeze(1), float("-inf"))
    sinks = at_least_fp32(sinks_n).view(1, -1, 1, 1).expand(*found.shape[:3], 1)
    return torch.cat([found, sinks], -1)


def attended(q_BnRD: Tensor, keys_BKD: Tensor, sinks_n: Tensor, read_BRK: Tensor) -> Tensor:
    """[B, n, R, D]. The sinks take a share of the softmax and have no value."""
    probabilities = logits(q_BnRD, keys_BKD, sinks_n, read_BRK).softmax(-1)[..., :-1].to(q_BnRD.dtype)
    return (probabilities.flatten(1, 2) @ keys_BKD).view_as(q_BnRD)


@torch.no_grad()
def probabilities_of(q_BnRD: Tensor, keys_BKD: Tensor, sinks_n: Tensor, read_BRK: Tensor, last: int) -> Tensor:
    """Probabilities of the last n keys, summed over the heads of this rank, [B, R, last] in fp32."""
    total: Tensor | None = None
    for head in range(q_BnRD.shape[1]):
        own = logits(q_BnRD[:, head : head + 1], keys_BKD, sinks_n[head : head + 1], read_BRK).softmax(-1)
        own = own[:, 0, :, keys_BKD.shape[1] - last : -1]
        total = own if total is None else total + own
    assert total is not None
    return total


def rows_at_once(samples: int, heads: int, keys: int, length: int) -> int:
    """Queries whose logits are computed at one time.

    R of them see R more keys than one does, so R (keys + R) logits of each head are at most `ELEMENTS`. More than
    `FEW` are never more than `keys`: most products would be masked.
    """
    pairs = ELEMENTS // (samples * heads)
    most = (math.isqrt(keys * keys + 4 * pairs) - keys) // 2
    return min(length, max(1, min(most, max(keys, FEW))))
