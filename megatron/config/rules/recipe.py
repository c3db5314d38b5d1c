"""Batches and their stages, precision, optimizer and evaluation."""

from collections.abc import Iterator

from ..arithmetic import machine
from ..arithmetic.batches import Uncounted, Unread, batches_of, steps_of_epochs
from ..arithmetic.machine import has_file, installed
from ..arithmetic.pipelines import in_rounds, is_file, least_micro_batches
from ..optimizer_kind import SHARED, kinds_inside, optimizer_kind, unknown_options
from ..problems import Problem, multiples
from ..rule_context import Check, RuleContext
from ..schema import Config
from ..source.structure import nearest

BETAS = "both betas must be in [0, 1)"


def batch_sizes_multiply_out(context: RuleContext) -> Iterator[Problem]:
    """global_batch_size = micro_batch_size * accumulation * data parallel size."""
    training, ranks = context.config.training, context.data_ranks
    total, micro, count = training.global_batch_size, training.micro_batch_size, training.accumulation
    if ranks is None or total is None:
        return
    unit, fixed = micro * ranks, context.given("training.accumulation") and count is not None
    if fixed and total != unit * count:
        other = f"accumulation (it would be {total // unit})" if total % unit == 0 else "global_batch_size"
        fix = f"use global_batch_size = {unit * count}, or remove {other}"
    elif total % unit:
        sizes = [each for each in (total // unit * unit, (total // unit + 1) * unit) if each]
        micros = [each for each in range(1, total + 1) if total % (each * ranks) == 0] if total % ranks == 0 else []
        fix = f"use global_batch_size = {' or '.join(map(str, sizes))}"
        fix += f", or micro_batch_size = {min(micros, key=lambda each: abs(each - micro))}" if micros else ""
    else:
        return
    product = f"{micro} * {count} * {ranks} = {unit * count}" if fixed else f"a multiple of {micro} * {ranks} = {unit}"
    yield context.problem(
        f"training.global_batch_size training.micro_batch_size {'training.accumulation' if fixed else ''}",
        rule=f"global_batch_size must be micro_batch_size * accumulation * data parallel size, here {product}",
        fix=fix,
    )


def steps_are_known(context: RuleContext) -> Iterator[Problem]:
    """`training.steps`, or the epochs that they follow from. Both may be given if they agree."""
    given, epochs = context.given("training.steps"), context.config.training.epochs
    if epochs is None:
        if not given:
            yield Problem(
                "training.steps",
                "training.steps is required",
                "give the optimizer steps of the whole run, a whole number of at least 0 (steps), or training.epochs",
            )
        return
    try:
        steps = steps_of_epochs(context.value)
    except Uncounted as reason:
        if not (given and isinstance(reason, Unread)):  # a resolved file has both, and may be read on another host
            yield context.problem(reason.key, rule=reason.rule, fix=reason.fix)
        return
    if steps != context.config.training.steps:
        yield context.problem(
            "training.steps training.epochs",
            rule=f"must be the {steps} steps of training.epochs where both are given",
            fix="remove one of them (training.epochs=null)",
        )


def fp16_finds_a_gpu(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    here = config.launch.device == "auto" and context.starts_here
    if config.precision.compute == "fp16" and here and not machine.has_gpu():
        yield context.problem(
            "precision.compute launch.device",
            rule="fp16 must be trained on GPUs, and this machine has none",
            fix="use precision=bf16 or fp32",
        )


def products_of_8_bits_have_their_shapes(context: RuleContext) -> Iterator[Problem]:
    config, key = context.config, "precision.products"
    if config.precision.products != "fp8":
        return
    for name in (name for name in ("tensor", "folded", "depth") if getattr(config.parallel, name) > 1):
        rule = f"fp8 must go with parallel.{name}: 1, since the scale of a matrix is that of all its numbers"
        fix = f"use parallel.{name}=1, or precision.products=compute"
        yield context.problem(f"{key} parallel.{name}", rule=rule, fix=fix)
    shared = config.parallel.context * config.training.sequence_chunks
    tokens = config.training.micro_batch_size * (config.training.sequence_length // shared)
    if tokens % 16:
        yield context.problem(
            f"{key} training.micro_batch_size training.sequence_length",
            rule=f"fp8 must multiply 16, 32, ... tokens at a time, and here are {tokens}",
            fix="use a sequence_length that is a multiple of 16",
        )


def kernels_are_here(context: RuleContext) -> Iterator[Problem]:
    """A package that was asked for by name is never replaced without a message."""
    config, key = context.config, "model.kernels"
    wanted = config.model.kernels
    if wanted in ("auto", "torch"):
        return
    able = {kind: about.packages[wanted] for kind, about in context.kinds.items() if wanted in about.packages}
    if not able:
        known = ["auto", "torch", *dict.fromkeys(name for about in context.kinds.values() for name in about.packages)]
        fix = nearest(wanted, known) or "use kernels: auto"
        yield context.problem(key, rule=f"must be one of {', '.join(known)}", fix=fix)
    elif context.blocks and not any(map(context.uses, able)):
        rule = f"{wanted} has kernels for {' and '.join(able)}: the pattern must have one of these"
        yield context.problem(f"{key} model.layers", rule=rule, fix="use kernels: auto")
    elif config.launch.device == "cpu" or (context.starts_here and not machine.has_gpu()):
        fix = "use kernels: auto, which takes torch on CPUs"
        yield context.problem(f"{key} launch.device", rule=f"{wanted} must have a GPU", fix=fix)
    elif context.starts_here and not installed(wanted):
        fix = f"{next(iter(able.values()))}, or use kernels: auto"
        yield context.problem(key, rule=f"{wanted} must be installed", fix=fix)


def gradients_are_summed_in_a_wide_type(context: RuleContext) -> Iterator[Problem]:
    compute = context.config.precision.compute
    for name in ("accumulate", "reduce"):
        if getattr(context.config.precision, name) not in ("fp32", compute):
            rule = f"gradients of {compute} weights must be accumulated in {compute} or fp32"
            yield context.problem(f"precision.{name} precision.compute", rule=rule, fix="use fp32")


def loss_scale_needs_fp16(context: RuleContext) -> Iterator[Problem]:
    keys = [f"precision.loss_scale.{name}" for name in type(context.config.precision.loss_scale).model_fields]
    given = [key for key in keys if context.given(key)]
    if given and context.config.precision.compute != "fp16":
        fix = "remove it, or use precision=fp16"
        yield context.warning(f"{given[0]} precision.compute", rule="loss scaling must go with fp16", fix=fix)


def betas_are_shares(context: RuleContext) -> Iterator[Problem]:
    optimizer = context.config.optimizer
    found = {"optimizer.betas": optimizer.betas}
    found |= {f"optimizer.groups.{role}.betas": each.betas for role, each in optimizer.groups.items() if each.betas}
    for key, betas in found.items():
        if not all(0 <= beta < 1 for beta in betas):
            yield context.problem(key, rule=BETAS, fix="use [0.9, 0.95], as for most language models")


def recomputation_is_on(context: RuleContext) -> Iterator[Problem]:
    key = "training.activation_checkpointing"
    if context.config.training.activation_checkpointing.mode != "full" and context.given(f"{key}.every"):
        rule = "`every` must go with mode: full"
        yield context.warning(f"{key}.every {key}.mode", rule=rule, fix="use mode: full, or remove it")


def _tokens(config: Config) -> int:
    training = config.training
    samples = training.steps if training.global_batch_size is None else batches_of(config).before(training.steps)
    return samples * training.sequence_length


SCHEDULE = ("training", "batch_schedule")


def stages_end_one_after_the_other(context: RuleContext) -> Iterator[Problem]:
    training = context.config.training
    ends, begins = batches_of(context.config).begins[1:], batches_of(context.config).begins
    for number, entry in enumerate(training.batch_schedule):
        if (entry.until is None) == (entry.until_tokens is None):
            yield context.problem_at(
                (*SCHEDULE, number),
                rule="must have an end, given once: until (steps) or until_tokens",
                fix="give until, or until_tokens",
            )
            continue
        key = "until" if entry.until is not None else "until_tokens"
        if (entry.until or ends[number]) <= begins[number]:
            yield context.problem_at(
                (*SCHEDULE, number, key),
                rule=f"must be above the end of the stage before, step {begins[number]:,}",
                fix="use a later end, or remove the stage",
            )
        elif ends[number] >= training.steps > 0:
            yield context.problem_at(
                (*SCHEDULE, number, key),
                "training.steps",
                fatal=False,
                rule=f"must end before training.steps, here at step {ends[number]:,}: the run has no step with "
                f"training.global_batch_size = {training.global_batch_size}",
                fix="use an earlier end, or more steps",
            )


def ranks_share_each_batch(context: RuleContext) -> Iterator[Problem]:
    """Each batch has whole micro-batches on every data parallel rank."""
    training, ranks = context.config.training, context.data_ranks
    unit, micro, parallel = training.micro_batch_size * (ranks or 1), training.micro_batch_size, context.config.parallel
    whole, least = unit * parallel.pipeline, least_micro_batches(parallel)
    for number, entry in enumerate(training.batch_schedule if ranks else ()):
        size, other = entry.global_batch_size, "parallel.schedule"
        if size % unit:
            other = "training.micro_batch_size"
            rule = f"must be a multiple of micro_batch_size * data parallel size, here {micro} * {ranks} = {unit}"
            fix = f"use {multiples(size, unit)}"
        elif in_rounds(parallel) and size % whole:
            rule = f"the micro-batches of a step must be a multiple of the pipeline's ranks: a batch is n * {whole}"
            fix = f"use {multiples(size, whole)}"
        elif size < unit * least:
            rule = f"a step must have at least {least} micro-batches, twice the pipeline's ranks"
            fix = f"use {least * unit} or more, or parallel.schedule=zbv"
        else:
            continue
        yield context.problem_at((*SCHEDULE, number, "global_batch_size"), other, rule=rule, fix=fix)


CHECKS = (
    Check(
        "training.global_batch_size training.steps training.sequence_length",
        lambda c: _tokens(c) >= 2**63,
        lambda c: (
            f"the tokens of a run must be fewer than 2^63 (64-bit numbers count them), and here are {_tokens(c):.1e}"
        ),
        "use a smaller batch, or fewer steps",
    ),
    Check(
        "precision.compute launch.device",
        lambda c: c.precision.compute == "fp16" and c.launch.device == "cpu",
        "fp16 must be trained on GPUs, since most CPUs have no fp16 arithmetic",
        "use precision=bf16 or fp32",
    ),
    Check(
        "precision.products precision.compute",
        lambda c: c.precision.products == "fp8" and c.precision.compute == "fp16",
        "fp8 must go with bf16 or fp32: it scales each tensor, and fp16 the loss",
        "use precision.compute=bf16",
    ),
    Check(
        "training.stop_at_step training.steps",
        lambda c: c.training.stop_at_step is not None and c.training.stop_at_step > c.training.steps,
        "must be at most training.steps: the run ends before this step",
        lambda c: f"use at most {c.training.steps}, or remove it",
        fatal=False,
    ),
    Check(
        "data.epoch_parts training.batch_schedule",
        lambda c: c.training.batch_schedule and c.data.epoch_parts != 1,
        "must be 1 with batches of several sizes: an epoch ends with whole parts of one size",
        "remove it, or use a run of its own for each batch size",
    ),
    Check(
        "parallel.schedule training.batch_schedule",
        lambda c: c.training.batch_schedule and is_file(c.parallel.schedule),
        "must not be a file, which is for one number of micro-batches, with batches of several sizes",
        "use interleaved or zb_h1",
    ),
)


def optimizer_keeps_its_rules(context: RuleContext) -> Iterator[Problem]:
    """Keys that it reads, its options and its own rules. A class without a kind checks them itself."""
    kind = optimizer_kind(context.config)
    if kind is None:
        return
    for name in (name for name in SHARED if name not in kind.reads and context.given(f"optimizer.{name}")):
        readers = [each for each, inside in kinds_inside().items() if name in inside.reads]
        rule = f"{name} must go with {', '.join(readers)}, and has no effect here"
        yield context.warning(f"optimizer.{name} optimizer.type", rule=rule, fix="remove it, or change optimizer.type")
    yield from unknown_options(context, "optimizer", kind.options)
    for own in kind.rules:
        yield from own(context)


def packages_are_here(context: RuleContext) -> Iterator[Problem]:
    kind = optimizer_kind(context.config)
    package = None if kind is None else kind.package
    if package is None or not context.starts_here or has_file(package.name, package.file):
        return
    here = f", and the installed {package.name} has no {package.file}" if installed(package.name) else ""
    yield context.problem(
        "optimizer.type",
        rule=f"must be one whose package is installed: {context.config.optimizer.type} needs {package.name}{here}",
        fix=f"{package.command}, or use adamw",
    )


def input_rules_of_its_own(context: RuleContext) -> Iterator[Problem]:
    kind = optimizer_kind(context.config)
    for rule in () if kind is None else kind.input_rules:
        yield from rule(context)


INPUT_RULES = (fp16_finds_a_gpu, kernels_are_here, packages_are_here, input_rules_of_its_own)
