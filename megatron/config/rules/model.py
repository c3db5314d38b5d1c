"""What a model needs to be one: a readable pattern, heads that divide, variants that exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..facts import Facts
from ..pattern import KINDS, PatternError, parse
from ..problems import Problem
from ..sections.model import RotaryScaling
from ..structure import nearest
from ..tokenizer_size import SizeUnknown, tokenizer_size
from ..variants import options_of


def pattern_is_readable(facts: Facts) -> Iterator[Problem]:
    try:
        parse(facts.config.model.layers)
    except PatternError as error:
        rule = f"{error.rule} (column {error.column}: {facts.config.model.layers[error.column - 1 :][:24]!r})"
        yield facts.problem("model.layers", rule=rule, fix=error.fix)


def mixers_have_heads(facts: Facts) -> Iterator[Problem]:
    for section in ("attention", "shared_attention", "gated_delta", "cca"):
        for prefix, own in kind_options(facts, section):
            if own.heads is None:
                yield facts.problem(
                    section_key(facts, prefix, "heads", section),
                    "model.layers",
                    rule=f"a pattern with {section} layers needs the number of heads",
                    fix=f"give model.{section}.heads, for example model.hidden_size / 64",
                )


def heads_have_channels(facts: Facts) -> Iterator[Problem]:
    """Widths of heads that follow from the model's: none is left where the heads are too many."""
    for section, width, count, unit in (
        ("gated_delta", "key_dim", "key_heads", "heads of keys"),
        ("cca", "head_dim", "heads", "heads"),
    ):
        for prefix, own in kind_options(facts, section):
            heads = getattr(own, count)
            if heads and getattr(own, width) is None:
                key = section_key(facts, prefix, count, section)
                yield facts.problem(
                    section_key(facts, prefix, width, section),
                    key if heads != own.heads else section_key(facts, prefix, "heads", section),
                    "model.hidden_size",
                    rule=f"no channel is left for each of {heads} {unit}",
                    fix=f"give {width}, or fewer heads",
                )


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def near(number: int, choices: list[int]) -> str:
    """The choices just below and above `number`, in words."""
    sides = [
        max((each for each in choices if each < number), default=None),
        min((each for each in choices if each > number), default=None),
    ]
    return " or ".join(str(each) for each in sides if each is not None)


def kind_options(facts: Facts, section: str) -> Iterator[tuple[str, object]]:
    """The options of each kind of the pattern that has them in this section of `model`, with the prefix of their
    keys."""
    kinds = {
        (each.name, each.variant): each
        for block in facts.blocks
        for each in block.kinds
        if KINDS[each.name].section == section
    }
    for (_, variant), kind in kinds.items():
        if variant is None:
            yield f"model.{section}", options_of(facts.config.model, kind)
        elif variant in facts.config.model.variants:
            yield f"model.variants.{variant}", options_of(facts.config.model, kind)


ATTENTIONS = ("attention", "shared_attention")


def attention_options(facts: Facts) -> Iterator[tuple[str, object]]:
    """The same for attention, shared or not; those without heads are left out."""
    return (
        (prefix, found)
        for section in ATTENTIONS
        for prefix, found in kind_options(facts, section)
        if found.heads is not None
    )


def section_key(facts: Facts, prefix: str, name: str, section: str) -> str:
    """The key to complain about: the variant's own option, or the base's where the variant does not say."""
    if prefix == f"model.{section}" or name in facts.config.model.variants[prefix.rsplit(".", 1)[1]]:
        return f"{prefix}.{name}"
    return f"model.{section}.{name}"


def key_of(facts: Facts, prefix: str, name: str) -> str:
    """`section_key` of an option of attention, shared or not."""
    return section_key(facts, prefix, name, attention_section(facts, prefix))


def attention_section(facts: Facts, prefix: str) -> str:
    """The section that these options belong to."""
    *_, last = prefix.split(".")
    if prefix == f"model.{last}":
        return last
    return next(KINDS[each.name].section for block in facts.blocks for each in block.kinds if each.variant == last)


def heads_fill_hidden_size(facts: Facts) -> Iterator[Problem]:
    for prefix, attention in attention_options(facts):
        twice = 2 if attention_section(facts, prefix) == "shared_attention" else 1
        width = twice * facts.config.model.hidden_size
        if width % attention.heads and not facts.given(key_of(facts, prefix, "head_dim")):
            yield facts.problem(
                key_of(facts, prefix, "heads"),
                "model.hidden_size",
                rule=f"the heads share {'2 * ' * (twice - 1)}model.hidden_size evenly, unless head_dim is given",
                fix=f"use {near(attention.heads, divisors(width))} heads, or give head_dim",
            )


