"""The model: names that stand for something, its pattern and vocabulary, recurrence, parametrization."""

from collections.abc import Callable, Iterator

from megatron.config.problems import uniform_counts

from ..arithmetic.recurrence import core_of
from ..arithmetic.tokenizer_size import SizeUnknown, tokenizer_size
from ..arithmetic.wire import sends_blocks
from ..optimizer_kind import NOT_BUILT, kinds_inside, optimizer_kind
from ..parts import check_importable
from ..pattern import PatternError
from ..problems import Problem
from ..registry import ADDED, OPTIMIZER, Registry, RegistryError, registry_of
from ..rule_context import Check, RuleContext
from ..schema import Config, catalog
from ..sections.model import RecurrenceOptions
from ..source.structure import nearest
from ..tree import expand, get, leaves

RESIDUAL = "model.residual"
LARGEST = 2**31 - 1  # token files and kernels number tokens and channels with 32 bits


def pattern_is_readable(context: RuleContext) -> Iterator[Problem]:
    try:
        _ = context.config.model.blocks
    except PatternError as error:
        rule = f"{error.rule} (column {error.column}: {context.config.model.layers[error.column - 1 :][:24]!r})"
        yield context.problem("model.layers", rule=rule, fix=error.fix)


def variants_exist(context: RuleContext) -> Iterator[Problem]:
    known = context.config.model.variants
    named = dict.fromkeys(each.variant for block in context.blocks for each in block.kinds if each.variant)
    for name in named:
        if name not in known:
            rule = f"the variant {name!r} in the pattern must be defined in model.variants"
            fix = nearest(name, known) or f"add model.variants.{name} with the options that differ"
            yield context.problem("model.layers", rule=rule, fix=fix)
    for name in known:
        if context.blocks and name not in named:
            yield context.problem_at(
                ("model", "variants", name),
                "model.layers",
                fatal=False,
                rule="each variant must be used in the pattern",
                fix=f"write kind@{name} in model.layers, or remove the variant",
            )


def tokenizer_fits_vocabulary(context: RuleContext) -> Iterator[Problem]:
    size = context.config.model.vocab_size
    try:
        ids = tokenizer_size(context.config.tokenizer.model_dump())
    except SizeUnknown:
        return
    if size is not None and ids > size:
        multiple = context.config.model.vocab_multiple
        yield context.problem(
            "model.vocab_size tokenizer.path",
            rule=f"vocab_size must be at least the tokenizer's {ids} ids",
            fix=f"use at least {ids} ({-(-ids // multiple) * multiple} is a multiple of {multiple}), "
            "or remove vocab_size",
        )


def sizes_can_be_counted(context: RuleContext) -> Iterator[Problem]:
    for path, value in leaves(context.values["model"]):
        whole = ("model", *path)
        if isinstance(value, int) and value > LARGEST and context.origin(whole).given:
            rule = f"sizes of a model must be at most {LARGEST:,}"
            yield context.problem_at(whole, rule=rule, fix="give a smaller number")


def vocabulary_is_known(context: RuleContext) -> Iterator[Problem]:
    if context.config.model.vocab_size is None:
        try:
            tokenizer_size(context.config.tokenizer.model_dump())
            return  # there is a tokenizer, but it was not asked: its own key is wrong and already reported
        except SizeUnknown as reason:
            yield context.problem(
                "model.vocab_size tokenizer.type tokenizer.path",
                rule=f"the vocabulary size must be known: {reason}",
                fix="give model.vocab_size, or a local tokenizer in tokenizer.path",
            )


def _one_stream(other: str, wrong: Callable[[Config], bool], rule: str, fix: str) -> Check:
    return Check(
        f"{RESIDUAL}.streams {other}",
        lambda config: config.model.residual.streams > 1 and wrong(config),
        f"streams must be 1 {rule}",
        f"use streams: 1, or {fix}",
    )


