"""What can be cut over ranks, and how: tensor, pipeline, sequence, ZeRO, offloading."""

from __future__ import annotations

from collections.abc import Iterator

from ..arithmetic.divisors import multiples
from ..optimizer_kind import optimizer_kind
from ..problems import Problem
from ..rule_context import RuleContext


def ranks_fill_the_layout(context: RuleContext) -> Iterator[Problem]:
    parallel, inner = context.config.parallel, context.inner
    if context.ranks is not None and context.ranks % inner:
        below = context.ranks // inner * inner
        counts = " or ".join(str(each) for each in (below, below + inner) if each)
        key = next(f"parallel.{name}" for name in ("tensor", "pipeline", "context") if getattr(parallel, name) > 1)
        others = [
            f"parallel.{name}"
            for name in ("tensor", "pipeline", "context")
            if getattr(parallel, name) > 1 and f"parallel.{name}" != key
        ]
        yield context.problem(
            key,
            *others,
            rule=f"the run's {context.ranks} ranks must be a multiple of tensor * pipeline * context = {inner}",
            fix=f"start {counts} ranks, or use sizes whose product divides {context.ranks}",
        )


def offloaded_parameters_have_one_type(context: RuleContext) -> Iterator[Problem]:
    """DeepSpeed 0.19.8 keeps offloaded parameters in buffers of the compute type, and would round those in fp32."""
    config = context.config
    if config.zero.offload_parameters.device == "none" or config.precision.compute == "fp32":
        return
    for kind, about in context.kinds.items():
        if about.keeps_fp32 and context.uses(kind):
            yield context.problem(
                "zero.offload_parameters.device",
                "precision.compute",
                "model.layers",
                rule=f"offloaded parameters must have the compute type, and {kind} has some that stay in fp32",
                fix="offload the optimizer alone (zero.offload_optimizer), or use precision: fp32",
            )


def sequence_divides_over_tensor_ranks(context: RuleContext) -> Iterator[Problem]:
    parallel, length = context.config.parallel, context.config.training.sequence_length
    if parallel.sequence and parallel.tensor == 1:
        yield context.warning(
            "parallel.sequence",
            "parallel.tensor",
            rule="sequence parallelism must go with tensor parallelism; alone it has no effect",
            fix="use parallel.tensor of 2 or more, or parallel.sequence=false",
        )
    elif parallel.sequence and _in_one_piece(context) and length % parallel.tensor:
        yield context.problem(
            "training.sequence_length",
            "parallel.tensor",
            "parallel.sequence",
            rule="must be a multiple of parallel.tensor for sequence parallelism",
            fix=f"use {multiples(length, parallel.tensor)} tokens, or parallel.sequence=false",
        )


def _in_one_piece(context: RuleContext) -> bool:
    """Whether the rules of chunks and of ranks that share sequences say nothing of their length."""
    return context.config.parallel.context == 1 and context.config.training.sequence_chunks == 1


def stages_have_layers(context: RuleContext) -> Iterator[Problem]:
    stages, blocks = context.config.parallel.pipeline, len(context.blocks)
    if context.blocks and blocks < stages:
        yield context.problem(
            "parallel.pipeline",
            "model.layers",
            rule=f"each pipeline stage must have at least one block, and the model has {blocks}",
            fix=f"use parallel.pipeline of at most {blocks}",
        )


def pipeline_split_adds_up(context: RuleContext) -> Iterator[Problem]:
    """At least one block per stage: a last stage that holds nothing but a tied head fails in bf16 training."""
    parallel = context.config.parallel
    split, stages, blocks = parallel.pipeline_split, parallel.pipeline, len(context.blocks)
    if isinstance(split, str) or not blocks:
        return
    key = "parallel.pipeline_split"
    if len(split) != stages:
        yield context.problem(
            key,
            "parallel.pipeline",
            rule=f"the list must have one number per stage: {stages}, not {len(split)}",
            fix=f"give {stages} numbers that add up to {blocks}",
        )
    elif sum(split) != blocks:
        yield context.problem(
            key,
            "model.layers",
            rule=f"the numbers must add up to the model's {blocks} blocks, not {sum(split)}",
            fix=_even(blocks, stages),
        )
    elif min(split) < 1:
        yield context.problem(key, rule="each stage must have at least one block", fix=_even(blocks, stages))