def kv_heads_divide_heads(facts: Facts) -> Iterator[Problem]:
    for prefix, attention in attention_options(facts):
        if attention.kv_heads and attention.heads % attention.kv_heads:
            yield facts.problem(
                key_of(facts, prefix, "kv_heads"),
                key_of(facts, prefix, "heads"),
                rule="each key/value head serves the same number of query heads, so heads % kv_heads must be 0",
                fix=f"use {near(attention.kv_heads, divisors(attention.heads))} kv_heads",
            )


def mamba_heads_are_equal(facts: Facts) -> Iterator[Problem]:
    for prefix, mamba in kind_options(facts, "mamba"):
        inner = mamba.expand * facts.config.model.hidden_size
        if inner % mamba.heads:
            yield facts.problem(
                section_key(facts, prefix, "heads", "mamba"),
                "model.hidden_size",
                rule=f"the heads share the {inner} inner channels (expand * hidden_size) evenly",
                fix=f"use {near(mamba.heads, divisors(inner))} heads",
            )


def state_space_heads_are_whole(facts: Facts) -> Iterator[Problem]:
    for prefix, mamba2 in kind_options(facts, "mamba2"):
        inner = mamba2.expand * facts.config.model.hidden_size
        if inner % mamba2.head_dim:
            yield facts.problem(
                section_key(facts, prefix, "head_dim", "mamba2"),
                "model.hidden_size",
                rule=f"the {inner} inner channels (expand * hidden_size) are whole heads",
                fix=f"use head_dim = {near(mamba2.head_dim, divisors(inner))}",
            )
        elif inner // mamba2.head_dim % mamba2.groups:
            heads = inner // mamba2.head_dim
            yield facts.problem(
                section_key(facts, prefix, "groups", "mamba2"),
                "model.hidden_size",
                rule=f"each group has the same number of the {heads} heads (expand * hidden_size / head_dim)",
                fix=f"use groups = {near(mamba2.groups, divisors(heads))}",
            )
        if mamba2.most_step is not None and mamba2.most_step <= mamba2.least_step:
            yield facts.problem(
                section_key(facts, prefix, "most_step", "mamba2"),
                "model.mamba2.least_step",
                rule="the largest time step is above the smallest",
                fix="leave most_step out, or make it larger",
            )


def time_steps_are_a_range(facts: Facts) -> Iterator[Problem]:
    for section in ("mamba", "mamba2", "gated_delta"):
        for prefix, own in kind_options(facts, section):
            if own.time_step_high < own.time_step_low:
                yield facts.problem(
                    section_key(facts, prefix, "time_step_low", section),
                    section_key(facts, prefix, "time_step_high", section),
                    rule="initial time steps are from time_step_low to time_step_high",
                    fix="published models use 0.001 and 0.1",
                )


def delta_heads_share_keys(facts: Facts) -> Iterator[Problem]:
    for prefix, delta in kind_options(facts, "gated_delta"):
        if delta.heads and delta.key_heads and delta.heads % delta.key_heads:
            yield facts.problem(
                section_key(facts, prefix, "key_heads", "gated_delta"),
                section_key(facts, prefix, "heads", "gated_delta"),
                rule="each head of keys serves the same number of heads of values, so heads % key_heads must be 0",
                fix=f"use {near(delta.key_heads, divisors(delta.heads))} key_heads",
            )
        if delta.decay_high <= delta.decay_low:
            yield facts.problem(
                section_key(facts, prefix, "decay_high", "gated_delta"),
                section_key(facts, prefix, "decay_low", "gated_delta"),
                rule="the largest initial decay rate is above the smallest",
                fix="published models use 0 and 16",
            )


def cca_heads_fit(facts: Facts) -> Iterator[Problem]:
    for prefix, cca in kind_options(facts, "cca"):
        if not cca.heads or not cca.head_dim or not cca.kv_heads:
            continue
        if cca.heads % cca.kv_heads:
            yield facts.problem(
                section_key(facts, prefix, "kv_heads", "cca"),
                section_key(facts, prefix, "heads", "cca"),
                rule="each key/value head serves the same number of query heads, so heads % kv_heads must be 0",
                fix=f"use {near(cca.kv_heads, divisors(cca.heads))} kv_heads",
            )
        rotated = int(cca.head_dim * cca.rotary.fraction)
        if cca.position == "rotary" and cca.rotary.fraction > 0 and (rotated % 2 or not rotated):
            yield facts.problem(
                section_key(facts, prefix, "head_dim", "cca"),
                "model.cca.rotary.fraction",
                rule=f"rotary positions turn pairs of channels, and head_dim * fraction = {rotated} is no positive "
                "even number",
                fix="use an even head_dim, and a fraction that leaves an even number of channels",
            )
        elif cca.head_dim * cca.kv_heads % 2:
            yield facts.problem(
                section_key(facts, prefix, "head_dim", "cca"),
                section_key(facts, prefix, "kv_heads", "cca"),
                rule="half of the value channels (head_dim * kv_heads) come from the token before",
                fix="use an even head_dim",
            )


