"""Messages of attention and recurrences over a shared sequence, in closed form: `attend_in`, `carried`."""

import math
from dataclasses import replace

from megatron.config.sequences import choose_method
from megatron.model.costs.exchanges import (
    BY_DOCUMENTS,
    NEVER,
    UNLESS_KEPT,
    Around,
    LayerMessage,
    document_starts,
    from_before,
    handed_on,
)

from .ring import Ring


def attention_messages(
    around: Around, heads: int, kv_heads: int, key_width: int, value_width: int, window: int | None
) -> list[LayerMessage]:
    """Messages of one layer's attention.

    Args:
        heads, kv_heads: of this rank.
        key_width, value_width: channels of a key, and of a value.
    """
    context = around.context
    if context.size == 1:
        return []
    found, tokens = [], around.samples * around.length
    if around.documents:
        found.append(
            LayerMessage("context", "all_gather", tokens * context.size, "int32", again=NEVER, shared="all documents")
        )
    method = choose_method(context.method, heads, context.size, context.together)
    if method.name == "gather":
        whole = tokens * context.size * kv_heads * (key_width + value_width)
        gradient = LayerMessage("context", "reduce_scatter", whole, backward=True)
        return [LayerMessage("context", "all_gather", whole), gradient, *found]
    u = method.together
    if u > 1:
        kv_heads = math.lcm(kv_heads, u)
        there = tokens * (heads * key_width + kv_heads * (key_width + value_width))
        for elements in (there, tokens * heads * value_width):
            for back in (False, True):
                found.append(LayerMessage("context", "all_to_all", elements, backward=back, split=True))
    if u < context.size:
        whole = u * around.length  # of a neighbourhood. Unknown documents mask nothing.
        ring = around.remember(("ring", u, window), lambda: Ring.of(context, u, whole, window, around.known))
        passed = _ring(ring, around.samples * kv_heads // u * u * around.length * (key_width + value_width))
        found += [replace(each, by_data=BY_DOCUMENTS) for each in passed] if around.documents else passed
    return found


def _ring(ring: Ring, elements: int) -> list[LayerMessage]:
    """Keys and values, forward and backward, and their gradients. With documents they go as far as one of them
    reaches."""
    hops, place, count = ring.hops, ring.place, len(ring.members)
    found: list[LayerMessage] = []
    for step in range(max(hops) + 1):
        owner, before = ((place - each) % count for each in (step, step + 1))
        moves = ["send"] * (hops[owner] > step) + ["recv"] * (hops[before] > step)
        for operation in moves:
            found.append(LayerMessage("context", operation, elements, again=UNLESS_KEPT))
            found.append(LayerMessage("context", operation, elements, backward=True))
        if step:
            moves = ["send"] * (hops[owner] >= step) + ["recv"] * ((hops[before] > step) + (hops[place] == step))
            found += [LayerMessage("context", operation, elements, "fp32", backward=True) for operation in moves]
    return found


def carried_messages(around: Around, made: int, left: int) -> list[LayerMessage]:
    """Messages of `carried`.

    Args:
        made, left: elements of `made` and `left` of `carried`, fp32.
    """
    ranks = around.context.size
    if ranks <= 2:
        return from_before(around, made, dtype="fp32")
    found, reach = from_before(around, made + left, dtype="fp32"), 1
    while reach < ranks - 1:
        further = 2 * reach < ranks - 1
        found += from_before(around, made + (left if further else 0), reach, "fp32")
        reach *= 2
    return found


def scan_messages(
    around: Around, *tokens_before: int, made: int = 0, left: int = 0, state: tuple[int, ...] = (), fixed: int = 0
) -> list[LayerMessage]:
    """Messages of a recurrent layer: document starts, channels of tokens before the first, and its state, also between
    the chunks of a sequence.

    Args:
        tokens_before: elements of each message, of one sample.
        made, left: of `carried`, of one sample. 0 where there is no state.
        state: elements of the tensors of the state, of one sample. Default: one tensor of `made` elements.
        fixed: elements of a further tensor, without gradient.
    """
    if around.context.size == 1:
        return []
    B = around.samples
    found = [*document_starts(around), *(each for size in tokens_before for each in from_before(around, B * size))]
    found += carried_messages(around, B * made, B * left) if made else []
    for size in tokens_before:
        found += handed_on(around, B * size)
    for size in state or ((made,) if made else ()):
        found += handed_on(around, B * size, "fp32")
    found += handed_on(around, B * fixed, "fp32", gradient=False) if fixed else []
    return found + (handed_on(around, B, "int32", gradient=False) if around.documents else [])
