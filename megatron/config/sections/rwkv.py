"""Options of the RWKV mixers and of their channel mixes."""

from __future__ import annotations

from typing import Literal

from .base import Section, key

Start = Literal["published", "uniform", "model"]


class RWKVOptions(Section):
    """What all of them share."""

    init: Start = key(
        "published",
        "How matrices start: published (orthogonal with the authors' gains; what writes to the stream is 0), uniform "
        "(the authors' simplified recipe for RWKV-7; 1/sqrt(fan in) in the others), or model (model.init's schemes). "
        "Everything else starts as published.",
    )


class RWKV4Options(RWKVOptions):
    chunk: int = key(
        256, "Tokens that are scanned at a time; changes memory and speed, not the result.", unit="tokens", gt=0
    )


class RWKV5Options(RWKVOptions):
    head_dim: int = key(64, "Channels per head.", unit="channels", gt=1)
    norm_epsilon: float = key(64e-5, "Added to the variance in the norm of each head's output.", gt=0)
    chunk: int = key(
        256, "Tokens that are scanned at a time; changes memory and speed, not the result.", unit="tokens", gt=0
    )


class RWKV6Options(RWKV5Options):
    mix_rank: int = key(32, "Rank of each of the five matrices that shift the token mix.", gt=0)
    decay_rank: int = key(64, "Rank of the matrix that moves the decays.", gt=0)


class RWKV7Options(RWKVOptions):
    head_dim: int = key(64, "Channels per head.", unit="channels", gt=1)
    decay_rank: int | None = key(
        None, "Rank of the matrix that moves the decays.", derived="2.5 sqrt(model.hidden_size), in steps of 32", gt=0
    )
    rate_rank: int | None = key(
        None,
        "Rank of the matrix that gives the in-context learning rates.",
        derived="2.5 sqrt(model.hidden_size), in steps of 32",
        gt=0,
    )
    value_rank: int | None = key(
        None,
        "Rank of the matrix that blends values with those of the first RWKV-7 layer.",
        derived="1.7 sqrt(model.hidden_size), in steps of 32",
        gt=0,
    )
    gate_rank: int | None = key(
        None, "Rank of the matrix that gates the output.", derived="5 sqrt(model.hidden_size), in steps of 32", gt=0
    )
    norm_epsilon: float = key(64e-5, "Added to the variance in the norm of each head's output.", gt=0)
    # Above 128 the products of decays inside a chunk would leave the range of fp32.
    chunk: int = key(32, "Tokens per chunk; changes memory and speed, not the result.", unit="tokens", gt=0, le=128)


class RWKV4FFNOptions(RWKVOptions):
    hidden_size: int | None = key(
        None, "Width of the channel mix.", unit="channels", derived="4 * model.hidden_size", gt=0
    )


class RWKV5FFNOptions(RWKVOptions):
    hidden_size: int | None = key(
        None, "Width of the channel mix.", unit="channels", derived="3.5 * model.hidden_size rounded down to 32", gt=0
    )


class RWKV6FFNOptions(RWKV5FFNOptions):
    pass


class RWKV7FFNOptions(RWKV4FFNOptions):
    pass