CHECKS = (
    Check(
        f"{RESIDUAL}.shared_norm {RESIDUAL}.form",
        lambda c: c.model.residual.shared_norm and c.model.residual.form != "parallel",
        "shared_norm must go with the parallel form: only there one norm feeds both branches",
        "use form: parallel, or shared_norm: false",
    ),
    Check(
        f"{RESIDUAL}.shared_norm {RESIDUAL}.norm",
        lambda c: (
            c.model.residual.shared_norm and c.model.residual.form == "parallel" and c.model.residual.norm != "pre"
        ),
        "shared_norm must go with norm: pre, since a post norm acts on the output of one branch",
        "use norm: pre, or shared_norm: false",
    ),
    Check(
        f"{RESIDUAL}.channel_scales {RESIDUAL}.form",
        lambda c: c.model.residual.channel_scales and c.model.residual.form != "sequential",
        "channel_scales must go with the sequential form: they scale the stream and its one branch",
        "use form: sequential, or channel_scales: false",
    ),
    _one_stream(
        f"{RESIDUAL}.form",
        lambda c: c.model.residual.form != "sequential",
        "in the parallel form: rows are mixed by each branch in turn",
        "form: sequential",
    ),
    _one_stream(
        f"{RESIDUAL}.norm",
        lambda c: c.model.residual.norm == "sandwich",
        "with sandwich, which normalises one stream",
        "another norm",
    ),
    _one_stream(
        f"{RESIDUAL}.channel_scales",
        lambda c: c.model.residual.channel_scales,
        "with channel_scales, which scale one stream",
        "channel_scales: false",
    ),
    _one_stream(
        "model.layers",
        lambda c: any(block.side for block in c.model.blocks) or bool(core_of(c.model.blocks)),
        "with layers next to a mixer and in a recurrent group, which read one stream",
        "another pattern",
    ),
    _one_stream(
        "model.multi_token_prediction",
        lambda c: bool(c.model.further_blocks),
        "with modules that predict further tokens, which read one stream",
        "remove multi_token_prediction",
    ),
    Check(
        f"{RESIDUAL}.norm {RESIDUAL}.form",
        lambda c: c.model.residual.norm == "sandwich" and c.model.residual.form != "sequential",
        "sandwich must go with the sequential form: it normalises the stream after each branch",
        "use form: sequential, or norm: both",
    ),
    Check(
        f"{RESIDUAL}.norm {RESIDUAL}.form",
        lambda c: (
            c.model.residual.norm == "deepnorm"
            and (
                c.model.residual.form != "sequential"
                or c.model.residual.streams > 1
                or c.model.residual.channel_scales
                or bool(core_of(c.model.blocks))
                or any(block.side for block in c.model.blocks)
            )
        ),
        "deepnorm must go with the sequential form of one stream, without channel_scales, layers next to a mixer and "
        "recurrent groups: each branch is added to its own normed input",
        "use norm: pre, or a plain stack",
    ),
    Check(
        f"{RESIDUAL}.stream_multiplier {RESIDUAL}.norm",
        lambda c: c.model.residual.stream_multiplier != 1.0 and c.model.residual.norm != "deepnorm",
        "stream_multiplier must go with norm: deepnorm, which multiplies the normed stream",
        "use norm: deepnorm, or remove it",
    ),
    Check(
        "model.embedding.max_positions training.sequence_length",
        lambda c: (
            c.model.embedding.position == "learned"
            and c.model.embedding.max_positions is not None
            and c.model.embedding.max_positions < c.training.sequence_length
        ),
        "max_positions must be at least training.sequence_length",
        lambda c: f"use at least {c.training.sequence_length}, or remove max_positions",
    ),
)
INPUT_RULES = (vocabulary_is_known,)


SECTION = "model.recurrence"


def options_need_a_core(context: RuleContext) -> Iterator[Problem]:
    if core_of(context.blocks) or not context.blocks:
        return
    for name in RecurrenceOptions.model_fields:
        if context.given(f"{SECTION}.{name}"):
            yield context.warning(
                f"{SECTION}.{name} model.layers",
                rule="must go with a recurrent group in model.layers, and has no effect here",
                fix="write recurrent(...) around the blocks that are repeated, or remove the key",
            )


def rounds_have_rows(context: RuleContext) -> Iterator[Problem]:
    if context.config.model.residual.streams == 1 and context.given(f"{RESIDUAL}.sinkhorn_iterations"):
        yield context.warning(
            f"{RESIDUAL}.sinkhorn_iterations {RESIDUAL}.streams",
            rule="must go with several streams, and has no effect here",
            fix="use streams: 4, or remove sinkhorn_iterations",
        )