def shared_blocks_are_used(facts: Facts) -> Iterator[Problem]:
    """A block of shared weights that no layer uses would have no gradient."""
    calls: dict[str, int] = {}
    for block in facts.blocks:
        for each in block.kinds:
            if each.name == "shared_attention":
                prefix = f"model.variants.{each.variant}" if each.variant else "model.shared_attention"
                calls[prefix] = calls.get(prefix, 0) + 1
    for prefix, shared in kind_options(facts, "shared_attention"):
        if shared.blocks > calls[prefix]:
            yield facts.problem(
                section_key(facts, prefix, "blocks", "shared_attention"),
                "model.layers",
                rule=f"each shared block is used, and the pattern has {calls[prefix]} of these layers",
                fix=f"use at most {calls[prefix]} blocks",
            )


def attention_adapters_have_a_rank(facts: Facts) -> Iterator[Problem]:
    for prefix, shared in kind_options(facts, "shared_attention"):
        if shared.attention_adapters and not shared.adapter_rank:
            yield facts.problem(
                section_key(facts, prefix, "adapter_rank", "shared_attention"),
                section_key(facts, prefix, "attention_adapters", "shared_attention"),
                rule="adapters of queries, keys and values have a rank",
                fix="give adapter_rank (Zamba2 has 128), or use attention_adapters: false",
            )


