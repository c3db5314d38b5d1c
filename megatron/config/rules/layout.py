"""Sizes of the layout: tensor, pipeline, sequence, ZeRO, offloading."""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..arithmetic.pipeline_costs import bubble_factor
from ..arithmetic.pipelines import (
    ASYNCHRONOUS,
    SCHEDULES,
    V_SHAPED,
    ScheduleError,
    check_table,
    in_rounds,
    is_file,
    is_split,
    least_micro_batches,
    ranks_of_stages,
    table_of,
)
from ..file_access import unreadable
from ..optimizer_kind import optimizer_kind
from ..problems import Problem, divisors, multiples, near
from ..rule_context import Check, RuleContext
from ..schema import Config

DEPTH = "parallel.depth"


def ranks_fill_the_layout(context: RuleContext) -> Iterator[Problem]:
    parallel, inner = context.config.parallel, context.inner
    if context.ranks is not None and context.ranks % inner:
        below = context.ranks // inner * inner
        counts = " or ".join(str(each) for each in (below, below + inner) if each)
        keys = [f"parallel.{key}" for key in ("tensor", "columns", "pipeline", "context") if getattr(parallel, key) > 1]
        product = f"tensor{' * columns' * (parallel.columns > 1)} * pipeline * context"
        yield context.problem(
            " ".join(keys),
            rule=f"the run's {context.ranks} ranks must be a multiple of {product} = {inner}",
            fix=f"start {counts} ranks, or use sizes whose product divides {context.ranks}",
        )


def depth_divides_the_replicas(context: RuleContext) -> Iterator[Problem]:
    depth, replicas = context.config.parallel.depth, context.replicas
    if replicas is not None and replicas % depth:
        yield context.problem(
            DEPTH,
            rule=f"must divide the {replicas} data and context parallel ranks, among which rows are shared",
            fix=f"use {DEPTH}={near(depth, divisors(replicas))}, or another number of ranks",
        )


def offloaded_parameters_have_one_type(context: RuleContext) -> Iterator[Problem]:
    """DeepSpeed 0.19.8 keeps offloaded parameters in buffers of the compute type, and would round fp32 parameters."""
    config = context.config
    if config.zero.offload_parameters.device == "none" or config.precision.compute == "fp32":
        return
    for kind, about in context.kinds.items():
        if about.keeps_fp32 and context.uses(kind):
            yield context.problem(
                "zero.offload_parameters.device precision.compute model.layers",
                rule=f"offloaded parameters must have the compute type, and {kind} has some that stay in fp32",
                fix="offload only the optimizer (zero.offload_optimizer), or use precision: fp32",
            )


def stages_have_layers(context: RuleContext) -> Iterator[Problem]:
    parallel, blocks = context.config.parallel, len(context.blocks)
    each = parallel.stages_per_rank
    if context.blocks and blocks < parallel.pipeline * each:
        own = " parallel.stages_per_rank" if each > 1 else ""
        most = f"parallel.pipeline{' * parallel.stages_per_rank' if own else ''} of at most {blocks}"
        yield context.problem(
            f"parallel.pipeline{own} model.layers",
            rule=f"each pipeline stage must have at least one block, and the model has {blocks}",
            fix=f"use {most}",
        )


