"""Options of the rwkv6 mixer, and their rules."""

from __future__ import annotations

from megatron.config.kind import LayerKind
from megatron.config.section import key
from megatron.kinds.common.rwkv.options import EXCHANGE, heads_are_whole, heads_divide_over_tensor_ranks
from megatron.kinds.rwkv5.options import RWKV5Options


class RWKV6Options(RWKV5Options):
    mix_rank: int = key(32, "Rank of each of the five matrices that shift the token mix.", gt=0)
    decay_rank: int = key(64, "Rank of the matrix that moves the decays.", gt=0)


KIND = LayerKind(
    role="mixer",
    options=RWKV6Options,
    about="Options of the rwkv6 mixer (Finch, Peng et al. 2024).",
    layer="megatron.kinds.rwkv6.layer:RWKV6",
    rules=(heads_are_whole, heads_divide_over_tensor_ranks),
    linears=lambda options: ("receptance", "value", "key", "gate", "output"),
    keeps_fp32=True,
    exchange=EXCHANGE,
    context="scans",
)
