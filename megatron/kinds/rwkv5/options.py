"""Options of the rwkv5 mixer, and their rules."""

from __future__ import annotations

from megatron.config.kind import LayerKind
from megatron.config.section import key
from megatron.kinds.common.rwkv.options import EXCHANGE, RWKVOptions, heads_are_whole, heads_divide_over_tensor_ranks


class RWKV5Options(RWKVOptions):
    head_dim: int = key(64, "Channels per head.", unit="channels", gt=1)
    norm_epsilon: float = key(64e-5, "Added to the variance in the norm of each head's output.", gt=0)
    chunk: int = key(
        256, "Tokens that are scanned at a time. Changes memory and speed, not the result.", unit="tokens", gt=0
    )


KIND = LayerKind(
    role="mixer",
    options=RWKV5Options,
    about="Options of the rwkv5 mixer (Eagle, Peng et al. 2024).",
    layer="megatron.kinds.rwkv5.layer:RWKV5",
    rules=(heads_are_whole, heads_divide_over_tensor_ranks),
    linears=lambda options: ("receptance", "value", "key", "gate", "output"),
    keeps_fp32=True,
    exchange=EXCHANGE,
    context="scans",
)