def schedule_can_be_executed(context: RuleContext) -> Iterator[Problem]:
    parallel, key = context.config.parallel, "parallel.schedule"
    ranks, each, count = parallel.pipeline, parallel.stages_per_rank, context.config.training.accumulation
    if not is_file(parallel.schedule) and parallel.schedule not in SCHEDULES:
        rule = f"must be {', '.join(SCHEDULES)}, or the path of a .csv file"
        yield context.problem(key, rule=rule, fix="use interleaved with parallel.stages_per_rank of 2 or more")
    elif (each > 1 or parallel.schedule != "1f1b") and ranks == 1:
        which = "parallel.stages_per_rank" if each > 1 else key
        rule = "must go with parallel.pipeline of 2 or more, without which there is one stage"
        yield context.problem(f"{which} parallel.pipeline", rule=rule, fix="remove the key")
    elif parallel.schedule == ASYNCHRONOUS and (wrong := _not_asynchronous(context.config)):
        rule = f"asynchronous must go with {wrong}: ranks that do the same passes would have to agree on their order"
        yield context.problem(f"{key} {wrong.split()[0]}", rule=rule, fix="use parallel.schedule=1f1b or interleaved")
    elif (parallel.schedule, each > 1) in (("1f1b", True), ("interleaved", False)):
        rule = "interleaved must go with parallel.stages_per_rank of 2 or more, and 1f1b with 1"
        fix = "use parallel.schedule=interleaved" if each > 1 else "use parallel.stages_per_rank=2"
        yield context.problem(f"{key} parallel.stages_per_rank", rule=rule, fix=fix)
    elif parallel.schedule in V_SHAPED and each != 2:
        rule = f"{parallel.schedule} must go with parallel.stages_per_rank of 2"
        yield context.problem(f"{key} parallel.stages_per_rank", rule=rule, fix="use parallel.stages_per_rank=2")
    elif is_file(parallel.schedule) and (reason := unreadable(parallel.schedule)):
        yield context.problem(key, rule=f"must be a table of instructions: {reason}", fix="use interleaved or 1f1b")
    elif count is not None and in_rounds(parallel) and count % ranks:
        rule = f"the {count} micro-batches of a step must be a multiple of the pipeline's {ranks} ranks"
        fix = f"use {multiples(count, ranks)} micro-batches: change global_batch_size or micro_batch_size"
        yield context.problem(f"{key} training.accumulation", rule=rule, fix=fix)
    elif count is not None and count < least_micro_batches(parallel):
        least = least_micro_batches(parallel)
        rule = f"a step must have at least {least} micro-batches, twice the ranks, not {count}"
        fix = f"use {least} (a larger global_batch_size, a smaller micro_batch_size), or parallel.schedule=zbv"
        yield context.problem(f"{key} training.accumulation", rule=rule, fix=fix)
    elif error := _not_a_table(context, count or ranks):
        if count is not None:
            rule = f"must be a table for {ranks} ranks, stages_per_rank={each} and {count} micro-batches: {error}"
            yield context.problem(key, rule=rule, fix=_other_table(context))
    elif context.config.training.compile == "layer" and is_split(parallel, count or ranks):
        rule = "a backward pass in two parts must go without compiled layers, which compute both parts together"
        yield context.problem(f"{key} training.compile", rule=rule, fix="use training.compile=auto, or interleaved")


def _not_asynchronous(config: Config) -> str:
    """A key with the value that the asynchronous schedule needs, if it has another one."""
    parallel = config.parallel
    if parallel.stages_per_rank > 1:
        return "parallel.stages_per_rank of 1"
    axes = [name for name in ("tensor", "context", "depth", "expert") if getattr(parallel, name, None) not in (1, None)]
    return f"parallel.{axes[0]} of 1" if axes else "zero.stage of 0 or 1" if config.zero.stage > 1 else ""


def _not_a_table(context: RuleContext, micro_batches: int) -> str:
    """Why the file of a schedule cannot be executed, with the line of the rank."""
    parallel = context.config.parallel
    try:
        if is_file(parallel.schedule):
            check_table(table_of(parallel, micro_batches), ranks_of_stages(parallel), micro_batches)
    except (ScheduleError, UnicodeDecodeError) as error:
        rank = getattr(error, "rank", None)
        if rank is None:
            return str(error)
        lines = enumerate(Path(parallel.schedule).read_text(encoding="utf-8").splitlines(), 1)
        return f"line {[number for number, line in lines if line.strip()][rank]}, {error}"
    return ""


def _other_table(context: RuleContext) -> str:
    """The fix of a table: another number of micro-batches, if it is legal for one."""
    parallel, training = context.config.parallel, context.config.training
    with suppress(ScheduleError, UnicodeDecodeError):
        own = max((it.micro_batch for row in table_of(parallel, 1) for it in row), default=0) + 1
        if own != training.accumulation and not _not_a_table(context, own):
            size = own * training.global_batch_size // (training.accumulation or 1)
            return f"use {own} micro-batches, which the table has (training.global_batch_size={size})"
    return "correct the table, or use interleaved or 1f1b"


