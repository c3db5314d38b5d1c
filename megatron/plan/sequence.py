"""Messages of ranks that share a sequence for one layer, in closed form (docs/long_context.md has the derivation)."""

from math import lcm
from typing import Any, NamedTuple

from megatron.config import Config
from megatron.config.arithmetic.machine import widths
from megatron.config.pattern import Kind
from megatron.config.sequences import choose_method
from megatron.config.variants import options_of
from megatron.model.options import kind_of
from megatron.parallel.messages.traffic import SIZES

from .candidate import Candidate


class SequenceMessages(NamedTuple):
    """Equal messages of a rank, for one layer and one micro-batch."""

    operation: str  # as in `megatron.parallel.messages.traffic.Call`
    ranks: int  # that take part
    size: float  # bytes of all: of a send's messages, otherwise of the whole tensors
    messages: int  # how many
    backward: bool  # whether they are of the backward pass (a recomputed forward pass included)
    hidden: bool = False  # whether a rank computes with what it has while they are on their way


def exchanges(config: Config, kind: Kind, choice: Candidate, state: float = 0.0) -> list[SequenceMessages]:
    """Messages of a mixer, none if ranks share no sequence. Rings are counted to their last rank, although causality
    and windows let some ranks send less.

    Args:
        state: numbers per sample that a recurrence carries on a rank.
    """
    how, n = kind_of(config.model, kind).context, choice.context
    if n == 1 or how in ("", "alone"):
        return []
    if how != "attends":
        return _states(how, choice, 4.0 * choice.micro_batch * state)
    options: Any = options_of(config.model, kind)
    heads = options.heads // choice.tensor
    keys = max(1, (getattr(options, "kv_heads", None) or options.heads) // choice.tensor)
    of_key, of_value = (channels or 0 for channels in widths(options))
    parallel, tokens = config.parallel, choice.micro_batch * config.training.sequence_length / n
    method = choose_method(parallel.context_method, heads, n, parallel.context_ulysses)
    size = float(SIZES[config.precision.compute])
    again = 1 if choice.recompute == "full" else 0
    if method.name == "gather":
        whole = n * tokens * keys * (of_key + of_value) * size
        back = [SequenceMessages("reduce_scatter", n, whole, 1, True)]
        return [
            SequenceMessages("all_gather", n, whole, 1, False),
            *back,
            *again * [SequenceMessages("all_gather", n, whole, 1, True)],
        ]
    u = method.together
    found: list[SequenceMessages] = []
    if u > 1:
        keys = lcm(keys, u)
        into, out = tokens * (heads * of_key + keys * (of_key + of_value)) * size, tokens * heads * of_value * size
        once = 1 if choice.recompute != "none" else 0  # collectives of a selective recomputation run again, too
        found += [SequenceMessages("all_to_all", u, x, 1, backward) for x in (into, out) for backward in (False, True)]
        found += once * [SequenceMessages("all_to_all", u, each, 1, True) for each in (into, out)]
    ring = n // u
    if ring > 1:
        kv = tokens * keys * (of_key + of_value)  # of u times the tokens, 1 / u of the heads
        hops, fp32 = ring - 1, max(4.0, size)
        found += [
            SequenceMessages("send", ring, hops * kv * size, hops, False, True),
            SequenceMessages("send", ring, (1 + again) * hops * kv * size, (1 + again) * hops, True, True),
            SequenceMessages("send", ring, hops * kv * fp32, hops, True, True),
        ]
    return found


def rows_around(config: Config, choice: Candidate, rows: int, repeated: bool) -> list[SequenceMessages]:
    """Messages of a layer for matrices whose rows ranks share (`megatron.parallel.layers.folded`).

    Args:
        rows: elements of a rank's own runs.
        repeated: whether the forward pass runs again.
    """
    hops, size = choice.folded - 1, float(SIZES[config.precision.compute])
    if not hops or not rows:
        return []
    sent, fp32 = hops * rows, max(4.0, size)
    back = (1 + repeated) * hops
    return [
        SequenceMessages("send", choice.folded, sent * size, hops, False, True),
        SequenceMessages("send", choice.folded, back * rows * size, back, True, True),
        SequenceMessages("send", choice.folded, sent * fp32, hops, True, True),
    ]


def _states(how: str, choice: Candidate, size: float) -> list[SequenceMessages]:
    """States before a rank's tokens: by a prefix over all ranks at once, or from each rank to the next. The factor on a
    state is counted with the size of the state."""
    n = choice.context
    steps = (n - 2).bit_length() if how == "scans" and n > 2 else 0
    messages = 2 * steps + 1 if how == "scans" else 1
    passes = 1 if choice.recompute == "none" else 2
    return [
        SequenceMessages("send", 2, messages * size, messages, False),
        SequenceMessages("send", 2, passes * messages * size, passes * messages, True),
    ]
