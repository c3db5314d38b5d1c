"""Keyed randomness: every draw is a function of its purpose, never of earlier calls of a generator.

A draw's key is (seed, site, sample number), and its counter is the element's place in the *logical* tensor. So
recomputation, pipeline cuts, tensor parallel slices, micro-batch sizes and restarts change nothing, and CPU and
GPU agree bit for bit. The mixer is a 32-bit integer hash with full avalanche (the "lowbias32" family, C. Wellons
2018), applied twice with different keys. All arithmetic is int64 modulo 2**32, which every device has."""

import hashlib

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def site_key(seed: int, *words: object) -> int:
    """A 32-bit key for a place in the model (layer number, purpose) under a seed."""
    text = "/".join(str(word) for word in (seed, *words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def uniform(key: int, samples_B: Tensor, counters: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), fp32.

    Args:
        key: of the site, from `site_key`.
        samples_B: int64 [B], global sample numbers.
        counters: int64 [...], place of each element in the logical tensor of one sample.

    Returns:
        [B, ...].
    """
    low_B, high_B = samples_B & _MASK, (samples_B >> 32) & _MASK
    sample_B = _mix(_mix(low_B ^ key) ^ high_B)
    key_B = sample_B.view(-1, *[1] * counters.dim())
    bits = _mix(_mix((counters & _MASK) ^ key_B) + key_B & _MASK)
    return (bits >> 8).to(torch.float32) * (1.0 / (1 << 24))


def dropout(x: Tensor, rate: float, key: int, samples_B: Tensor, counters: Tensor) -> Tensor:
    """Drop elements of x [B, ...] with probability `rate` and scale the rest by 1 / (1 - rate)."""
    keep = uniform(key, samples_B, counters) >= rate
    return x * keep.to(x.dtype) * (1.0 / (1.0 - rate))


def sequence_counters(places_s: Tensor, width: int) -> Tensor:
    """Counters [s, width] of the rows at these places of a [S, width] tensor."""
    return places_s.unsqueeze(1) * width + torch.arange(width, device=places_s.device)
