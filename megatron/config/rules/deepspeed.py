"""The raw `deepspeed:` section: what DeepSpeed 0.19.8 no longer has, and what the engine sets from other keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..arithmetic import machine
from ..catalog import Path
from ..problems import Problem
from ..rule_context import RuleContext
from ..schema import Config
from ..source.structure import nearest
from ..tree import get, leaves

# Blocks whose presence alone makes DeepSpeed 0.19.8 refuse to start, and what to do instead.
REMOVED: dict[Path, str] = {
    ("elasticity",): "keep training.global_batch_size fixed and restart on another number of ranks",
    ("nebula",): "use checkpoint.asynchronous",
    ("compression_training",): "remove it",
    ("amp",): "use precision",
    ("quantize_training",): "remove it",
    ("eigenvalue",): "remove it",
    ("sparse_gradients",): "remove it",
    ("sparse_attention",): "use model.attention.window",
    ("graph_harvesting",): "use training.compile",
    ("curriculum_learning",): "use data.phases",
    ("progressive_layer_drop",): "remove it",
    ("zero_optimization", "mics_shard_size"): "use zero_hpz_partition_size",
    ("zero_optimization", "mics_hierarchical_params_gather"): "use zero_hpz_partition_size",
    ("zero_optimization", "zeropp_loco_param"): "remove it",
}

# Options that the engine writes from a key of ours; a raw value may repeat it, not contradict it.
OWNED: dict[Path, tuple[str, Callable[[Config], Any]]] = {
    ("train_batch_size",): ("training.global_batch_size", lambda c: c.training.global_batch_size),
    ("train_micro_batch_size_per_gpu",): ("training.micro_batch_size", lambda c: c.training.micro_batch_size),
    ("gradient_accumulation_steps",): ("training.accumulation", lambda c: c.training.accumulation),
    ("gradient_clipping",): ("optimizer.gradient_clipping", lambda c: c.optimizer.gradient_clipping),
    ("communication_data_type",): ("precision.reduce", lambda c: c.precision.reduce),
    ("data_types", "grad_accum_dtype"): ("precision.accumulate", lambda c: c.precision.accumulate),
    ("bf16", "enabled"): ("precision.compute", lambda c: c.precision.compute == "bf16"),
    ("fp16", "enabled"): ("precision.compute", lambda c: c.precision.compute == "fp16"),
    ("fp16", "loss_scale"): ("precision.loss_scale.static", lambda c: c.precision.loss_scale.static),
    ("fp16", "initial_scale_power"): (
        "precision.loss_scale.initial_power",
        lambda c: c.precision.loss_scale.initial_power,
    ),
    ("fp16", "loss_scale_window"): ("precision.loss_scale.window", lambda c: c.precision.loss_scale.window),
    ("fp16", "hysteresis"): ("precision.loss_scale.hysteresis", lambda c: c.precision.loss_scale.hysteresis),
    ("fp16", "min_loss_scale"): ("precision.loss_scale.minimum", lambda c: c.precision.loss_scale.minimum),
    ("zero_optimization", "stage"): ("zero.stage", lambda c: c.zero.stage),
    ("zero_optimization", "overlap_comm"): ("zero.overlap", lambda c: c.zero.overlap),
    ("zero_optimization", "reduce_bucket_size"): ("zero.bucket_size", lambda c: c.zero.bucket_size),
    ("zero_optimization", "allgather_bucket_size"): ("zero.bucket_size", lambda c: c.zero.bucket_size),
    ("zero_optimization", "stage3_prefetch_bucket_size"): ("zero.prefetch_size", lambda c: c.zero.prefetch_size),
    ("zero_optimization", "stage3_param_persistence_threshold"): (
        "zero.persistent_size",
        lambda c: c.zero.persistent_size,
    ),
    ("zero_optimization", "offload_optimizer", "device"): (
        "zero.offload_optimizer.device",
        lambda c: c.zero.offload_optimizer.device,
    ),
    ("zero_optimization", "offload_param", "device"): (
        "zero.offload_parameters.device",
        lambda c: c.zero.offload_parameters.device,
    ),
}

# Blocks that would take over what the project does itself, or that give wrong numbers in silence.
REFUSED: dict[Path, tuple[str, str]] = {
    ("optimizer",): ("the optimizer is made from the optimizer section", "use optimizer.type and its keys"),
    ("scheduler",): ("the learning rate is set by the schedule section", "use schedule.type and its keys"),
    ("activation_checkpointing",): ("blocks are recomputed by the model", "use training.activation_checkpointing"),
    ("sequence_parallel_size",): (
        "this route does not reduce gradients over sequence parallel ranks",
        "use parallel.context",
    ),
    ("seq_parallel_communication_data_type",): (
        "ranks that share sequences are those of parallel.context, which send activations in the type of the run and "
        "states and gradients of keys in fp32",
        "remove it",
    ),
    ("data_parallel_size",): ("the data parallel size follows from the ranks and the parallel section", "remove it"),
    ("mesh_param",): ("this route does not reduce gradients over sequence parallel ranks", "remove it"),
    ("tensor_parallel",): ("layers are cut by the parallel section", "use parallel.tensor"),
    ("expert_parallel",): ("layers are cut by the parallel section", "use parallel.expert"),
    ("checkpoint", "writer"): ("checkpoints are written by the checkpoint section", "use checkpoint.asynchronous"),
    ("data_efficiency",): ("samples are ordered by the data section", "use data.phases"),
    ("pipeline", "pipe_partitioned"): ("stages exchange several tensors, which this would break", "remove it"),
    ("pipeline", "grad_partitioned"): ("stages exchange several tensors, which this would break", "remove it"),
    ("pipeline", "activation_checkpoint_interval"): (
        "blocks are recomputed by the model",
        "use training.activation_checkpointing",
    ),
    ("managed_gradient_accumulation",): ("the engine sums micro-batches itself", "remove it"),
    ("zero_allow_untested_optimizer",): ("the engine sets it", "remove it"),
    ("prescale_gradients",): ("the engine scales gradients so that every layout gives the same numbers", "remove it"),
    ("gradient_predivide_factor",): (
        "the engine scales gradients so that every layout gives the same numbers",
        "remove it",
    ),
}


# The names that DeepSpeed 0.19.8 looks for at the top of its configuration; it passes over any other without a word.
KNOWN = frozenset(
    """
    activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type compile
    csv_monitor data_efficiency data_types dataloader_drop_last disable_allgather disable_python_gc dump_state
    expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
    gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation memory_breakdown optimizer pipeline
    prescale_gradients scheduler seq_parallel_communication_data_type sequence_parallel_size steps_per_print
    tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
