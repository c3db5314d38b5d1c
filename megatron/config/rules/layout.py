"""What can be cut over ranks, and how: tensor, pipeline, sequence, ZeRO, offloading."""

from __future__ import annotations

from collections.abc import Iterator

from ..facts import Facts
from ..problems import Problem
from .model import attention_options, divisors, key_of, kind_options, near, section_key


def ranks_fill_the_layout(facts: Facts) -> Iterator[Problem]:
    parallel, inner = facts.config.parallel, facts.inner
    if facts.ranks is not None and facts.ranks % inner:
        below = facts.ranks // inner * inner
        counts = " or ".join(str(each) for each in (below, below + inner) if each)
        key = next(f"parallel.{name}" for name in ("tensor", "pipeline", "context") if getattr(parallel, name) > 1)
        others = [
            f"parallel.{name}"
            for name in ("tensor", "pipeline", "context")
            if getattr(parallel, name) > 1 and f"parallel.{name}" != key
        ]
        yield facts.problem(
            key,
            *others,
            rule=f"the run has {facts.ranks} ranks, which is no multiple of tensor * pipeline * context = {inner}",
            fix=f"start {counts} ranks, or use sizes whose product divides {facts.ranks}",
        )


def _multiples(number: int, unit: int) -> str:
    """The multiples of `unit` just below and above `number`, in words."""
    below = number // unit * unit
    return " or ".join(str(each) for each in (below, below + unit) if each)


def context_waits(facts: Facts) -> Iterator[Problem]:
    if facts.config.parallel.context > 1:
        yield facts.problem(
            "parallel.context",
            rule="context parallel attention is not available yet",
            fix="use parallel.context=1 and tensor, pipeline or data parallel ranks",
        )


def heads_divide_over_tensor_ranks(facts: Facts) -> Iterator[Problem]:
    """Query heads stay whole on a rank. Key/value heads need no rule: where they do not divide, all ranks hold all."""
    ranks = facts.config.parallel.tensor
    for prefix, attention in attention_options(facts):
        if attention.heads % ranks:
            yield facts.problem(
                key_of(facts, prefix, "heads"),
                "parallel.tensor",
                rule="each tensor parallel rank has the same number of whole heads",
                fix=f"use {_multiples(attention.heads, ranks)} heads, "
                f"or parallel.tensor = {near(ranks, divisors(attention.heads))}",
            )


def state_space_divides_over_tensor_ranks(facts: Facts) -> Iterator[Problem]:
    """Channels of mamba and heads of mamba2 are cut. Groups of heads need no rule: where they do not divide, all ranks
    hold B and C of all."""
    ranks, width = facts.config.parallel.tensor, facts.config.model.hidden_size
    for section, unit in (("mamba", "channels"), ("mamba2", "heads")):
        for prefix, own in kind_options(facts, section):
            count = own.expand * width // (own.head_dim if section == "mamba2" else 1)
            if count % ranks:
                yield facts.problem(
                    section_key(facts, prefix, "expand" if section == "mamba" else "head_dim", section),
                    "model.hidden_size",
                    "parallel.tensor",
                    rule=f"each tensor parallel rank has the same number of the {count} inner {unit}",
                    fix=f"use parallel.tensor = {near(ranks, divisors(count))}",
                )


def mamba_heads_fit_the_tensor_ranks(facts: Facts) -> Iterator[Problem]:
    """A rank has some heads, or a part of one."""
    ranks = facts.config.parallel.tensor
    for prefix, mamba in kind_options(facts, "mamba"):
        if mamba.heads % ranks and ranks % mamba.heads:
            yield facts.problem(
                section_key(facts, prefix, "heads", "mamba"),
                "parallel.tensor",
                rule=f"a tensor parallel rank has whole heads of mamba, of which there are {mamba.heads}, or an "
                "equal part of one",
                fix=f"use parallel.tensor = {near(ranks, divisors(mamba.heads))} or a multiple of {mamba.heads}",
            )


