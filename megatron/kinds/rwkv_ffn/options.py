"""Options of the channel mixes, the feed-forward networks of RWKV, and their rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.config.kind import LayerKind
from megatron.config.section import Derivable, Derived, key
from megatron.kinds.common.options import divides_over_tensor_ranks
from megatron.kinds.common.rwkv.options import EXCHANGE, RWKVOptions

if TYPE_CHECKING:
    from megatron.config.derive import View


def _width(kind: str, factor: float, multiple: int, formula: str) -> Derived:
    """A multiple of the width of the stream."""

    def width(own: dict[str, Any], at: View) -> int | None:
        return max(int(factor * at["model.hidden_size"]) // multiple, 1) * multiple if at.uses(kind) else None

    return Derived(formula, width, ("model.hidden_size",))


FOUR = (4, 1, "4 * model.hidden_size")
ALMOST_FOUR = (3.5, 32, "3.5 * model.hidden_size rounded down to 32")


class RWKV4FFNOptions(RWKVOptions):
    hidden_size: Derivable[int] = key(
        None, "Width of the channel mix.", unit="channels", derived=_width("rwkv4_ffn", *FOUR), gt=0
    )


class RWKV5FFNOptions(RWKVOptions):
    hidden_size: Derivable[int] = key(
        None, "Width of the channel mix.", unit="channels", derived=_width("rwkv5_ffn", *ALMOST_FOUR), gt=0
    )


class RWKV6FFNOptions(RWKVOptions):
    hidden_size: Derivable[int] = key(
        None, "Width of the channel mix.", unit="channels", derived=_width("rwkv6_ffn", *ALMOST_FOUR), gt=0
    )


class RWKV7FFNOptions(RWKVOptions):
    hidden_size: Derivable[int] = key(
        None, "Width of the channel mix.", unit="channels", derived=_width("rwkv7_ffn", *FOUR), gt=0
    )


def _kind(number: int, options: type[RWKVOptions]) -> LayerKind:
    return LayerKind(
        role="ffn",
        options=options,
        about=f"Options of the rwkv{number}_ffn feed-forward.",
        layer=f"megatron.kinds.rwkv_ffn.layer:RWKV{number}ChannelMix",
        rules=(divides_over_tensor_ranks("hidden_size", "channels"),),
        linears=lambda options: ("key", "value") if number == 7 else ("key", "value", "receptance"),
        exchange=EXCHANGE if number > 4 else "",
        context="scans",
    )


RWKV4_FFN = _kind(4, RWKV4FFNOptions)
RWKV5_FFN = _kind(5, RWKV5FFNOptions)
RWKV6_FFN = _kind(6, RWKV6FFNOptions)
RWKV7_FFN = _kind(7, RWKV7FFNOptions)