def pipeline_split_adds_up(context: RuleContext) -> Iterator[Problem]:
    """At least one block per stage: a last stage with only a tied head fails in bf16 training."""
    parallel = context.config.parallel
    split, blocks = parallel.pipeline_split, len(context.blocks)
    stages = parallel.pipeline * parallel.stages_per_rank
    if isinstance(split, str) or not blocks:
        return
    key = "parallel.pipeline_split"
    if len(split) != stages:
        rule = f"the list must have one number per stage: {stages}, not {len(split)}"
        fix = f"give {stages} numbers that add up to {blocks}"
        yield context.problem(f"{key} parallel.pipeline", rule=rule, fix=fix)
        return
    even = f"for example {[blocks // stages + (stage < blocks % stages) for stage in range(stages)]}"
    if sum(split) != blocks:
        rule = f"the numbers must add up to the model's {blocks} blocks, not {sum(split)}"
        yield context.problem(f"{key} model.layers", rule=rule, fix=even)
    elif min(split) < 1:
        yield context.problem(key, rule="each stage must have at least one block", fix=even)


def zero_2_and_3_traffic(context: RuleContext) -> Iterator[Problem]:
    count, zero = context.config.training.accumulation or 1, context.config.zero
    several = zero.stage >= 2 and count > 1 and zero.reduce == "micro_batch"
    if several and context.config.parallel.pipeline == 1 and context.replicas != 1:
        yield context.warning(
            "zero.stage training.accumulation",
            rule=f"zero.stage must be at most 1 to reduce gradients once per step, here with {count} times the traffic",
            fix="use zero.stage=1 or zero.reduce=step if memory allows, or a larger micro_batch_size "
            "(`deepy plan` has the time and memory of each)",
        )


def offloading_has_its_options(context: RuleContext) -> Iterator[Problem]:
    zero, pipeline = context.config.zero, context.config.parallel.pipeline
    for name, offload in (
        ("offload_optimizer", zero.offload_optimizer),
        ("offload_parameters", zero.offload_parameters),
    ):
        key = f"zero.{name}"
        if offload.device == "nvme" and zero.stage != 3:
            rule = "offloading to NVMe must go with ZeRO 3"
            yield context.problem(f"{key}.device zero.stage", rule=rule, fix="use zero.stage=3, or device: cpu")
        if offload.device == "nvme" and offload.path is None:
            rule = "offloading to NVMe must have a folder on the drive"
            yield context.problem(f"{key}.path {key}.device", rule=rule, fix=f"give {key}.path")
        if offload.device != "none" and pipeline > 1:
            rule, fix = "offloading must go without a pipeline", "use parallel.pipeline=1, or device: none"
            yield context.problem(f"{key}.device parallel.pipeline", rule=rule, fix=fix)
        if offload.device == "none" and (offload.path is not None or offload.pin_memory):
            given = "path" if offload.path is not None else "pin_memory"
            rule = "must go with device: cpu or nvme, since nothing is offloaded"
            yield context.warning(f"{key}.{given} {key}.device", rule=rule, fix=f"give {key}.device: cpu or nvme")


def offloaded_optimizer_is_adam(context: RuleContext) -> Iterator[Problem]:
    kind, key = optimizer_kind(context.config), "zero.offload_optimizer.device"
    if context.config.zero.offload_optimizer.device == "none":
        return
    if kind is None or not kind.offloads:
        rule, fix = "optimizer.type must be adamw for offloaded state", "use optimizer.type=adamw, or device: none"
        yield context.problem(f"{key} optimizer.type", rule=rule, fix=fix)
    elif kind.options_of(context.config).get("cautious"):
        yield context.problem(
            f"{key} optimizer.options",
            rule="DeepSpeed's AdamW for offloaded state decays all weights: cautious must be false",
            fix="remove optimizer.options.cautious, or use device: none",
        )