def mixer_heads_divide_over_tensor_ranks(facts: Facts) -> Iterator[Problem]:
    """Heads of values of gated_delta are cut; its heads of keys need no rule. A query head of cca needs the keys of its
    group, and its keys all queries of the group: key/value heads are cut."""
    ranks = facts.config.parallel.tensor
    for section, option, unit in (("gated_delta", "heads", "heads"), ("cca", "kv_heads", "key/value heads")):
        for prefix, own in kind_options(facts, section):
            count = getattr(own, option)
            if count and count % ranks:
                yield facts.problem(
                    section_key(facts, prefix, option, section),
                    "parallel.tensor",
                    rule=f"each tensor parallel rank has the same number of the {count} {unit} of {section}",
                    fix=f"use parallel.tensor = {near(ranks, divisors(count))}, or another number of {unit}",
                )


def offloaded_parameters_have_one_type(facts: Facts) -> Iterator[Problem]:
    """DeepSpeed 0.19.8 keeps offloaded parameters in buffers of the compute type, and would round those in fp32."""
    config = facts.config
    if config.zero.offload_parameters.device == "none" or config.precision.compute == "fp32":
        return
    for kind in ("mamba", "mamba2", "moe", "gated_delta", "cca", "rwkv4", "rwkv5", "rwkv6", "rwkv7"):
        if facts.uses(kind):
            yield facts.problem(
                "zero.offload_parameters.device",
                "precision.compute",
                "model.layers",
                rule=f"{kind} has parameters that stay in fp32, and offloaded parameters all have the compute type",
                fix="offload the optimizer alone (zero.offload_optimizer), or use precision: fp32",
            )


def mlp_divides_over_tensor_ranks(facts: Facts) -> Iterator[Problem]:
    ranks, width = facts.config.parallel.tensor, facts.config.model.mlp.hidden_size
    if width is not None and facts.uses("mlp") and width % ranks:
        yield facts.problem(
            "model.mlp.hidden_size",
            "parallel.tensor",
            rule="each tensor parallel rank has the same share of the MLP's channels",
            fix=f"use {_multiples(width, ranks)} channels",
        )
    kinds = {each for block in facts.blocks for each in block.kinds if each.name == "mlp" and each.variant}
    for name in sorted({kind.variant for kind in kinds}):
        own = facts.config.model.variants.get(name, {}).get("hidden_size")
        if own is not None and own % ranks:
            yield facts.problem(
                f"model.variants.{name}.hidden_size",
                "parallel.tensor",
                rule="each tensor parallel rank has the same share of the MLP's channels",
                fix=f"use {_multiples(own, ranks)} channels",
            )


def shared_mlp_divides_over_tensor_ranks(facts: Facts) -> Iterator[Problem]:
    ranks = facts.config.parallel.tensor
    for prefix, shared in kind_options(facts, "shared_attention"):
        width = shared.mlp.hidden_size
        if width is not None and width % ranks:
            key = section_key(facts, prefix, "mlp", "shared_attention")
            given = facts.given(f"{key}.hidden_size")
            yield facts.problem(
                f"{key}.hidden_size" if given or not key.startswith("model.variants") else key,
                "parallel.tensor",
                rule="each tensor parallel rank has the same share of the MLP's channels",
                fix=f"use {_multiples(width, ranks)} channels",
            )


def sequence_divides_over_tensor_ranks(facts: Facts) -> Iterator[Problem]:
    parallel, length = facts.config.parallel, facts.config.training.sequence_length
    if parallel.sequence and parallel.tensor == 1:
        yield facts.warning(
            "parallel.sequence",
            "parallel.tensor",
            rule="sequence parallelism has no effect without tensor parallel ranks",
            fix="use parallel.tensor of 2 or more, or parallel.sequence=false",
        )
    elif parallel.sequence and length % parallel.tensor:
        yield facts.problem(
            "training.sequence_length",
            "parallel.tensor",
            "parallel.sequence",
            rule="sequence parallelism gives each tensor parallel rank the same number of tokens",
            fix=f"use {_multiples(length, parallel.tensor)} tokens, or parallel.sequence=false",
        )


