"""Options of the attention mixer, and their rules."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from megatron.config.kind import KindUse, LayerKind
from megatron.config.optimizer_kind import optimizer_kind
from megatron.config.problems import Problem, divisors, near
from megatron.config.section import Derivable, Needed, RotaryOptions, Section, key
from megatron.kinds.common.options import (
    derived_key,
    divides_heads,
    divides_over_tensor_ranks,
    heads_are_given,
    rotary_scaling_is_complete,
    rotated_channels_are_pairs,
)


class AttentionOptions(Section):
    heads: Needed[int] = key(None, "Number of query heads. Needed where the pattern has an attention layer.", gt=0)
    kv_heads: Derivable[int] = derived_key(
        "Number of key/value heads (GQA, 1 is MQA).", "model.attention.heads", lambda own, at: own["heads"], ".heads"
    )
    head_dim: Derivable[int] = derived_key(
        "Channels per head.",
        "model.hidden_size / model.attention.heads",
        lambda own, at: at["model.hidden_size"] // own["heads"] or None if own["heads"] else None,
        "model.hidden_size .heads",
        unit="channels",
    )
    position: Literal["rotary", "alibi", "none"] = key("rotary", "Position information inside attention.")
    rotary: RotaryOptions = key(RotaryOptions, "Rotary embedding options, used when position is rotary.")
    window: int | None = key(None, "A token attends to itself and the window-1 tokens before it.", unit="tokens", gt=0)
    qk_norm: Literal["none", "head", "full"] = key(
        "none", "Normalise queries and keys: per head with a shared weight (Qwen3), or over their whole width (OLMo-2)."
    )
    values: Literal["projected", "keys"] = key(
        "projected",
        "keys: a head's values are its projected keys, before their norm and positions. There is no matrix of values "
        "(Gemma 4).",
    )
    keys: Literal["own", "earlier"] = key(
        "own",
        "earlier: the layer makes no keys and values. It reads the keys and values of the last layer before it with "
        "keys: own and the same other options (Gemma 4 E2B and E4B).",
    )
    value_norm: bool = key(False, "Divide each head's values by their root mean square (Gemma 4).")
    softcap: float | None = key(None, "Cap attention logits c as softcap * tanh(c / softcap).", gt=0)
    scale: Derivable[float] = derived_key(
        "Multiplier of query-key products.",
        "model.attention.head_dim ** -0.5",
        lambda own, at: own["head_dim"] ** -0.5 if own["head_dim"] else None,
        ".head_dim",
    )
    input_multiplier: float = key(1.0, "Multiplies the input of queries, keys and values.", gt=0)
    output_multiplier: float = key(1.0, "Multiplies the output (Falcon-H1).", gt=0)
    qk_clip: float | None = key(
        None,
        "QK-clip (Kimi K2): limit of a head's largest logit (scaled product of a query and a key) in a step. Above it, "
        "its queries and keys shrink so that the logit would have been the limit. The paper's value is 100.",
        gt=0,
    )
    sinks: bool = key(False, "A trained logit per head, 0 at first, has a share of the softmax and no value (GPT-OSS).")
    gate: Literal["none", "head", "channel"] = key(
        "none",
        "A gate on the output before its projection (Qiu et al. 2025): sigmoid of a further projection of the input, "
        "one number for each head, or one for each channel (Qwen3-Next).",
    )
    qkv_bias: bool = key(False, "Whether the projections of queries, keys, values and the gate have biases.")
    output_bias: bool = key(False, "Whether the output projection has a bias.")
    dropout: float = key(0.0, "Dropout of attention probabilities.", ge=0, lt=1)


def heads_fill(twice: bool) -> Callable[[KindUse[AttentionOptions]], Iterator[Problem]]:
    """A rule: the heads share the width that they read evenly, that of the stream or twice as much."""

    def heads_fill_hidden_size(at: KindUse[AttentionOptions]) -> Iterator[Problem]:
        heads, width = at.options.heads, (2 if twice else 1) * at.hidden_size
        if heads and width % heads and not at.given(".head_dim"):
            yield at.problem(
                ".heads model.hidden_size",
                rule=f"heads must share {'2 * ' if twice else ''}model.hidden_size evenly, unless head_dim is given",
                fix=f"use {near(heads, divisors(width))} heads, or give head_dim",
            )

    return heads_fill_hidden_size


# Key/value heads need no rule: where they do not divide, all ranks have all of them.
heads_divide_over_tensor_ranks = divides_over_tensor_ranks("heads", "heads")


def normalised_logits_are_not_clipped(at: KindUse[AttentionOptions]) -> Iterator[Problem]:
    if at.options.qk_clip is not None and at.options.qk_norm != "none":
        yield at.problem(
            ".qk_clip .qk_norm",
            rule="must be null with normalised queries and keys, whose size does not follow from their weights'",
            fix="remove it: qk_norm bounds the logits already",
        )


def keys_that_are_values_are_not_clipped(at: KindUse[AttentionOptions]) -> Iterator[Problem]:
    if at.options.qk_clip is not None and at.options.values == "keys":
        yield at.problem(
            ".qk_clip .values",
            rule="must be null where keys are the values too, which would shrink with them",
            fix="remove it, or use values: projected",
        )


def lenders(layers: Sequence[AttentionOptions | None]) -> dict[int, int | None]:
    """The places of layers that read earlier keys, with the place of the layer that has them. None: no layer has.

    Args:
        layers: options in the order of the pattern, None for places without such a layer.
    """
    found: dict[int, int | None] = {}
    owners: list[tuple[AttentionOptions, int]] = []
    for place, own in enumerate(layers):
        if own is not None and own.keys == "own":
            owners.append((own, place))
        elif own is not None:
            wanted = own.model_copy(update={"keys": "own"})
            found[place] = next((at for options, at in reversed(owners) if options == wanted), None)
    return found


def earlier_keys_are_there(at: KindUse[AttentionOptions]) -> Iterator[Problem]:
    if at.options.keys == "own":
        return
    uses, further = at.context.layers("attention"), at.context.further_block
    alone = [uses[place].variant for place, lender in lenders([use.options for use in uses]).items() if lender is None]
    read_again = further is not None and any((x.name, x.variant) == (at.kind, at.variant) for x in further.kinds)
    for others, wrong, rule, fix in (
        (
            "model.layers",
            at.variant in alone,
            "a layer before each of these must have keys of its own and the same other options",
            "put a layer with keys: own before them, or use keys: own",
        ),
        (
            "model.layers",
            any(block.recurrent for block in at.context.blocks),
            "must be own with a recurrent group, which hands no keys to later layers",
            "use keys: own",
        ),
        (
            "model.multi_token_prediction.block",
            read_again,
            "must be own in modules that predict further tokens, which have no layer before them",
            "use keys: own there, by a variant",
        ),
        (".qk_clip", at.options.qk_clip is not None, "must be own where logits are clipped", "use keys: own"),
    ):
        if wrong:
            yield at.problem(".keys", others, rule=rule, fix=fix)


def clipped_logits_are_seen_by_one_rank(at: KindUse[Any]) -> Iterator[Problem]:
    """Of any kind with a `qk_clip`."""
    if at.options.qk_clip is None:
        return
    config, other = at.config, ", or qk_norm: head" if hasattr(at.options, "qk_norm") else ""
    kind = optimizer_kind(config)
    for option, wrong, rule, fix in (
        (
            "parallel.context",
            config.parallel.context > 1,
            "where ranks share the tokens of a sample: no rank has all products of a head",
            f"use parallel.context=1{other}",
        ),
        (
            "training.sequence_chunks",
            config.training.sequence_chunks > 1,
            "with sequence_chunks: no chunk has all products of a head",
            "remove sequence_chunks, or use qk_norm: head",
        ),
        (
            "zero.offload_optimizer.device",
            config.zero.offload_optimizer.device != "none",
            "with offloaded masters, which it would change",
            f"use device: none{other}",
        ),
        (
            "optimizer.type",
            kind is not None and kind.averages,
            f"with {config.optimizer.type}: the average of the weights would keep the large logits",
            f"use another optimizer{other}",
        ),
    ):
        if wrong:
            yield at.problem(".qk_clip", option, rule=f"must be null {rule}", fix=fix)


# Rules of attention over any input.
RULES = (
    heads_are_given,
    divides_heads("kv_heads"),
    rotated_channels_are_pairs,
    rotary_scaling_is_complete,
    heads_divide_over_tensor_ranks,
)


def gate_width(options: AttentionOptions) -> int:
    """Outputs of the gate's projection. 0 without a gate."""
    return {"none": 0, "head": 1, "channel": options.head_dim}[options.gate] * options.heads


