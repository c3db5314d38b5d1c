"""Rotary position embedding (Su et al. 2021), half-split convention: channel i turns with channel i + r/2."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron.config.section import RotaryOptions
from megatron.model.stream import Stream
from megatron.parallel.layout.precision import at_least_fp32, wide_type


def frequencies(
    options: RotaryOptions, rotated: int, dtype: torch.dtype = torch.float32, length: int = 0
) -> tuple[Tensor, float]:
    """Angles per position, [rotated / 2], and the multiplier of cos and sin.

    linear: Chen et al. 2023. proportional: the same, with angles of 0 beyond the fraction of the channels that turn.
    llama3: the rule of Llama 3.1. yarn: Peng et al. 2023, with its attention factor. dynamic: a base that grows with
    the sequence (bloc97 and emozilla 2023).

    Args:
        length: tokens of the sequence, which dynamic frequencies depend on.
    """
    exponents = torch.arange(0, rotated, 2, dtype=dtype) / rotated
    scaling = options.scaling
    if scaling.type == "dynamic":
        longer = scaling.factor * max(length / scaling.original_length, 1.0) - (scaling.factor - 1.0)
        return 1.0 / ((options.base * longer ** (rotated / max(rotated - 2, 1))) ** exponents), 1.0
    inverse = 1.0 / (options.base**exponents)
    if scaling.type == "proportional":
        inverse[int(options.fraction * rotated) // 2 :] = 0.0
    if scaling.type in ("linear", "proportional"):
        return inverse / scaling.factor, 1.0
    if scaling.type == "llama3":
        turns = scaling.original_length * inverse / (2 * math.pi)  # rotations within the original context
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return kept * inverse + (1.0 - kept) * inverse / scaling.factor, 1.0
    if scaling.type == "yarn":
        return _yarn(inverse, options, rotated)
    return inverse, 1.0


def _yarn(inverse: Tensor, options: RotaryOptions, rotated: int) -> tuple[Tensor, float]:
    scaling = options.scaling

    def channel(rotations: float) -> float:
        length = scaling.original_length / (rotations * 2 * math.pi)
        return rotated * math.log(length) / (2 * math.log(options.base))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = (torch.arange(rotated // 2, dtype=inverse.dtype) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return stretched * inverse / scaling.factor + (1.0 - stretched) * inverse, factor


@lru_cache(maxsize=32)
def _table(
    options: RotaryOptions, rotated: int, length: int, device: torch.device, dtype: torch.dtype, seen: int
) -> tuple[Tensor, Tensor]:
    inverse, factor = frequencies(options, rotated, dtype, seen)
    angles = torch.outer(torch.arange(length, dtype=dtype), inverse)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def _turned(x_BSnD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A new tensor. Channels beyond the angles are copied."""
    half = cos.shape[-1]
    first, second = at_least_fp32(x_BSnD[..., :half]), at_least_fp32(x_BSnD[..., half : 2 * half])
    parts = [(first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin)]
    out = x_BSnD.new_empty(x_BSnD.shape)
    out[..., :half], out[..., half : 2 * half] = parts
    if 2 * half < x_BSnD.shape[-1]:
        out[..., 2 * half :] = x_BSnD[..., 2 * half :]
    return out


class _Turn(torch.autograd.Function):
    """A rotation's gradient is the rotation back: autograd would add up a zero-filled copy per slice instead."""

    @staticmethod
    def forward(ctx: Any, x_BSnD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x_BSnD, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad_BSnD: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad_BSnD, cos, -sin), None, None


def rotated_channels(options: RotaryOptions, head_dim: int) -> int:
    """Channels of a head that positions turn: an even number of its first ones. Proportional: all, some by 0."""
    fraction = options.fraction and 1.0 if options.scaling.type == "proportional" else options.fraction
    return int(fraction * head_dim) // 2 * 2


class Rotary:
    """Turns queries and keys by their positions. Holds no parameters. Tables are fp32 and made once per length."""

    def __init__(self, options: RotaryOptions, head_dim: int):
        self.rotated = rotated_channels(options, head_dim)
        self.use(options)

    def use(self, options: RotaryOptions) -> None:
        """Turn by other frequencies from now on. The number of channels stays."""
        self.options, self.name = options, repr(options)  # the name is a key that torch.compile can follow

    def angles(self, length: int, positions_BS: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [1 or B, S, 1, rotated/2], of positions (None: 0 ... length - 1, else all are < length).

        Args:
            like: the tensor to turn, for its device, and its type where that is wider than fp32.
        """
        rounded = 1 << max(6, (length - 1).bit_length())
        seen = length if self.options.scaling.type == "dynamic" else 0
        cos, sin = _table(self.options, self.rotated, rounded, like.device, wide_type(like.dtype), seen)
        if positions_BS is None:
            cos, sin = cos[:length].unsqueeze(0), sin[:length].unsqueeze(0)
        else:
            cos, sin = cos[positions_BS], sin[positions_BS]
        return cos.unsqueeze(2), sin.unsqueeze(2)

    def turn(self, x_BSnD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate the first `rotated` channels of each head, in fp32."""
        if self.rotated == 0:
            return x_BSnD
        return _Turn.apply(x_BSnD, *angles)


def stream_angles(
    rotary: Rotary, channels: int, stream: Stream, begin: int, x_BSH: Tensor, ranks: int
) -> tuple[Tensor, Tensor]:
    """cos and sin as of `Rotary.angles`.

    Args:
        channels: of a head.
        begin: number of tokens read before.
        x_BSH: this rank's positions, with type and device of the queries.
        ranks: that share the sequence.
    """
    length = x_BSH.shape[1]

    def make() -> tuple[Tensor, Tensor]:
        positions = stream.positions
        if positions is None and (begin or stream.chunk is not None):
            positions = torch.arange(begin, begin + length, device=x_BSH.device).unsqueeze(0)
        whole = begin + length * ranks if stream.chunk is None else stream.chunk.whole
        return rotary.angles(whole, positions, x_BSH)

    return stream.remember(("rotary", rotary.name, channels, begin, length), make)