def token_inputs_suit_the_rest(context: RuleContext) -> Iterator[Problem]:
    config, key = context.config, f"{RESIDUAL}.token_inputs"
    if not config.model.residual.token_inputs:
        return
    parallel = config.parallel
    for other, wrong, reason, fix in (
        (f"{RESIDUAL}.streams", config.model.residual.streams > 1, "with several rows", "streams: 1"),
        ("model.layers", bool(core_of(context.blocks)), "with a recurrent group", "a plain pattern"),
        ("model.multi_token_prediction.depth", bool(context.further_block), "with further blocks", "depth: 0"),
        ("model.dropout", config.model.dropout > 0.0, "with dropout, which it does not draw", "model.dropout=0"),
        (
            "model.parametrization.type",
            config.model.parametrization.type != "standard",
            "under a parametrization, which has no rates for its matrices",
            "type: standard",
        ),
        ("parallel.columns", parallel.columns > 1, "with columns: it reads all channels", "parallel.columns=1"),
        ("parallel.folded", parallel.folded > 1, "where ranks share rows of matrices", "parallel.folded=1"),
        ("parallel.depth", parallel.depth > 1, "where ranks share rows of matrices", "parallel.depth=1"),
        (
            "training.sequence_chunks",
            config.training.sequence_chunks > 1,
            "with chunks of sequences",
            "training.sequence_chunks=1",
        ),
        (
            "parallel.communication.compress.pipeline",
            sends_blocks(parallel),
            "with int8_block, which rounds token ids",
            "parallel.communication.compress.pipeline=bf16",
        ),
    ):
        if wrong:
            yield context.problem(f"{key} {other}", rule=f"must be 0 {reason}", fix=f"use token_inputs: 0, or {fix}")


def layers_can_be_repeated(context: RuleContext) -> Iterator[Problem]:
    kinds = [each for index in core_of(context.blocks) for each in context.blocks[index].kinds]
    for name in dict.fromkeys(each.name for each in kinds):
        if not context.kinds[name].repeats:
            able = ", ".join(sorted(each for each, kind in context.kinds.items() if kind.repeats))
            yield context.problem(
                "model.layers",
                rule=f"layers of a recurrent group must be of kinds that can be repeated, and {name} is none: it "
                "carries something from layer to layer, or counts by layer",
                fix=f"put {name} before or after the group, in which there may be {able}",
            )


def nothing_is_drawn_inside(context: RuleContext) -> Iterator[Problem]:
    """Dropout is keyed by layer and sample, and would be the same in all passes."""
    core = core_of(context.blocks)
    if core and context.config.model.dropout > 0.0:
        rule = "must be 0 with a recurrent group, whose passes would all drop the same"
        yield context.problem("model.dropout model.layers", rule=rule, fix="use model.dropout=0")
    inside = dict.fromkeys((each.name, each.variant) for index in core for each in context.blocks[index].kinds)
    for use in context.used:
        if (use.kind, use.variant) in inside and context.kinds[use.kind].draws(use.options):
            rule = f"a recurrent group must draw nothing: all passes of {use.kind} would draw the same"
            fix = f"use {use.kind} without dropout or noise inside of the group"
            yield context.problem("model.layers", rule=rule, fix=fix)


def core_is_on_one_stage(context: RuleContext) -> Iterator[Problem]:
    core, parallel = core_of(context.blocks), context.config.parallel
    if not core or parallel.pipeline == 1:
        return
    units, split = len(context.blocks) - len(core) + 1, parallel.pipeline_split
    stages = parallel.pipeline * parallel.stages_per_rank
    if split in ("parameters", "flops"):
        if units < stages:
            yield context.problem(
                "parallel.pipeline model.layers",
                rule=f"a recurrent group must be on one pipeline stage, and with it there are {units} parts",
                fix=f"use parallel.pipeline of at most {units}, and parallel.tensor for parts that are too large",
            )
        return
    counts = uniform_counts(len(context.blocks), stages) if isinstance(split, str) else split
    borders = [sum(counts[: stage + 1]) for stage in range(len(counts) - 1)]
    if any(core.start < border < core.stop for border in borders):
        yield context.problem(
            "parallel.pipeline_split model.layers",
            rule=f"a recurrent group must be on one pipeline stage: blocks {core.start} to {core.stop - 1}",
            fix="use parallel.pipeline_split=parameters, which keeps it together, or another list",
        )


