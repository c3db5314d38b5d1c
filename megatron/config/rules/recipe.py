"""Batches, precision, optimizer, schedule and evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from ..arithmetic import machine
from ..arithmetic.epochs import Uncounted, Unread, steps_of_epochs
from ..arithmetic.kernels import installed
from ..problems import Problem
from ..rule_context import RuleContext
from ..source.structure import nearest


def batch_sizes_multiply_out(context: RuleContext) -> Iterator[Problem]:
    """global_batch_size = micro_batch_size * accumulation * data parallel size."""
    training, ranks = context.config.training, context.data_ranks
    total, micro, count = training.global_batch_size, training.micro_batch_size, training.accumulation
    if ranks is None or total is None:
        return
    unit, fixed = micro * ranks, context.given("training.accumulation") and count is not None
    keys = ["training.micro_batch_size"] + (["training.accumulation"] if fixed else [])
    if fixed and total != unit * count:
        fix = f"use global_batch_size = {unit * count}"
        fix += (
            f", or leave accumulation out (it would be {total // unit})"
            if total % unit == 0
            else ", or leave global_batch_size out"
        )
    elif total % unit:
        sizes = [each for each in (total // unit * unit, (total // unit + 1) * unit) if each]
        micros = [each for each in range(1, total + 1) if total % (each * ranks) == 0] if total % ranks == 0 else []
        fix = f"use global_batch_size = {' or '.join(map(str, sizes))}"
        fix += f", or micro_batch_size = {min(micros, key=lambda each: abs(each - micro))}" if micros else ""
    else:
        return
    product = f"{micro} * {count} * {ranks} = {unit * count}" if fixed else f"a multiple of {micro} * {ranks} = {unit}"
    yield context.problem(
        "training.global_batch_size",
        *keys,
        fix=fix,
        rule=f"global_batch_size must be micro_batch_size * accumulation * data parallel size, here {product}",
    )


def steps_are_known(context: RuleContext) -> Iterator[Problem]:
    """`training.steps`, or the epochs that they follow from; both only where they say the same."""
    given, epochs = context.given("training.steps"), context.config.training.epochs
    if epochs is None:
        if not given:
            yield Problem(
                "training.steps",
                "training.steps is required",
                "give a whole number of at least 0 (steps): optimizer steps of the whole run; or training.epochs",
            )
        return
    try:
        steps = steps_of_epochs(context.value)
    except Uncounted as reason:
        if not (given and isinstance(reason, Unread)):  # a resolved file has both, and may be looked at elsewhere
            yield context.problem(reason.key, rule=reason.rule, fix=reason.fix)
        return
    if steps != context.config.training.steps:
        yield context.problem(
            "training.steps",
            "training.epochs",
            rule=f"must be what training.epochs gives, {steps}, where both are there",
            fix="remove one of them (training.epochs=null)",
        )


def samples_can_be_counted(context: RuleContext) -> Iterator[Problem]:
    training = context.config.training
    total = training.steps * (training.global_batch_size or 1) * training.sequence_length
    if total >= 2**63:
        yield context.problem(
            "training.global_batch_size",
            "training.steps",
            "training.sequence_length",
            rule=f"the tokens of a run must be fewer than 2^63 (64-bit numbers count them), and here are {total:.1e}",
            fix="use a smaller batch, or fewer steps",
        )


def fp16_needs_a_gpu(context: RuleContext) -> Iterator[Problem]:
    if context.config.precision.compute == "fp16" and context.config.launch.device == "cpu":
        yield context.problem(
            "precision.compute",
            "launch.device",
            rule="fp16 must be trained on GPUs; most CPUs have no fp16 arithmetic",
            fix="use precision=bf16 or fp32",
        )


def fp16_finds_a_gpu(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    here = config.launch.device == "auto" and context.starts_here
    if config.precision.compute == "fp16" and here and not machine.has_gpu():
        yield context.problem(
            "precision.compute",
            "launch.device",
            rule="fp16 must be trained on GPUs, and this machine has none",
            fix="use precision=bf16 or fp32",
        )


def products_of_8_bits_have_their_shapes(context: RuleContext) -> Iterator[Problem]:
    """What 8-bit units multiply, and what is built around them."""
    config, key = context.config, "precision.products"
    if config.precision.products != "fp8":
        return
    if config.precision.compute == "fp16":
        yield context.problem(
            key,
            "precision.compute",
            rule="fp8 must go with bf16 or fp32: it scales each tensor, and fp16 the loss",
            fix="use precision.compute=bf16",
        )
    for name in ("tensor", "folded"):
        if getattr(config.parallel, name) > 1:
            yield context.problem(
                key,
                f"parallel.{name}",
                rule=f"fp8 must go with parallel.{name}: 1: the scale of a matrix is that of all its numbers",
                fix=f"use parallel.{name}=1, or precision.products=compute",
            )
    shared = config.parallel.context * config.training.sequence_chunks
    tokens = config.training.micro_batch_size * (config.training.sequence_length // shared)
    if tokens % 16:
        yield context.problem(
            key,
            "training.micro_batch_size",
            "training.sequence_length",
            rule=f"fp8 must multiply 16, 32, ... tokens at a time, and here are {tokens}",
            fix="use a sequence_length that is a multiple of 16",
        )


def kernels_are_here(context: RuleContext) -> Iterator[Problem]:
    """A package that was asked for by name is never replaced in silence."""
    config = context.config
    wanted = config.model.kernels
    if wanted in ("auto", "torch"):
        return
    able = {kind: about.packages[wanted] for kind, about in context.kinds.items() if wanted in about.packages}
    if not able:
        known = ["auto", "torch", *dict.fromkeys(name for about in context.kinds.values() for name in about.packages)]
        yield context.problem(
            "model.kernels",
            rule=f"must be one of {', '.join(known)}",
            fix=nearest(wanted, known) or "use kernels: auto",
        )
    elif context.blocks and not any(map(context.uses, able)):
        yield context.problem(
            "model.kernels",
            "model.layers",
            rule=f"{wanted} has kernels for {' and '.join(able)}: the pattern must have one of these",
            fix="use kernels: auto",
        )
    elif config.launch.device == "cpu" or (context.starts_here and not machine.has_gpu()):
        yield context.problem(
            "model.kernels",
            "launch.device",
            rule=f"{wanted} must have a GPU",
            fix="use kernels: auto, which takes torch on CPUs",
        )
    elif context.starts_here and not installed(wanted):
        yield context.problem(
            "model.kernels",
            rule=f"{wanted} must be installed",
            fix=f"{next(iter(able.values()))}, or use kernels: auto",
        )


def accumulation_is_no_narrower_mix(context: RuleContext) -> Iterator[Problem]:
    compute = context.config.precision.compute
    for name in ("accumulate", "reduce"):
        kind = getattr(context.config.precision, name)
        if kind not in ("fp32", compute):
            yield context.problem(
                f"precision.{name}",
                "precision.compute",
                rule=f"gradients of {compute} weights must be accumulated in {compute} or fp32",
                fix="use fp32",
            )


def loss_scale_needs_fp16(context: RuleContext) -> Iterator[Problem]:
    if context.config.precision.compute == "fp16":
        return
    for name in type(context.config.precision.loss_scale).model_fields:
        if context.given(f"precision.loss_scale.{name}"):
            yield context.warning(
                f"precision.loss_scale.{name}",
                "precision.compute",
                rule="loss scaling must go with fp16",
                fix="remove it, or use precision=fp16",
            )
            return


def betas_are_shares(context: RuleContext) -> Iterator[Problem]:
    if not all(0 <= beta < 1 for beta in context.config.optimizer.betas):
        yield context.problem(
            "optimizer.betas", rule="both betas must be in [0, 1)", fix="AdamW for language models uses [0.9, 0.95]"
        )
    for role, group in context.config.optimizer.groups.items():
        if group.betas is not None and not all(0 <= beta < 1 for beta in group.betas):
            yield context.problem(
                f"optimizer.groups.{role}.betas",
                rule="both betas must be in [0, 1)",
                fix="remove it, or use [0.9, 0.95]",
            )


def recomputation_is_on(context: RuleContext) -> Iterator[Problem]:
    if context.config.training.activation_checkpointing.mode != "full" and context.given(
        "training.activation_checkpointing.every"
    ):
        yield context.warning(
            "training.activation_checkpointing.every",
            "training.activation_checkpointing.mode",
            rule="`every` must go with mode: full",
            fix="use mode: full, or remove it",
        )


def stop_comes_before_the_end(context: RuleContext) -> Iterator[Problem]:
    training = context.config.training
    if training.stop_at_step is not None and training.stop_at_step > training.steps:
        yield context.warning(
            "training.stop_at_step",
            "training.steps",
            rule="must be at most training.steps: the run ends before this step",
            fix=f"use at most {training.steps}, or remove it",
        )


INPUT_RULES = (fp16_finds_a_gpu, kernels_are_here)