def stages_have_layers(facts: Facts) -> Iterator[Problem]:
    stages, blocks = facts.config.parallel.pipeline, len(facts.blocks)
    if facts.blocks and blocks < stages:
        yield facts.problem(
            "parallel.pipeline",
            "model.layers",
            rule=f"each pipeline stage has at least one block, and the model has {blocks}",
            fix=f"use parallel.pipeline of at most {blocks}",
        )


def pipeline_split_adds_up(facts: Facts) -> Iterator[Problem]:
    """At least one block per stage: a last stage that holds nothing but a tied head fails in bf16 training."""
    split, stages, blocks = (facts.config.parallel.pipeline_split, facts.config.parallel.pipeline, len(facts.blocks))
    if isinstance(split, str) or not blocks:
        return
    key = "parallel.pipeline_split"
    if len(split) != stages:
        yield facts.problem(
            key,
            "parallel.pipeline",
            rule=f"the list has one number per stage: {stages}, not {len(split)}",
            fix=f"give {stages} numbers that add up to {blocks}",
        )
    elif sum(split) != blocks:
        yield facts.problem(
            key,
            "model.layers",
            rule=f"the numbers add up to the model's {blocks} blocks, not {sum(split)}",
            fix=_even(blocks, stages),
        )
    elif min(split) < 1:
        yield facts.problem(key, rule="each stage has at least one block", fix=_even(blocks, stages))


def _even(blocks: int, stages: int) -> str:
    return f"for example {[blocks // stages + (stage < blocks % stages) for stage in range(stages)]}"


def zero_2_and_3_without_pipeline(facts: Facts) -> Iterator[Problem]:
    if facts.config.parallel.pipeline > 1 and facts.config.zero.stage >= 2:
        yield facts.problem(
            "zero.stage",
            "parallel.pipeline",
            rule="ZeRO 2 and 3 partition gradients that a pipeline still accumulates; DeepSpeed refuses both together",
            fix="use zero.stage=1 with the pipeline, or parallel.pipeline=1 with tensor parallel ranks",
        )


def zero_0_needs_fp32(facts: Facts) -> Iterator[Problem]:
    config = facts.config
    if config.zero.stage == 0 and config.precision.compute != "fp32":
        yield facts.problem(
            "zero.stage",
            "precision.compute",
            rule=f"DeepSpeed has no {config.precision.compute} training with fp32 gradient accumulation at ZeRO 0",
            fix="use zero.stage=1 (it also works on one rank), or precision=fp32",
        )


def zero_2_and_3_traffic(facts: Facts) -> Iterator[Problem]:
    count = facts.config.training.accumulation or 1
    if facts.config.zero.stage >= 2 and count > 1 and facts.config.parallel.pipeline == 1 and facts.data_ranks != 1:
        yield facts.warning(
            "zero.stage",
            "training.accumulation",
            rule=f"from ZeRO 2 on, gradients are reduced after every micro-batch: {count} times the traffic of ZeRO 1",
            fix="use zero.stage=1 if memory allows, or a larger micro_batch_size",
        )


def selective_recomputation_needs_whole_parameters(facts: Facts) -> Iterator[Problem]:
    """torch knows what it kept by counting operations, and gathering parameters again shifts the count."""
    if facts.config.zero.stage == 3 and facts.config.training.activation_checkpointing.mode == "selective":
        yield facts.problem(
            "training.activation_checkpointing.mode",
            "zero.stage",
            rule="selective recomputation mistakes what it kept where ZeRO 3 gathers parameters: gradients are wrong",
            fix="use mode: full (with every: 2 or more it costs less), or zero.stage of at most 2",
        )


