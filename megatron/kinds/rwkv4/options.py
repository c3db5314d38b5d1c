"""Options of the rwkv4 mixer, and their rules."""

from __future__ import annotations

from megatron.config.kind import LayerKind
from megatron.config.section import key
from megatron.kinds.common.options import divides_over_tensor_ranks
from megatron.kinds.common.rwkv.options import RWKVOptions


class RWKV4Options(RWKVOptions):
    chunk: int = key(
        256, "Tokens that are scanned at a time. Changes memory and speed, not the result.", unit="tokens", gt=0
    )


KIND = LayerKind(
    role="mixer",
    options=RWKV4Options,
    about="Options of the rwkv4 mixer (Peng et al. 2023).",
    layer="megatron.kinds.rwkv4.layer:RWKV4",
    rules=(divides_over_tensor_ranks(lambda at: at.hidden_size, "channels", "model.hidden_size"),),
    linears=lambda options: ("key", "value", "receptance", "output"),
    keeps_fp32=True,
    context="scans",
)