def depth_is_known_to_completep(context: RuleContext) -> Iterator[Problem]:
    if core_of(context.blocks) and context.config.model.parametrization.type == "completep":
        yield context.problem(
            "model.parametrization.type model.layers",
            rule="completep must have a depth, and a recurrent group draws one in each step: no rule for it is known",
            fix="use type: mup, whose factors of width hold for it, or type: standard",
        )


PARAMETRIZATION = "model.parametrization"
BOTH, DEPTH = ("mup", "completep"), ("completep",)
READERS = {"base_width": BOTH, "base_head_dim": BOTH, "base_depth": DEPTH, "depth_exponent": DEPTH}
NEEDED = {"base_width": "model.hidden_size", "base_depth": "the number of blocks"}


def options_suit_the_parametrization(context: RuleContext) -> Iterator[Problem]:
    own = context.config.model.parametrization
    for name, types in READERS.items():
        keys = f"{PARAMETRIZATION}.{name} {PARAMETRIZATION}.type"
        if own.type in types and name in NEEDED and getattr(own, name) is None:
            yield context.problem(
                keys,
                rule=f"{own.type} must have a base model, which the rates and initial values were found for",
                fix=f"give {PARAMETRIZATION}.{name}, {NEEDED[name]} of that model",
            )
        if own.type not in types and context.given(f"{PARAMETRIZATION}.{name}"):
            rule = f"{name} must go with type: {' or '.join(types)}, and has no effect here"
            yield context.warning(keys, rule=rule, fix="remove it, or change the type")


def rates_are_derived_for_the_optimizer(context: RuleContext) -> Iterator[Problem]:
    type, optimizer = context.config.model.parametrization.type, context.config.optimizer.type
    kind = optimizer_kind(context.config)
    if type == "standard" or (kind is not None and type in kind.rates_for):
        return
    if kind is not None:
        able = [name for name, each in kinds_inside().items() if type in each.rates_for]
        yield context.problem(
            f"{PARAMETRIZATION}.type optimizer.type",
            rule=f"the rates of {type} must be derived for the optimizer, as they are for {', '.join(able)}, but not "
            f"for {optimizer}: {kind.why_no_rates}",
            fix="use optimizer.type=adamw, or type: standard",
        )
    else:
        yield context.warning(
            f"{PARAMETRIZATION}.type optimizer.type",
            rule=f"the rates of {type} must be for an optimizer whose steps do not depend on the size of gradients",
            fix="give other factors in the optimizer's group_settings (scales), if its steps do",
        )


def names_stand_for_something(context: RuleContext) -> Iterator[Problem]:
    values = context.values
    roles = [each for each in catalog().values() if "role" in each.limits]
    for key, path in ((role, path) for role in roles for path in expand(values, role.path)):
        value = get(values, path, None)
        if not isinstance(value, str) or value in key.limits["words"]:
            continue
        role, registry = key.limits["role"], _registry(context)
        inside = registry_of().names(role)
        names = (*key.limits["words"], *(one for one in registry.names(role) if role not in ADDED or one not in inside))
        if role in ADDED and value in inside:
            rule = f"{value} must be turned on by keys of its own, not listed in {ADDED[role]}"
            yield context.problem_at(path, rule=rule, fix="remove it here")
        elif value in inside:
            continue
        elif role == OPTIMIZER and value in NOT_BUILT and ":" not in registry.tables[role].get(value, ""):
            rule, fix = NOT_BUILT[value]
            yield context.problem_at(path, rule=f"{key.name} must be one that is built: {rule}", fix=fix)
        elif ":" not in registry.tables[role].get(value, value):
            others = f"use one of: {', '.join(names)}" if names else "write it as package.module:name"
            known = f"one of {', '.join(names)}, or " if names else ""
            rule = f"{key.name} must be {known}an import path (package.module:name)"
            yield context.problem_at(path, rule=rule, fix=nearest(value, names) or others)
        else:
            try:
                check_importable(registry.path(role, value))
            except RegistryError as error:
                yield context.problem_at(path, rule=error.rule, fix=error.fix)


def _registry(context: RuleContext) -> Registry:
    """With the extensions' names. Another rule reports an extension that cannot be loaded."""
    try:
        return registry_of(tuple(context.config.model.extensions))
    except RegistryError:
        return registry_of()
