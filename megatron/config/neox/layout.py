"""GPT-NeoX's keys of parallelism, ZeRO, recomputation, launching and DeepSpeed."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .reader import Flat, Native, as_number

# Key -> GPT-NeoX's default.
KEYS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "zero_optimization hostfile include exclude num_gpus master_addr flops_profiler comms_logger "
            "tensorboard wandb csv_monitor deepspeed_extra_args"
        ).split()
    ),
    "pipe_parallel_size": 0,
    "model_parallel_size": 1,
    "pipe_partition_method": "type:transformer|mlp",
    "sequence_parallel": False,
    "checkpoint_activations": False,
    "checkpoint_num_layers": 1,
    "num_nodes": -1,
    "master_port": 29500,
    "launcher": "pdsh",
    "force_multi": False,
}

PARTITIONS = {"type:transformer|mlp": "uniform", "uniform": "uniform", "parameters": "parameters"}
LAUNCHERS = {"pdsh": "pdsh", "openmpi": "openmpi", "mpich": "mpich", "mvapich": "mpich", "slurm": "slurm"}

# Parts of zero_optimization with a native key, parts that DeepSpeed gets unchanged, and parts without effect.
ZERO_SIZES = {"stage3_prefetch_bucket_size": "prefetch_size", "stage3_param_persistence_threshold": "persistent_size"}
ZERO_OWN = set(ZERO_SIZES) | set(
    "stage overlap_comm reduce_bucket_size allgather_bucket_size cpu_offload offload_optimizer offload_param".split()
)
ZERO_USUAL = {"allgather_partitions": True, "reduce_scatter": True}
ZERO_RAW = set(
    "stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save "
    "stage3_gather_fp16_weights_on_model_save stage3_model_persistence_threshold sub_group_size round_robin_gradients "
    "ignore_unused_parameters zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients "
    "legacy_stage1".split()
)
ZERO_IDLE = {"contiguous_gradients", "load_from_fp32_weights", "elastic_checkpoint"}


def translate(flat: Flat, native: Native) -> None:
    """Translate the layout keys."""
    stages = max(1, flat.defaulted_integer("pipe_parallel_size"))
    native.put("parallel.pipeline", stages, "pipe_parallel_size")
    native.put("parallel.tensor", flat.count("model_parallel_size"), "model_parallel_size")
    native.put("parallel.sequence", flat.boolean("sequence_parallel"), "sequence_parallel")
    if stages > 1:
        method = (flat.text("pipe_partition_method") or "").lower()
        native.put("parallel.pipeline_split", PARTITIONS.get(method, "uniform"), "pipe_partition_method")
        if method not in PARTITIONS:
            native.note(f"parallel.pipeline_split: uniform. '{method}' is not available, a list of blocks per stage is")
    else:
        native.unused("there is one pipeline stage", "pipe_partition_method")
    _zero(flat, native, stages)
    _recomputation(flat, native)
    _launch(flat, native)
    _deepspeed(flat, native)


def _zero(flat: Flat, native: Native, stages: int) -> None:
    name, options = "zero_optimization", flat.mapping("zero_optimization") or {}
    stage = _part(flat, options, "stage", 0)
    if stage not in (0, 1, 2, 3):
        flat.problem(name, "zero_optimization.stage must be 0, 1, 2 or 3", "take 1", value=stage)
        stage = 1
    if stage == 0 and (reason := _zero_0_trouble(flat, native, stages)):
        stage = 1
        native.note(f"zero.stage: 1 instead of GPT-NeoX's 0, with the same updates, because {reason}")
    native.put("zero.stage", int(stage), f"{name}.stage")
    reduce = int(_part(flat, options, "reduce_bucket_size", 500_000_000))
    gather = int(_part(flat, options, "allgather_bucket_size", 500_000_000))
    native.put("zero.bucket_size", reduce, f"{name}.reduce_bucket_size")
    raw = {key: options[key] for key in options if key in ZERO_RAW}
    raw |= {key: options[key] for key, usual in ZERO_USUAL.items() if options.get(key, usual) != usual}
    if gather != reduce:
        native.note(f"zero.bucket_size: {reduce}, from reduce_bucket_size. allgather_bucket_size is not set apart")
    overlap = options.get("overlap_comm") is True
    native.put("zero.overlap", overlap and stages == 1, f"{name}.overlap_comm", "pipe_parallel_size")
    if overlap and stages > 1:
        native.note("zero.overlap: false. With pipeline stages gradients are reduced once, after the last micro-batch")
    for key, own in ZERO_SIZES.items():
        if key in options:
            native.put(f"zero.{own}", int(_part(flat, options, key, 0)), f"{name}.{key}")
    _offload(flat, native, options)
    for key, value in raw.items():
        native.put(f"deepspeed.zero_optimization.{key}", value, f"{name}.{key}")
    known = ZERO_OWN | ZERO_USUAL.keys() | ZERO_RAW | ZERO_IDLE
    for key in sorted(map(str, options.keys() - known)):
        near = difflib.get_close_matches(key, known, 1)
        flat.problem(
            name,
            f"zero_optimization has no key {key}",
            f"take {near[0]}" if near else "put it into deepspeed_extra_args",
            value=key,
        )


def _zero_0_trouble(flat: Flat, native: Native, stages: int) -> str | None:
    """Why ZeRO 0 cannot be had, if it cannot."""
    compute = native.result.values["precision"]["compute"]
    if compute != "fp32":
        return f"DeepSpeed sums {compute} gradients in fp32 from ZeRO 1 on"
    if stages > 1 and flat.number("gradient_clipping"):
        return "without ZeRO each pipeline stage would clip by the norm of its own gradients"
    return None


def _part(flat: Flat, options: dict, key: str, default: int) -> float | int:
    number = as_number(options.get(key, default))
    if number is None:
        flat.problem(
            "zero_optimization",
            f"zero_optimization.{key} must be a number",
            f"write it as in {default}",
            value=options[key],
        )
        return default
    return number


def _offload(flat: Flat, native: Native, options: dict) -> None:
    places = {"offload_optimizer": "zero.offload_optimizer", "offload_param": "zero.offload_parameters"}
    if options.get("cpu_offload") is True:  # the spelling before DeepSpeed 0.4
        native.put("zero.offload_optimizer.device", "cpu", "zero_optimization.cpu_offload")
    for name, key in places.items():
        given = options.get(name) or {}
        if not isinstance(given, dict) or given.get("device", "none") not in ("none", "cpu", "nvme"):
            flat.problem(
                "zero_optimization",
                f"zero_optimization.{name} must be a mapping with device none, cpu or nvme",
                "write {device: cpu}",
                value=given,
            )
            continue
        raw = {part: value for part, value in given.items() if part not in ("device", "nvme_path", "pin_memory")}
        for part, own in (("device", "device"), ("nvme_path", "path"), ("pin_memory", "pin_memory")):
            if part in given:
                native.put(f"{key}.{own}", given[part], f"zero_optimization.{name}.{part}")
        if raw:
            native.put(f"deepspeed.zero_optimization.{name}", raw, f"zero_optimization.{name}")


def _recomputation(flat: Flat, native: Native) -> None:
    full = flat.boolean("checkpoint_activations")
    native.put("training.activation_checkpointing.mode", "full" if full else "none", "checkpoint_activations")
    chunk = flat.defaulted_count("checkpoint_num_layers")
    if full:
        native.put("training.activation_checkpointing.every", 1, "checkpoint_num_layers")
    else:
        native.unused("checkpoint_activations is off", "checkpoint_num_layers")
    if full and chunk > 1:
        native.note(
            f"training.activation_checkpointing.every: 1. GPT-NeoX recomputes chunks of {chunk} layers, here "
            "each block is recomputed by itself, with the same result"
        )


def _launch(flat: Flat, native: Native) -> None:
    hostfile = flat.text("hostfile") if flat.given("hostfile") else None
    if hostfile and Path(hostfile).is_file():
        native.put("launch.hostfile", hostfile, "hostfile")
    elif hostfile:
        native.note(f"hostfile: there is no file {hostfile}. Only the devices of this machine are used, as by GPT-NeoX")
        native.used.add("hostfile")
        hostfile = None
    for name, key in (("include", "include"), ("exclude", "exclude"), ("master_addr", "master_address")):
        if flat.given(name):
            native.put(f"launch.{key}", flat.text(name), name)
    for name, key in (("num_gpus", "ranks"), ("master_port", "master_port")):
        if flat.given(name) and (value := flat.count(name)) is not None:
            native.put(f"launch.{key}", value, name)
    nodes = flat.defaulted_integer("num_nodes")
    if nodes > 1 and not flat.given("include"):
        flat.problem(
            "num_nodes",
            "the first hosts of the hostfile are not counted off here",
            "name the hosts in include, or in the hostfile itself",
        )
    runner = flat.choice("launcher", LAUNCHERS)
    if runner and (hostfile or flat.boolean("force_multi") or nodes > 1):
        native.put("launch.runner", runner, "launcher")
        native.used.update({"force_multi", "num_nodes"})
    else:
        native.unused("it starts ranks on several hosts, and no hostfile is given", "launcher", "force_multi")
    native.unused("hosts come from hostfile and include", "num_nodes")


def _deepspeed(flat: Flat, native: Native) -> None:
    for name in ("flops_profiler", "tensorboard", "wandb", "csv_monitor"):
        if flat.mapping(name):
            native.put(f"deepspeed.{name}", flat.mapping(name), name)
    given = {"comms_logger"} if flat.mapping("comms_logger") else set()
    _comms_logger(flat.mapping("comms_logger"), native, "comms_logger")
    for key, value in (flat.mapping("deepspeed_extra_args") or {}).items():
        if key == "zero_allow_untested_optimizer":
            native.note("deepspeed_extra_args.zero_allow_untested_optimizer has no effect here: the engine sets it")
            native.used.add("deepspeed_extra_args")
            continue
        if key in native.result.values.get("deepspeed", {}) or key in given:
            flat.problem(
                "deepspeed_extra_args",
                f"{key} stands in deepspeed_extra_args and at the top level",
                "remove one of them",
                value={key: value},
            )
        if key == "comms_logger" and isinstance(value, dict):
            _comms_logger(value, native, "deepspeed_extra_args.comms_logger")
            continue
        native.put(f"deepspeed.{key}", value, f"deepspeed_extra_args.{key}")


def _comms_logger(options: Mapping[str, Any] | None, native: Native, source: str) -> None:
    """DeepSpeed's logger waits for the device after every operation. The account does not, and counts all of them."""
    if not options:
        return
    native.used.add(source.split(".")[0])
    if options.get("enabled"):
        native.put("logging.communication", "counts", source)
        native.note(
            "logging.communication: counts, in place of comms_logger, which waits after every operation. Its other "
            "options have no effect"
        )
