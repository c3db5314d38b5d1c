"""The raw `deepspeed:` section: options that DeepSpeed 0.19.8 no longer has, and options that the engine sets."""

from collections.abc import Iterator

from ..arithmetic import machine
from ..problems import Problem
from ..rule_context import RuleContext
from ..source.structure import nearest
from ..tree import get

# Blocks that make DeepSpeed 0.19.8 refuse to start, and what to do instead.
REMOVED = {
    "elasticity": "keep training.global_batch_size fixed and restart on another number of ranks",
    "nebula": "use checkpoint.asynchronous",
    "compression_training": "remove it",
    "amp": "use precision",
    "quantize_training": "remove it",
    "eigenvalue": "remove it",
    "sparse_gradients": "remove it",
    "sparse_attention": "use model.attention.window",
    "graph_harvesting": "use training.compile",
    "curriculum_learning": "use data.phases",
    "progressive_layer_drop": "remove it",
    "zero_optimization.mics_shard_size": "use zero_hpz_partition_size",
    "zero_optimization.mics_hierarchical_params_gather": "use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "remove it",
}

# Options that the engine writes from a key of ours. A raw value may repeat it, but not contradict it.
OWNED = {
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.accumulation",
    "gradient_clipping": "optimizer.gradient_clipping",
    "communication_data_type": "precision.reduce",
    "data_types.grad_accum_dtype": "precision.accumulate",
    "bf16.enabled": "precision.compute",
    "fp16.enabled": "precision.compute",
    "fp16.loss_scale": "precision.loss_scale.static",
    "fp16.initial_scale_power": "precision.loss_scale.initial_power",
    "fp16.loss_scale_window": "precision.loss_scale.window",
    "fp16.hysteresis": "precision.loss_scale.hysteresis",
    "fp16.min_loss_scale": "precision.loss_scale.minimum",
    "zero_optimization.stage": "zero.stage",
    "zero_optimization.overlap_comm": "zero.overlap",
    "zero_optimization.reduce_bucket_size": "zero.bucket_size",
    "zero_optimization.allgather_bucket_size": "zero.bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size": "zero.prefetch_size",
    "zero_optimization.stage3_param_persistence_threshold": "zero.persistent_size",
    "zero_optimization.offload_optimizer.device": "zero.offload_optimizer.device",
    "zero_optimization.offload_param.device": "zero.offload_parameters.device",
}

_STAGES = "stages exchange several tensors, which this would break"
_SCALES = "the engine scales gradients so that every layout gives the same numbers"
_SEQUENCES = "this route does not reduce gradients over sequence parallel ranks"
_RECOMPUTED = ("blocks are recomputed by the model", "use training.activation_checkpointing")
# Blocks that would take over the project's own work, or that give wrong numbers without a message.
REFUSED: dict[str, tuple[str, str]] = {
    "optimizer": ("the optimizer is made from the optimizer section", "use optimizer.type and its keys"),
    "scheduler": ("the learning rate is set by the schedule section", "use schedule.type and its keys"),
    "activation_checkpointing": _RECOMPUTED,
    "sequence_parallel_size": (_SEQUENCES, "use parallel.context"),
    "seq_parallel_communication_data_type": (
        "ranks that share sequences are set by parallel.context, and send activations in the type of the run and "
        "states and gradients of keys in fp32",
        "remove it",
    ),
    "data_parallel_size": ("the data parallel size follows from the ranks and the parallel section", "remove it"),
    "mesh_param": (_SEQUENCES, "remove it"),
    "tensor_parallel": ("layers are cut by the parallel section", "use parallel.tensor"),
    "expert_parallel": ("layers are cut by the parallel section", "use parallel.expert"),
    "checkpoint.writer": ("checkpoints are written by the checkpoint section", "use checkpoint.asynchronous"),
    "data_efficiency": ("samples are ordered by the data section", "use data.phases"),
    "pipeline.pipe_partitioned": (_STAGES, "remove it"),
    "pipeline.grad_partitioned": (_STAGES, "remove it"),
    "pipeline.activation_checkpoint_interval": _RECOMPUTED,
    "managed_gradient_accumulation": ("the engine sums micro-batches itself", "remove it"),
    "zero_allow_untested_optimizer": ("the engine sets it", "remove it"),
    "prescale_gradients": (_SCALES, "remove it"),
    "gradient_predivide_factor": (_SCALES, "remove it"),
}
_GONE = "DeepSpeed 0.19.8 no longer has this and refuses to start"
REFUSED |= {name: (_GONE, fix) for name, fix in REMOVED.items()}


# The names that DeepSpeed 0.19.8 reads at the top of its configuration. It ignores all others without a message.
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
    known = {*KNOWN, *(name.partition(".")[0] for name in REFUSED)}
    for name in context.config.deepspeed:
        if name not in known:
            yield context.problem_at(
                ("deepspeed", name),
                rule="must be an option of DeepSpeed 0.19.8, which would ignore this one",
                fix=nearest(name, known) or "remove it, unless a newer DeepSpeed is installed",
                fatal=False,
            )


def blocks_have_no_other_owner(context: RuleContext) -> Iterator[Problem]:
    for name, (reason, fix) in REFUSED.items():
        path = tuple(name.split("."))
        if get(context.config.deepspeed, path, None) is not None:
            yield context.problem_at(("deepspeed", *path), rule=f"must be absent: {reason}", fix=fix)


def raw_options_agree(context: RuleContext) -> Iterator[Problem]:
    for name, key in OWNED.items():
        path = tuple(name.split("."))
        raw, ours = get(context.config.deepspeed, path, None), context.value(key)
        if key == "precision.compute":
            ours = ours == path[0]
        if raw not in (None, "auto") and ours is not None and raw != ours:
            rule, fix = f"must agree with {key}, from which the engine sets it", f"set only {key}, and remove this"
            yield context.problem_at(("deepspeed", *path), key, rule=rule, fix=fix)


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
                rule="must be absent on CPUs: DeepSpeed 0.19.8 quantises with CUDA operations",
                fix="use parallel.communication.compress.data at zero.stage 0 to 2, or GPUs",
            )