def micro_batches_fill_the_pipeline(facts: Facts) -> Iterator[Problem]:
    stages, count = facts.config.parallel.pipeline, facts.config.training.accumulation
    if stages > 1 and count is not None and count < 4 * stages:
        idle = (stages - 1) / (count + stages - 1)
        yield facts.warning(
            "training.accumulation",
            "parallel.pipeline",
            rule=f"{count} micro-batches over {stages} stages leave each stage idle {100 * idle:.0f} % of the time",
            fix=f"use at least {4 * stages} micro-batches per step: "
            "a smaller micro_batch_size or a larger global_batch_size",
        )


def overlap_needs_the_plain_engine(facts: Facts) -> Iterator[Problem]:
    if facts.config.zero.overlap and facts.config.parallel.pipeline > 1:
        yield facts.warning(
            "zero.overlap",
            "parallel.pipeline",
            rule="a pipeline reduces gradients once, after the last micro-batch: nothing overlaps",
            fix="use zero.overlap=false",
        )


def offloading_fits_the_stage(facts: Facts) -> Iterator[Problem]:
    zero, pipeline = facts.config.zero, facts.config.parallel.pipeline
    if zero.offload_parameters.device != "none" and zero.stage != 3:
        yield facts.problem(
            "zero.offload_parameters.device",
            "zero.stage",
            rule="parameters can only be offloaded where ZeRO 3 partitions them",
            fix="use zero.stage=3, or offload_optimizer",
        )
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        yield facts.problem(
            "zero.offload_optimizer.device",
            "zero.stage",
            rule="optimizer state is offloaded by ZeRO 1, 2 and 3",
            fix="use zero.stage=1 or more",
        )
    for name, offload in (
        ("offload_optimizer", zero.offload_optimizer),
        ("offload_parameters", zero.offload_parameters),
    ):
        key = f"zero.{name}"
        if offload.device == "nvme" and zero.stage != 3:
            yield facts.problem(
                f"{key}.device",
                "zero.stage",
                rule="offloading to NVMe needs ZeRO 3",
                fix="use zero.stage=3, or device: cpu",
            )
        if offload.device == "nvme" and offload.path is None:
            yield facts.problem(
                f"{key}.path",
                f"{key}.device",
                rule="offloading to NVMe needs a folder on the drive",
                fix=f"give {key}.path",
            )
        if offload.device != "none" and pipeline > 1:
            yield facts.problem(
                f"{key}.device",
                "parallel.pipeline",
                rule="offloading works in the engine without a pipeline",
                fix="use parallel.pipeline=1, or device: none",
            )
        if offload.device == "none" and (offload.path is not None or offload.pin_memory):
            given = "path" if offload.path is not None else "pin_memory"
            yield facts.warning(
                f"{key}.{given}", f"{key}.device", rule="nothing is offloaded", fix=f"give {key}.device: cpu or nvme"
            )


def offloaded_optimizer_is_adam(facts: Facts) -> Iterator[Problem]:
    config = facts.config
    if config.zero.offload_optimizer.device != "none" and config.optimizer.type != "adamw":
        yield facts.problem(
            "zero.offload_optimizer.device",
            "optimizer.type",
            rule="only AdamW has an implementation for offloaded state",
            fix="use optimizer.type=adamw, or device: none",
        )


RULES = (
    ranks_fill_the_layout,
    context_waits,
    heads_divide_over_tensor_ranks,
    state_space_divides_over_tensor_ranks,
    mamba_heads_fit_the_tensor_ranks,
    mixer_heads_divide_over_tensor_ranks,
    offloaded_parameters_have_one_type,
    mlp_divides_over_tensor_ranks,
    shared_mlp_divides_over_tensor_ranks,
    sequence_divides_over_tensor_ranks,
    stages_have_layers,
    pipeline_split_adds_up,
    zero_2_and_3_without_pipeline,
    zero_0_needs_fp32,
    zero_2_and_3_traffic,
    selective_recomputation_needs_whole_parameters,
    micro_batches_fill_the_pipeline,
    overlap_needs_the_plain_engine,
    offloading_fits_the_stage,
    offloaded_optimizer_is_adam,
)
