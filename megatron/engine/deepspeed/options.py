"""The complete DeepSpeed configuration of a run: no DeepSpeed default decides a number.

Values with a reason (DeepSpeed 0.19.8):
* `gradient_clipping` is always written, since DeepSpeed's default is 1.0. At stage 0 it is 0, because DeepSpeed clips
each pipeline stage by its own norm. `clipping.py` does it exactly.
* `grad_accum_dtype` is the type in which micro-batches are summed, `communication_data_type` that of sums over ranks.
DeepSpeed's default is the compute type, ours is fp32.
* `immediate_grad_update`, in bf16 on one replica: each gradient is added to its fp32 sum and freed as soon as it
exists. Otherwise all of them exist twice at the end of a backward pass, and are filled with zeros before the next.
* The throughput timer is off: the host would wait for the device before each forward pass.
* `pipe_partitioned` and `grad_partitioned` are off: activations and gradients travel whole between pipeline stages.
The partitioned form carries a single tensor with a gradient."""

from collections.abc import Mapping
from typing import Any

from megatron.config import Config
from megatron.config.sections.layout import OffloadOptions
from megatron.parallel.layout.layout import Layout

from .clipping import global_limit


def deepspeed_options(config: Config, layout: Layout) -> dict[str, Any]:
    """Arguments of `deepspeed.initialize`, with `config.deepspeed` merged over them."""
    training, precision = config.training, config.precision
    accumulation = accumulation_steps(config, layout)
    options: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": training.micro_batch_size * accumulation * layout.replicas,
        "gradient_clipping": global_limit(config) if zero_stage(config, layout) else 0.0,
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(config, layout),
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "activation_checkpoint_interval": 0},
    }
    if precision.compute != "fp32":
        options["data_types"] = {"grad_accum_dtype": precision.accumulate}
        options["communication_data_type"] = precision.reduce
    if precision.compute == "bf16":
        options["bf16"] = {"enabled": True, "immediate_grad_update": layout.replicas == 1}
    if precision.compute == "fp16":
        scale = precision.loss_scale
        options["fp16"] = {
            "enabled": True,
            "loss_scale": scale.static,
            "initial_scale_power": scale.initial_power,
            "loss_scale_window": scale.window,
            "hysteresis": scale.hysteresis,
            "min_loss_scale": scale.minimum,
        }
    return merged(options, config.deepspeed)


def accumulation_steps(config: Config, layout: Layout) -> int:
    """Micro-batches per step on each rank."""
    return config.training.global_batch_size // (config.training.micro_batch_size * layout.data)


def reduces_once(config: Config, layout: Layout) -> bool:
    """Whether ZeRO 2 or 3 keeps the gradients of a step's micro-batches whole and reduces their sums."""
    training = config.training
    largest = max([training.global_batch_size, *(stage.global_batch_size for stage in training.batch_schedule)])
    several = largest > training.micro_batch_size * layout.data and zero_stage(config, layout) > 1
    return several and config.zero.reduce == "step"


def zero_stage(config: Config, layout: Layout) -> int:
    """The stage that DeepSpeed runs: `zero.stage`, unless 0 has the same effect. With a pipeline at most 2.

    Where no other rank has the same parameters, stage 1 shares nothing. In fp32 it would only add flat copies of all
    parameters and all gradients. Stage 0 makes the same updates without them."""
    zero, stage = config.zero, config.zero.stage
    if layout.pipeline > 1 and stage > 1:  # whose weights `placed.py` cuts
        stage = 2 if layout.replicas > 1 else 1
    alone = layout.replicas == 1 and config.precision.compute == "fp32"
    plain = zero.offload_optimizer.device == "none" and not config.deepspeed.get("zero_optimization")
    return 0 if stage == 1 and alone and plain else stage


def _zero(config: Config, layout: Layout) -> dict[str, Any]:
    zero = config.zero
    section: dict[str, Any] = {"stage": zero_stage(config, layout)}
    if section["stage"] >= 1:
        section |= {
            "reduce_bucket_size": zero.bucket_size,
            "allgather_bucket_size": zero.bucket_size,
            "overlap_comm": zero.overlap and layout.pipeline == 1,
        }
        if zero.offload_optimizer.device != "none":
            section["offload_optimizer"] = _offload(zero.offload_optimizer)
    if section["stage"] == 3:
        section |= {
            "stage3_prefetch_bucket_size": zero.prefetch_size,
            "stage3_param_persistence_threshold": zero.persistent_size,
        }
        if zero.offload_parameters.device != "none":
            section["offload_param"] = _offload(zero.offload_parameters)
    return section


def _offload(offload: OffloadOptions) -> dict[str, Any]:
    section: dict[str, Any] = {"device": offload.device, "pin_memory": offload.pin_memory}
    return section | ({"nvme_path": offload.path} if offload.path else {})


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, mapping by mapping."""
    result = dict(base)
    for name, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = merged(result[name], value) if both else value
    return result
