"""Options of layers that FlashAttention's kernels can compute. No torch."""

from __future__ import annotations

from typing import Any

FA3, FA3_FIX = "flash_attn_interface", "install FlashAttention 3 (the folder hopper/ of its repository)"
WIDEST = 256  # channels of a head


def why_not(options: Any, documents: bool, length: int) -> str | None:
    """The part of a layer's attention that FlashAttention does not compute, or None.

    Args:
        options: of the layer's kind.
        documents: whether it keeps documents apart. Otherwise a window is a mask too.
        length: tokens of a sequence.
    """
    given = {name: getattr(options, name, None) for name in ("dropout", "softcap", "sinks", "window")}
    if given["dropout"]:
        return "drops probabilities by key"
    if given["softcap"] or given["sinks"] or getattr(options, "position", None) == "alibi":
        return "changes its logits"
    if given["window"] and given["window"] < length and not documents:
        return "has a window"
    queries, values = widths(options)
    if queries is None or queries != values:
        return "has other channels for queries than for values"
    if queries > WIDEST or queries % 8:
        return f"has heads of {queries} channels, and not of 8, 16, ... or {WIDEST}"
    return None


def widths(options: Any) -> tuple[int | None, int | None]:
    """Channels of a head's queries and of its values."""
    values = getattr(options, "value_dim", None)
    if values is not None:
        return options.nope_dim + options.rope_dim, values
    return (getattr(options, "head_dim", None),) * 2
