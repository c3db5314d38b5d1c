"""Options of the gated_delta mixer, and their rules."""

from collections.abc import Iterator
from typing import Literal

from megatron.config.kind import KindUse, LayerKind
from megatron.config.problems import Problem
from megatron.config.section import Derivable, Needed, key
from megatron.kinds.common.options import (
    RecurrentOptions,
    derived_key,
    divides_heads,
    divides_over_tensor_ranks,
    heads_are_given,
    heads_have_channels,
    in_order,
    parts_of_sequences_have_the_taps,
    time_steps_are_a_range,
)


class GatedDeltaOptions(RecurrentOptions):
    heads: Needed[int] = key(
        None, "Number of heads of values, each with a state. Needed where the pattern has a gated_delta layer.", gt=0
    )
    key_heads: Derivable[int] = derived_key(
        "Number of heads of queries and keys. Each serves the same number of heads of values.",
        "model.gated_delta.heads",
        lambda own, at: own["heads"],
        ".heads",
    )
    key_dim: Derivable[int] = derived_key(
        "Channels per head of queries and keys.",
        "3/4 * model.hidden_size / model.gated_delta.key_heads, rounded down",
        lambda own, at: 3 * at["model.hidden_size"] // (4 * own["key_heads"]) or None if own["key_heads"] else None,
        "model.hidden_size .key_heads",
        unit="channels",
    )
    value_dim: Derivable[int] = derived_key(
        "Channels per head of values.",
        "2 * model.gated_delta.key_dim",
        lambda own, at: 2 * own["key_dim"] if own["key_dim"] else None,
        ".key_dim",
        unit="channels",
    )
    convolution_bias: bool = key(False, "Whether the convolution has a bias.")
    negative_eigenvalues: bool = key(
        False, "The value under a key is replaced up to twice (beta in [0, 2]): a state can change its sign."
    )
    decay: Literal["head", "channel"] = key(
        "head",
        "Whether each head has one decay, or each of its channels of keys (Kimi delta attention). The latter "
        "and the gate are made by matrices of rank `rank`.",
    )
    rank: Derivable[int] = derived_key(
        "Rank of the matrices of the gate and of decays by channel. Only with decay: channel.",
        "model.gated_delta.value_dim with decay: channel",
        lambda own, at: own["value_dim"] if own["decay"] == "channel" else None,
        ".value_dim .decay",
    )
    gate: Literal["silu", "sigmoid"] = key("silu", "Activation of the gate. Kimi delta attention has sigmoid.")
    householders: int = key(1, "State updates per token, each with own key, value and beta (Gated DeltaProduct).", gt=0)
    norm_epsilon: Derivable[float] = derived_key(
        "Added to the mean square of each head's output before the root.",
        "model.norm.epsilon",
        lambda own, at: at["model.norm.epsilon"] if at.uses("gated_delta") else None,
        "model.norm.epsilon",
    )
    decay_low: float = key(0.0, "Initial decay rates A are uniform from here (and at least 1e-4) ...", ge=0)
    decay_high: float = key(16.0, "... to here.", gt=0)
    chunk: int = key(64, "Tokens per chunk. Changes memory and speed, not the result.", unit="tokens", gt=0)


def rank_is_of_channels(at: KindUse[GatedDeltaOptions]) -> Iterator[Problem]:
    if at.options.decay == "head" and at.options.rank is not None:
        yield at.problem(
            ".rank .decay",
            rule="must be null with one decay per head, whose matrices are not of low rank",
            fix="remove it, or use decay: channel",
        )


def _linears(options: GatedDeltaOptions) -> tuple[str, ...]:
    own = ("value_gate", "decay_beta") if options.decay == "head" else ("value", "decay", "gate", "beta")
    return ("query_key", *own, "output")


KIND = LayerKind(
    role="mixer",
    options=GatedDeltaOptions,
    about="Options of the gated_delta mixer (Yang, Kautz and Hatamizadeh 2024).",
    layer="megatron.kinds.gated_delta.layer:GatedDelta",
    rules=(
        heads_are_given,
        divides_heads("key_heads"),
        rank_is_of_channels,
        in_order("decay_low", "decay_high", "published models use 0 and 16"),
        heads_have_channels("key_dim", "key_heads", "heads of keys"),
        time_steps_are_a_range,
        divides_over_tensor_ranks("heads", "heads"),
        parts_of_sequences_have_the_taps(lambda own: own.convolution - 1, ".convolution"),
    ),
    packages={"fla": "pip install flash-linear-attention"},
    linears=_linears,
    columns=True,
    keeps_fp32=True,
    context="scans",
    repeats=True,
)