def rotated_channels_are_pairs(facts: Facts) -> Iterator[Problem]:
    for prefix, attention in attention_options(facts):
        if attention.position != "rotary" or not attention.head_dim or attention.rotary.fraction == 0:
            continue
        rotated = int(attention.head_dim * attention.rotary.fraction)
        if rotated % 2 or not rotated:
            even = [
                pairs / attention.head_dim
                for pairs in (rotated // 2 * 2, rotated // 2 * 2 + 2)
                if 0 < pairs <= attention.head_dim
            ]
            fix = (
                f"use rotary.fraction = {' or '.join(f'{each:.6g}' for each in even)}, or another head_dim"
                if even
                else "use a head_dim of at least 2"
            )
            yield facts.problem(
                key_of(facts, prefix, "head_dim"),
                f"model.{attention_section(facts, prefix)}.rotary.fraction",
                rule="rotary positions turn pairs of channels, "
                f"and head_dim * fraction = {rotated} is no positive even number",
                fix=fix,
            )


def rotary_scaling_is_complete(facts: Facts) -> Iterator[Problem]:
    for section in (*ATTENTIONS, "cca"):
        for prefix, own in kind_options(facts, section):
            if own.position == "rotary":
                yield from _scaling_is_complete(
                    facts, section_key(facts, prefix, "rotary", section), own.rotary.scaling
                )


def _scaling_is_complete(facts: Facts, rotary: str, scaling: RotaryScaling) -> Iterable[Problem]:
    """`rotary`: the key of the rotary options; a variant has only those that differ, so it is named as a whole."""

    def problem(name: str, other: str, rule: str, fix: str) -> Problem:
        keys = (
            (rotary,)
            if rotary.startswith("model.variants.")
            else tuple(f"{rotary}.scaling.{each}" for each in (name, other))
        )
        return facts.problem(*keys, rule=rule, fix=fix)

    if scaling.type in ("llama3", "yarn") and scaling.original_length is None:
        yield problem(
            "original_length",
            "type",
            f"{scaling.type} scaling needs the original context length",
            "give scaling.original_length, the sequence length that the frequencies were trained with",
        )
    if scaling.type == "llama3" and scaling.high_frequency_factor <= scaling.low_frequency_factor:
        yield problem(
            "high_frequency_factor",
            "low_frequency_factor",
            "high_frequency_factor is above low_frequency_factor",
            "Llama 3 uses 4 and 1",
        )
    if scaling.type == "yarn" and scaling.beta_fast <= scaling.beta_slow:
        yield problem("beta_fast", "beta_slow", "beta_fast is above beta_slow", "YaRN uses 32 and 1")
    if scaling.type == "none" and scaling.factor != 1.0:
        yield problem(
            "factor",
            "type",
            "a factor has no effect without a type",
            "give rotary.scaling.type: linear, llama3 or yarn",
        )


def shared_norm_has_two_branches(facts: Facts) -> Iterator[Problem]:
    residual = facts.config.model.residual
    if residual.shared_norm and residual.form != "parallel":
        yield facts.problem(
            "model.residual.shared_norm",
            "model.residual.form",
            rule="one norm can only feed both branches in the parallel form",
            fix="use form: parallel, or shared_norm: false",
        )
    elif residual.shared_norm and residual.norm != "pre":
        yield facts.problem(
            "model.residual.shared_norm",
            "model.residual.norm",
            rule="post norms stand on each branch's output and cannot be shared",
            fix="use norm: pre, or shared_norm: false",
        )


def channel_scales_join_one_branch(facts: Facts) -> Iterator[Problem]:
    residual = facts.config.model.residual
    if residual.channel_scales and residual.form != "sequential":
        yield facts.problem(
            "model.residual.channel_scales",
            "model.residual.form",
            rule="the vectors scale a stream and the one branch that is added to it",
            fix="use form: sequential, or channel_scales: false",
        )


def learned_positions_cover_the_sequence(facts: Facts) -> Iterator[Problem]:
    embedding, length = facts.config.model.embedding, facts.config.training.sequence_length
    if embedding.position == "learned" and embedding.max_positions is not None and embedding.max_positions < length:
        yield facts.problem(
            "model.embedding.max_positions",
            "training.sequence_length",
            rule="there is a learned position for each token of a sequence",
            fix=f"use at least {length}, or leave max_positions out",
        )


def variants_exist(facts: Facts) -> Iterator[Problem]:
    known = facts.config.model.variants
    named = dict.fromkeys(each.variant for block in facts.blocks for each in block.kinds if each.variant)
    for name in named:
        if name not in known:
            fix = nearest(name, known) or f"add model.variants.{name} with the options that differ"
            yield facts.problem(
                "model.layers",
                rule=f"the pattern names the variant {name!r}, which model.variants does not have",
                fix=fix,
            )
    for name in known:
        if facts.blocks and name not in named:
            yield facts.problem_at(
                ("model", "variants", name),
                "model.layers",
                fatal=False,
                rule="the pattern never uses this variant",
                fix=f"write kind@{name} in model.layers, or remove the variant",
            )


def tokenizer_fits_vocabulary(facts: Facts) -> Iterator[Problem]:
    size = facts.config.model.vocab_size
    try:
        ids = tokenizer_size(facts.config.tokenizer.model_dump())
    except SizeUnknown:
        return
    if size is not None and ids > size:
        multiple = facts.config.model.vocab_multiple
        yield facts.problem(
            "model.vocab_size",
            "tokenizer.path",
            rule=f"the tokenizer has {ids} ids, more than the embedding has rows",
            fix=f"use at least {ids} ({-(-ids // multiple) * multiple} is a multiple of {multiple}), "
            "or leave vocab_size out",
        )


RULES = (
    pattern_is_readable,
    mixers_have_heads,
    delta_heads_share_keys,
    cca_heads_fit,
    heads_fill_hidden_size,
    kv_heads_divide_heads,
    heads_have_channels,
    time_steps_are_a_range,
    mamba_heads_are_equal,
    state_space_heads_are_whole,
    shared_blocks_are_used,
    attention_adapters_have_a_rank,
    rotated_channels_are_pairs,
    rotary_scaling_is_complete,
    shared_norm_has_two_branches,
    channel_scales_join_one_branch,
    learned_positions_cover_the_sequence,
    variants_exist,
    tokenizer_fits_vocabulary,
)


def vocabulary_is_known(facts: Facts) -> Iterator[Problem]:
    if facts.config.model.vocab_size is None:
        try:
            tokenizer_size(facts.config.tokenizer.model_dump())
            return  # a tokenizer that is there but was not asked: its own key is wrong and already reported
        except SizeUnknown as reason:
            yield facts.problem(
                "model.vocab_size",
                "tokenizer.type",
                "tokenizer.path",
                rule=f"the vocabulary's size is not known: {reason}",
                fix="give model.vocab_size, or a local tokenizer in tokenizer.path",
            )


INPUT_RULES = (vocabulary_is_known,)
