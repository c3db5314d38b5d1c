"""Options of the cca mixer, compressed convolutional attention, and their rules."""

from collections.abc import Iterator
from typing import Literal

from megatron.config.kind import KindUse, LayerKind
from megatron.config.problems import Problem
from megatron.config.section import Derivable, Needed, RotaryOptions, Section, key
from megatron.kinds.common.options import (
    derived_key,
    divides_heads,
    divides_over_tensor_ranks,
    heads_are_given,
    heads_have_channels,
    parts_of_sequences_have_the_taps,
    rotary_scaling_is_complete,
    rotated_channels_are_pairs,
)


class CCAOptions(Section):
    heads: Needed[int] = key(None, "Number of query heads. Needed where the pattern has a cca layer.", gt=0)
    kv_heads: Derivable[int] = derived_key(
        "Number of key/value heads. Fewer than heads compress keys and values further.",
        "model.cca.heads",
        lambda own, at: own["heads"],
        ".heads",
    )
    head_dim: Derivable[int] = derived_key(
        "Channels per head. heads * head_dim is the compressed width in which attention runs.",
        "model.hidden_size / (2 * model.cca.heads)",
        lambda own, at: at["model.hidden_size"] // (2 * own["heads"]) or None if own["heads"] else None,
        "model.hidden_size .heads",
        unit="channels",
    )
    depthwise: int = key(2, "Taps of the first convolution, of each channel.", unit="tokens", gt=0)
    grouped: int = key(2, "Taps of the second convolution, which mixes the channels of each head.", unit="tokens", gt=0)
    temperature: Literal["exponential", "linear"] = key(
        "exponential", "Keys are multiplied by exp(t), t from 0 (the paper), or by t itself, from 1 (released ZAYA1)."
    )
    position: Literal["rotary", "none"] = key("rotary", "Position information inside attention.")
    rotary: RotaryOptions = key(RotaryOptions, "Rotary embedding options, used when position is rotary.")
    window: int | None = key(None, "A token attends to itself and the window-1 tokens before it.", unit="tokens", gt=0)
    qkv_bias: bool = key(False, "Whether the query, key and value projections have biases.")
    output_bias: bool = key(False, "Whether the output projection has a bias.")


def halves_of_values_are_whole(at: KindUse[CCAOptions]) -> Iterator[Problem]:
    own = at.options
    if own.head_dim and own.kv_heads and own.head_dim * own.kv_heads % 2:
        yield at.problem(
            ".head_dim .kv_heads",
            rule="head_dim * kv_heads must be even: half of the value channels come from the token before",
            fix="use an even head_dim",
        )


KIND = LayerKind(
    role="mixer",
    options=CCAOptions,
    about="Options of the cca mixer, compressed convolutional attention (Figliolia et al. 2025).",
    layer="megatron.kinds.cca.layer:CCA",
    rules=(
        heads_are_given,
        divides_heads("kv_heads"),
        rotated_channels_are_pairs,
        halves_of_values_are_whole,
        heads_have_channels("head_dim", "heads", "heads"),
        rotary_scaling_is_complete,
        # A query head needs the keys of its group, and its keys all queries of the group.
        divides_over_tensor_ranks("kv_heads", "key/value heads"),
        parts_of_sequences_have_the_taps(lambda own: own.depthwise + own.grouped - 2, ".depthwise", ".grouped"),
    ),
    columns=True,
    context="attends",
    repeats=True,
    neighbours=True,
    linears=lambda options: ("query_key", "value", "output"),
    keeps_fp32=True,
)