def key_value_parts(options: AttentionOptions) -> int:
    """Equal parts of the projection of keys and values. 0 where there is none."""
    return 0 if options.keys == "earlier" else 1 if options.values == "keys" else 2


def _weights(options: AttentionOptions, width: int) -> tuple[int, int]:
    if not (options.heads and options.kv_heads and options.head_dim):
        return 0, 0
    heads = 2 * options.heads + key_value_parts(options) * options.kv_heads
    return width * options.head_dim * heads + width * gate_width(options), 0


def _linears(options: AttentionOptions) -> tuple[str, ...]:
    key_value = ("", "key", "key_value")[key_value_parts(options)]
    return ("query", *filter(None, [key_value]), *(["gate"] if options.gate != "none" else []), "output")


KIND = LayerKind(
    role="mixer",
    options=AttentionOptions,
    about="Options of the attention mixer.",
    layer="megatron.kinds.attention.layer:Attention",
    rules=(
        *(*RULES, heads_fill(twice=False), normalised_logits_are_not_clipped, clipped_logits_are_seen_by_one_rank),
        *(keys_that_are_values_are_not_clipped, earlier_keys_are_there),
    ),
    draws=lambda options: options.dropout > 0.0,
    attends=True,
    columns=True,
    linears=_linears,
    head_width=lambda options: options.head_dim,
    clips_logits=lambda options: options.qk_clip is not None,
    weights=_weights,
    compiles=True,
    context="attends",
    repeats=True,
)
