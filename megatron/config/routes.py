"""Names of the columns that have the experts of tokens, for replays of routing."""

from collections.abc import Mapping
from typing import Any

from megatron.config.kind import kinds_of
from megatron.config.variants import options_of


def route_names(layer: int, count: int) -> tuple[str, ...]:
    """The column of each of a token's experts in a layer. -1 there leaves the token to the router."""
    return tuple(f"experts.{layer}.{place}" for place in range(count))


def route_columns(model: Any) -> Mapping[int, tuple[str, ...]]:
    """`route_names` of each layer with experts of a model's section, by its number in the stack."""
    kinds, found = kinds_of(tuple(model.extensions)), {}
    for number, block in enumerate(model.blocks):
        if block.ffn is not None and kinds[block.ffn.name].experts(options_of(model, block.ffn)):
            found[number] = route_names(number, options_of(model, block.ffn).top_k)
    return found


def choices_of(model: Any, layer: int) -> int:
    """The number of a layer's experts, and of none where tokens may use no expert."""
    ffn = model.blocks[layer].ffn
    own = options_of(model, ffn)
    skips = getattr(getattr(own, "router", None), "skip", False)
    return kinds_of(tuple(model.extensions))[ffn.name].experts(own) + bool(skips)