def _in_one_piece(config: Config) -> bool:
    """Whether neither chunks nor ranks that share sequences have rules about the length."""
    return config.parallel.context == 1 and config.training.sequence_chunks == 1


def _not_scattered(config: Config) -> str:
    """Why the gradients of a pipeline's stages cannot be scattered at ZeRO 2 and 3 (`engine/deepspeed/placed.py`)."""
    precision, kind = config.precision, optimizer_kind(config)
    reasons = {
        "fp16, whose scale DeepSpeed's own reduction needs": precision.compute == "fp16",
        f"precision.accumulate={precision.accumulate}": precision.compute == "bf16" and precision.accumulate != "fp32",
        f"optimizer.type={config.optimizer.type}, which needs whole matrices": kind is None or kind.whole_matrices,
        "compressed gradients": config.parallel.communication.compress.data != "none",
        "keys of `deepspeed`": bool(config.deepspeed),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _bubble_factor(config: Config) -> float:
    return 1.0 if is_file(config.parallel.schedule) else bubble_factor(config.parallel, 2 * config.parallel.pipeline)


def _enough_micro_batches(config: Config) -> int:
    """So that ranks wait for less than a fifth of the time."""
    return math.ceil(4 * config.parallel.pipeline * _bubble_factor(config))


def _micro_batches_idle(config: Config) -> str:
    stages, count = config.parallel.pipeline, config.training.accumulation
    waiting = (stages - 1) * _bubble_factor(config)
    idle = f"{100 * waiting / (count + waiting):.0f} % of the time"
    return f"{count} micro-batch{'es' * (count > 1)} must not leave each of {stages} stages idle {idle}"


CHECKS = (
    Check(
        f"zero.stage {DEPTH}",
        lambda c: c.parallel.depth > 1 and c.zero.stage == 3,
        f"must be below 3 with {DEPTH}: ZeRO 3 gathers every parameter from all data parallel ranks already",
        f"use zero.stage=1 or 2, or {DEPTH}=1",
    ),
    Check(
        f"parallel.folded {DEPTH}",
        lambda c: c.parallel.depth > 1 and c.parallel.folded > 1,
        f"must be 1 with {DEPTH}, which shares the same rows of matrices",
        f"use parallel.folded=1 with parallel.context, or {DEPTH}=1",
    ),
    Check(
        f"parallel.expert_tensor {DEPTH}",
        lambda c: c.parallel.depth > 1 and c.parallel.expert_tensor < c.parallel.tensor,
        lambda c: (
            f"must be parallel.tensor = {c.parallel.tensor} with {DEPTH}, whose ranks share experts and rows: folded "
            "experts have tensor parallel ranks among them"
        ),
        f"remove expert_tensor, or use {DEPTH}=1",
    ),
    Check(
        f"model.hidden_size {DEPTH}",
        lambda c: c.parallel.depth > 1 and c.model.hidden_size % c.parallel.depth,
        lambda c: f"should be a multiple of {DEPTH} = {c.parallel.depth}: matrices with other rows stay whole",
        lambda c: f"use {multiples(c.model.hidden_size, c.parallel.depth)}, or {DEPTH} that divides it",
        fatal=False,
    ),
    Check(
        "parallel.sequence parallel.tensor",
        lambda c: c.parallel.sequence and c.parallel.tensor == 1,
        "sequence parallelism must go with tensor parallelism, without which it has no effect",
        "use parallel.tensor of 2 or more, or parallel.sequence=false",
        fatal=False,
    ),
    Check(
        "training.sequence_length parallel.tensor parallel.sequence",
        lambda c: c.parallel.sequence and _in_one_piece(c) and c.training.sequence_length % c.parallel.tensor,
        "must be a multiple of parallel.tensor for sequence parallelism",
        lambda c: f"use {multiples(c.training.sequence_length, c.parallel.tensor)} tokens, or parallel.sequence=false",
    ),
    Check(
        "zero.stage parallel.pipeline",
        lambda c: c.parallel.pipeline > 1 and c.zero.stage >= 2 and _not_scattered(c),
        lambda c: f"zero.stage must be 0 or 1 with a pipeline and {_not_scattered(c)}",
        "use zero.stage=1 with the pipeline, or parallel.pipeline=1 with tensor parallel ranks",
    ),
    Check(
        "zero.stage precision.compute",
        lambda c: c.zero.stage == 0 and c.precision.compute != "fp32",
        lambda c: f"zero.stage must be at least 1 for {c.precision.compute} (DeepSpeed's ZeRO 0 cannot)",
        "use zero.stage=1 (it also works on one rank), or precision=fp32",
    ),
    Check(
        "zero.reduce zero.stage",
        lambda c: c.zero.reduce != "micro_batch" and c.zero.stage < 2,
        "must go with zero.stage 2 or 3, since the others always reduce once per step",
        "remove the key, or use zero.stage=2",
        fatal=False,
    ),
    Check(
        "zero.reduce precision.accumulate",
        lambda c: (
            c.zero.reduce != "micro_batch"
            and c.zero.stage >= 2
            and c.precision.compute not in ("fp32", c.precision.accumulate)
        ),
        lambda c: (
            f"step must go with micro-batches that are summed in the type of the weights ({c.precision.compute}), in "
            "which DeepSpeed keeps whole gradients at zero.stage 2 and 3"
        ),
        lambda c: (
            "use zero.reduce=micro_batch"
            if c.parallel.pipeline > 1  # which needs precision.accumulate=fp32
            else f"use zero.stage=1, or precision.accumulate={c.precision.compute}"
        ),
    ),
    Check(
        "zero.reduce zero.offload_optimizer.device",
        lambda c: c.zero.reduce != "micro_batch" and c.zero.stage >= 2 and c.zero.offload_optimizer.device != "none",
        "step must not go with an offloaded optimizer, which takes the gradients of each micro-batch",
        "use zero.reduce=micro_batch, or keep the optimizer on the device",
    ),
    Check(  # torch finds what it kept by counting operations, and gathering parameters again shifts the count
        "training.activation_checkpointing.mode zero.stage",
        lambda c: c.zero.stage == 3 and c.training.activation_checkpointing.mode == "selective",
        "mode must not be selective with ZeRO 3: gradients would be wrong",
        "use mode: full (with every: 2 or more it costs less), or zero.stage of at most 2",
    ),
    Check(
        "training.accumulation parallel.pipeline",
        lambda c: (
            c.parallel.pipeline > 1
            and c.training.accumulation is not None
            and c.training.accumulation < _enough_micro_batches(c)
        ),
        _micro_batches_idle,
        lambda c: (
            f"use at least {_enough_micro_batches(c)} micro-batches per step: a smaller micro_batch_size or a larger "
            "global_batch_size"
        ),
        fatal=False,
    ),
    Check(
        "zero.overlap parallel.pipeline",
        lambda c: c.zero.overlap and c.parallel.pipeline > 1,
        "overlap must be false with a pipeline, which reduces gradients once, after the last micro-batch",
        "use zero.overlap=false",
        fatal=False,
    ),
    Check(  # scattered gradients always overlap, DeepSpeed's sums of stage 1 in bf16 never do
        "zero.overlap zero.stage precision.compute",
        lambda c: (
            c.zero.overlap
            and (c.zero.stage, c.precision.compute) == (1, "bf16")
            and c.parallel.pipeline == 1
            and not c.deepspeed.get("zero_optimization")
        ),
        "overlap must go with stage 2 or 3, or with stage 1 in fp32 or fp16, and has no effect here",
        "use zero.overlap=false",
        fatal=False,
    ),
    Check(
        "zero.offload_parameters.device zero.stage",
        lambda c: c.zero.offload_parameters.device != "none" and c.zero.stage != 3,
        "offloading parameters must go with ZeRO 3, which partitions them",
        "use zero.stage=3, or offload_optimizer",
    ),
    Check(
        "zero.offload_optimizer.device zero.stage",
        lambda c: c.zero.offload_optimizer.device != "none" and c.zero.stage == 0,
        "offloading optimizer state must go with ZeRO 1, 2 or 3",
        "use zero.stage=1 or more",
    ),
)