def _even(blocks: int, stages: int) -> str:
    return f"for example {[blocks // stages + (stage < blocks % stages) for stage in range(stages)]}"


def zero_2_and_3_without_pipeline(context: RuleContext) -> Iterator[Problem]:
    if context.config.parallel.pipeline > 1 and context.config.zero.stage >= 2:
        yield context.problem(
            "zero.stage",
            "parallel.pipeline",
            rule="zero.stage must be 0 or 1 with a pipeline: ZeRO 2 and 3 partition gradients it still accumulates",
            fix="use zero.stage=1 with the pipeline, or parallel.pipeline=1 with tensor parallel ranks",
        )


def zero_0_needs_fp32(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    if config.zero.stage == 0 and config.precision.compute != "fp32":
        yield context.problem(
            "zero.stage",
            "precision.compute",
            rule=f"zero.stage must be at least 1 for {config.precision.compute} (DeepSpeed's ZeRO 0 cannot)",
            fix="use zero.stage=1 (it also works on one rank), or precision=fp32",
        )


def zero_2_and_3_traffic(context: RuleContext) -> Iterator[Problem]:
    count, zero = context.config.training.accumulation or 1, context.config.zero
    several = zero.stage >= 2 and count > 1 and zero.reduce == "micro_batch"
    if several and context.config.parallel.pipeline == 1 and context.replicas != 1:
        yield context.warning(
            "zero.stage",
            "training.accumulation",
            rule=f"zero.stage must be at most 1 to reduce gradients once per step, here with {count} times the traffic",
            fix="use zero.stage=1 or zero.reduce=step if memory allows, or a larger micro_batch_size "
            "(`deepy plan` has the time and memory of each)",
        )


def reduced_once_in_full(context: RuleContext) -> Iterator[Problem]:
    config, key = context.config, "zero.reduce"
    if config.zero.reduce == "micro_batch":
        return
    if config.zero.stage < 2:
        yield context.warning(
            key,
            "zero.stage",
            rule="must go with zero.stage 2 or 3; the others reduce once per step whatever it says",
            fix="remove the key, or use zero.stage=2",
        )
        return
    if config.precision.compute != "fp32" and config.precision.accumulate != config.precision.compute:
        compute = config.precision.compute
        yield context.problem(
            key,
            "precision.accumulate",
            rule=f"step must go with micro-batches that are summed in the type of the weights ({compute}), in which "
            "DeepSpeed keeps whole gradients at zero.stage 2 and 3",
            fix=f"use zero.stage=1, or precision.accumulate={compute}",
        )
    if config.zero.offload_optimizer.device != "none":
        yield context.problem(
            key,
            "zero.offload_optimizer.device",
            rule="step must not go with an offloaded optimizer, which takes the gradients of each micro-batch",
            fix="use zero.reduce=micro_batch, or keep the optimizer on the device",
        )


def selective_recomputation_needs_whole_parameters(context: RuleContext) -> Iterator[Problem]:
    """torch knows what it kept by counting operations, and gathering parameters again shifts the count."""
    if context.config.zero.stage == 3 and context.config.training.activation_checkpointing.mode == "selective":
        yield context.problem(
            "training.activation_checkpointing.mode",
            "zero.stage",
            rule="mode must not be selective with ZeRO 3: gradients would be wrong",
            fix="use mode: full (with every: 2 or more it costs less), or zero.stage of at most 2",
        )


def micro_batches_fill_the_pipeline(context: RuleContext) -> Iterator[Problem]:
    stages, count = context.config.parallel.pipeline, context.config.training.accumulation
    if stages > 1 and count is not None and count < 4 * stages:
        idle = (stages - 1) / (count + stages - 1)
        yield context.warning(
            "training.accumulation",
            "parallel.pipeline",
            rule=f"{count} micro-batch{'es' * (count > 1)} must not leave each of {stages} stages idle "
            f"{100 * idle:.0f} % of the time",
            fix=f"use at least {4 * stages} micro-batches per step: "
            "a smaller micro_batch_size or a larger global_batch_size",
        )


def overlap_needs_the_plain_engine(context: RuleContext) -> Iterator[Problem]:
    if context.config.zero.overlap and context.config.parallel.pipeline > 1:
        yield context.warning(
            "zero.overlap",
            "parallel.pipeline",
            rule="overlap must be false with a pipeline, which reduces gradients once, after the last micro-batch",
            fix="use zero.overlap=false",
        )


def overlap_has_an_effect(context: RuleContext) -> Iterator[Problem]:
    """In bf16, stage 1 sums the gradients of all micro-batches after the last backward pass, in one piece."""
    config = context.config
    bf16_sums_late = config.zero.stage == 1 and config.precision.compute == "bf16"
    plain = config.parallel.pipeline == 1 and not config.deepspeed.get("zero_optimization")
    if config.zero.overlap and plain and bf16_sums_late:
        yield context.warning(
            "zero.overlap",
            "zero.stage",
            "precision.compute",
            rule="overlap must go with stage 2 or 3, or with stage 1 in fp32 or fp16; here it has no effect",
            fix="use zero.stage=2, or zero.overlap=false",
        )


def offloading_fits_the_stage(context: RuleContext) -> Iterator[Problem]:
    zero, pipeline = context.config.zero, context.config.parallel.pipeline
    if zero.offload_parameters.device != "none" and zero.stage != 3:
        yield context.problem(
            "zero.offload_parameters.device",
            "zero.stage",
            rule="offloading parameters must go with ZeRO 3, which partitions them",
            fix="use zero.stage=3, or offload_optimizer",
        )
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        yield context.problem(
            "zero.offload_optimizer.device",
            "zero.stage",
            rule="offloading optimizer state must go with ZeRO 1, 2 or 3",
            fix="use zero.stage=1 or more",
        )
    for name, offload in (
        ("offload_optimizer", zero.offload_optimizer),
        ("offload_parameters", zero.offload_parameters),
    ):
        key = f"zero.{name}"
        if offload.device == "nvme" and zero.stage != 3:
            yield context.problem(
                f"{key}.device",
                "zero.stage",
                rule="offloading to NVMe must go with ZeRO 3",
                fix="use zero.stage=3, or device: cpu",
            )
        if offload.device == "nvme" and offload.path is None:
            yield context.problem(
                f"{key}.path",
                f"{key}.device",
                rule="offloading to NVMe must have a folder on the drive",
                fix=f"give {key}.path",
            )
        if offload.device != "none" and pipeline > 1:
            yield context.problem(
                f"{key}.device",
                "parallel.pipeline",
                rule="offloading must go without a pipeline",
                fix="use parallel.pipeline=1, or device: none",
            )
        if offload.device == "none" and (offload.path is not None or offload.pin_memory):
            given = "path" if offload.path is not None else "pin_memory"
            yield context.warning(
                f"{key}.{given}",
                f"{key}.device",
                rule="must go with device: cpu or nvme; nothing is offloaded",
                fix=f"give {key}.device: cpu or nvme",
            )


def offloaded_optimizer_is_adam(context: RuleContext) -> Iterator[Problem]:
    kind = optimizer_kind(context.config)
    if context.config.zero.offload_optimizer.device != "none" and (kind is None or not kind.offloads):
        yield context.problem(
            "zero.offload_optimizer.device",
            "optimizer.type",
            rule="optimizer.type must be adamw for offloaded state",
            fix="use optimizer.type=adamw, or device: none",
        )
    elif kind is not None and context.config.zero.offload_optimizer.device != "none":
        if kind.options_of(context.config).get("cautious"):
            yield context.problem(
                "zero.offload_optimizer.device",
                "optimizer.options",
                rule="DeepSpeed's AdamW for offloaded state decays all weights: cautious must be false",
                fix="remove optimizer.options.cautious, or use device: none",
            )