""".split()
)


def names_are_deepspeeds(context: RuleContext) -> Iterator[Problem]:
    known = {*KNOWN, *(path[0] for path in REMOVED), *(path[0] for path in REFUSED)}
    for name in context.config.deepspeed:
        if name not in known:
            yield context.problem_at(
                ("deepspeed", name),
                rule="must be an option of DeepSpeed 0.19.8, which would ignore this one",
                fix=nearest(name, known) or "remove it, unless a newer DeepSpeed is installed",
                fatal=False,
            )


def blocks_still_exist(context: RuleContext) -> Iterator[Problem]:
    for path, fix in REMOVED.items():
        if get(context.config.deepspeed, path, None) is not None:
            rule = "DeepSpeed 0.19.8 no longer has this and refuses to start"
            yield context.problem_at(("deepspeed", *path), rule=f"must be left out: {rule}", fix=fix)


def blocks_leave_our_work_alone(context: RuleContext) -> Iterator[Problem]:
    for path, (rule, fix) in REFUSED.items():
        if get(context.config.deepspeed, path, None) is not None:
            yield context.problem_at(("deepspeed", *path), rule=f"must be left out: {rule}", fix=fix)


def raw_options_agree(context: RuleContext) -> Iterator[Problem]:
    given = dict(leaves(context.config.deepspeed))
    for path, (key, expected) in OWNED.items():
        if path not in given or given[path] is None or given[path] == "auto":
            continue
        ours = expected(context.config)
        if ours is not None and given[path] != ours:
            yield context.problem_at(
                ("deepspeed", *path),
                key,
                rule=f"must agree with {key}, from which the engine sets it",
                fix=f"set {key} alone, and remove this",
            )


def quantised_where_it_runs(context: RuleContext) -> Iterator[Problem]:
    """ZeRO++'s smaller weights and gradients."""
    config = context.config
    if config.launch.device != "cpu" and not (context.starts_here and not machine.has_gpu()):
        return
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if get(config.deepspeed, ("zero_optimization", name), None):
            yield context.problem_at(
                ("deepspeed", "zero_optimization", name),
                "launch.device",
                rule="must be left out on CPUs: DeepSpeed 0.19.8 quantises by operations of CUDA alone",
                fix="use parallel.communication.compress.data at zero.stage 0 to 2, or GPUs",
            )
