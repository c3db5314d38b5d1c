"""GPT-NeoX's keys of batches, steps, optimizer, learning rate and number formats."""

import difflib
import math
import re
from typing import Any

from .reader import Flat, Native, as_number

# Key -> GPT-NeoX's default.
KEYS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "seq_length train_batch_size train_micro_batch_size_per_gpu global_num_gpus train_iters train_epochs "
            "exit_interval optimizer lr_decay_iters lr_decay_fraction precision fp16 bf16 data_types "
            "communication_data_type"
        ).split()
    ),
    "seed": 1234,
    "gradient_accumulation_steps": 1,
    "use_bnb_optimizer": False,
    "weight_decay": 0.1,
    "gradient_clipping": 1.0,
    "lr_decay_style": "linear",
    "min_lr": 0.0,
    "warmup": 0.01,
}

MISSPELT = re.compile(r"\d+(\.\d*)?e_\d+")  # 1.0e_8, as in gmlp_small.yml
# optimizer.type -> native type
OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "cpu_adam": "adamw",
    "cpu_torch_adam": "adamw",
    "lion": "lion",
    "sgd": "sgd",
}
NO_OPTIMIZER = {
    "onebitadam": "1-bit optimizers are gone from DeepSpeed: take Adam",
    "sm3": "not available: take Adam",
    "madgrad_wd": "not available: take Adam",
}
# native type -> {parameter: (native key, default of the class that GPT-NeoX builds)}
PARAMETERS: dict[str, dict[str, tuple[str, Any]]] = {
    "adamw": {"lr": ("lr", 0.001), "betas": ("betas", [0.9, 0.999]), "eps": ("epsilon", 1e-08)},
    "lion": {"lr": ("lr", 0.001), "betas": ("betas", [0.9, 0.99])},
    "sgd": {"lr": ("lr", 0.001), "momentum": ("momentum", 0.0), "nesterov": ("nesterov", False)},
}
# Parameters that must have this value: what is computed here always.
FIXED = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False, "dampening": 0.0}

SCHEDULES = {name: name for name in ("constant", "linear", "cosine")}
NO_SCHEDULE = {"exponential": "an exponential decay to no fixed end is not available: take cosine or linear"}

FORMATS = {"fp32": "fp32", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16"}
NUMBERS = FORMATS | {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfp16": "bf16"}
LOSS_SCALE = {
    "loss_scale": "static",
    "loss_scale_window": "window",
    "hysteresis": "hysteresis",
    "min_loss_scale": "minimum",
    "initial_scale_power": "initial_power",
}
PLAIN_PARTS = {"enabled", "fp16", "bf16", "type", "auto_cast"}


def translate(flat: Flat, native: Native) -> None:
    """Translate the recipe keys."""
    if not flat.given("train_epochs"):
        flat.require("train_iters", "the number of optimizer steps")
    flat.require("seq_length", "the tokens per sample")
    native.put("training.seed", flat.integer("seed"), "seed")
    for key, name in (("steps", "train_iters"), ("sequence_length", "seq_length")):
        if (value := flat.integer(name)) is not None:
            native.put(f"training.{key}", value, name)
    if (every := flat.count("exit_interval")) is not None:
        native.put("training.stop_at_step", every, "exit_interval")
    _batch(flat, native)
    _epochs(flat, native)
    lr = _optimizer(flat, native)
    native.put("optimizer.gradient_clipping", flat.defaulted_number("gradient_clipping"), "gradient_clipping")
    _schedule(flat, native, lr)
    _precision(flat, native)


def _epochs(flat: Flat, native: Native) -> None:
    if (epochs := flat.count("train_epochs")) is None:
        return
    native.put("training.epochs", epochs, "train_epochs")
    beside = {
        "train_iters": flat.given("train_iters"),
        "weight_by_num_documents": flat.raw("weight_by_num_documents"),
        "train_data_weights": any(as_number(each) != 1 for each in flat.items("train_data_weights") or ()),
        "pack_impl": str(flat.raw("pack_impl")).lower() != "packed",
    }
    for name in (name for name, there in beside.items() if there):
        flat.problem(name, f"GPT-NeoX refuses {name} with train_epochs, since it counts plain samples", "remove one")
    if (steps := _passes(flat)) is None:
        native.note(
            "data.epoch_parts: 1. GPT-NeoX ends an epoch with the last whole pass of all ranks, which "
            "gradient_accumulation_steps has: give it to repeat such a run sample for sample"
        )
    elif steps > 1:
        native.put("data.epoch_parts", steps, "gradient_accumulation_steps")


def _passes(flat: Flat) -> int | None:
    """Forward passes of a step, or None if they depend on the number of GPUs of the start."""
    total, micro = flat.count("train_batch_size"), flat.count("train_micro_batch_size_per_gpu")
    if total is None or micro is None or flat.given("gradient_accumulation_steps"):
        return flat.count("gradient_accumulation_steps")
    if total == micro:
        return 1
    ranks = (flat.count("global_num_gpus") or 0) // _inner(flat)
    return total // (micro * ranks) if ranks and total % (micro * ranks) == 0 else None


def _inner(flat: Flat) -> int:
    return flat.defaulted_count("model_parallel_size") * max(1, flat.defaulted_integer("pipe_parallel_size"))


def _batch(flat: Flat, native: Native) -> None:
    """The batch rule, repaired: of three sizes any two, or any one, determine the rest."""
    _accumulation_alias(flat, native)
    total, micro = flat.count("train_batch_size"), flat.count("train_micro_batch_size_per_gpu")
    steps = flat.count("gradient_accumulation_steps") if flat.given("gradient_accumulation_steps") else None
    if total is None and micro is None:
        flat.problem(
            "train_micro_batch_size_per_gpu",
            "GPT-NeoX files must give train_batch_size, train_micro_batch_size_per_gpu or both",
            "add train_micro_batch_size_per_gpu",
        )
        return
    if total is not None:
        native.put("training.global_batch_size", total, "train_batch_size")
    if micro is not None:
        native.put("training.micro_batch_size", micro, "train_micro_batch_size_per_gpu")
        if steps is not None or total is None:
            native.put("training.accumulation", steps or 1, "gradient_accumulation_steps")
    if micro is not None or total is None:
        return
    native.put("training.micro_batch_size", _micro(flat, total, steps or 1), "train_batch_size", "global_num_gpus")
    if steps is not None:
        native.unused("accumulation follows from the batch sizes", "gradient_accumulation_steps")
    native.note(
        f"training.micro_batch_size: {native.result.values['training']['micro_batch_size']}, because only "
        "train_batch_size is given. The updates are the same for every micro_batch_size that divides it"
    )


def _accumulation_alias(flat: Flat, native: Native) -> None:
    """`gas` was always derived: a file's value never had an effect, so it may only repeat what holds."""
    if not flat.given("gas"):
        return
    if flat.integer("gas") == flat.count("gradient_accumulation_steps"):
        native.unused("GPT-NeoX always derived it", "gas")
        return
    flat.problem(
        "gas",
        "gas never had an effect in GPT-NeoX: it ran with gradient_accumulation_steps "
        f"{flat.raw('gradient_accumulation_steps')}",
        "remove gas, or set gradient_accumulation_steps to what is meant",
    )


def _micro(flat: Flat, total: int, steps: int) -> int:
    """GPT-NeoX's micro batch for a global batch, if the file has the number of GPUs, else 1."""
    gpus, inner = flat.count("global_num_gpus"), _inner(flat)
    if gpus is None or gpus % inner or total % (gpus // inner * steps):
        return 1
    return total // (gpus // inner * steps)


def _optimizer(flat: Flat, native: Native) -> float | None:
    """Translate `optimizer`. Returns the peak learning rate."""
    flat.require("optimizer", "without it GPT-NeoX exits")
    optimizer = flat.mapping("optimizer")
    if optimizer is None:
        return None
    name = optimizer.get("type", "adam")
    kind = OPTIMIZERS.get(str(name).lower())
    if kind is None:
        flat.problem(
            "optimizer",
            f"optimizer.type must be one of {', '.join(OPTIMIZERS)}",
            NO_OPTIMIZER.get(str(name).lower(), "take Adam"),
            value=name,
        )
        return None
    native.put("optimizer.type", _in_8_bits(flat, native, kind), "optimizer.type")
    for extra in sorted(map(str, optimizer.keys() - {"type", "params"})):
        flat.problem("optimizer", "optimizer has the keys type and params", f"remove {extra}", value=extra)
    params = optimizer.get("params") or {}
    if not isinstance(params, dict):
        flat.problem("optimizer", "optimizer.params must be a mapping", "write params: {lr: 1.0e-3}", value=params)
        params = {}
    params = dict(params)
    decay = _weight_decay(flat, native, params)
    values = {}
    for parameter, (key, default) in PARAMETERS[kind].items():
        if isinstance(text := params.get(parameter), str) and MISSPELT.fullmatch(text):
            params[parameter] = text.replace("e_", "e-")
            native.note(f"optimizer.params.{parameter}: {text} is read as {params[parameter]}")
        values[key] = _parameter(flat, parameter, params.pop(parameter, default), default)
        native.put(f"optimizer.{key}", values[key], f"optimizer.params.{parameter}")
    if kind == "sgd" and decay and values["momentum"]:
        flat.problem(
            "weight_decay",
            "sgd with momentum: GPT-NeoX adds weight decay to the gradient, here it is decoupled",
            "set weight_decay to 0, or momentum to 0, where both are the same",
        )
    _other_parameters(flat, params, kind)
    return values["lr"]


def _in_8_bits(flat: Flat, native: Native, kind: str) -> str:
    """The optimizer's type with `use_bnb_optimizer`, which changes Adam, and the embedding of learned positions."""
    if not flat.boolean("use_bnb_optimizer"):
        return kind
    native.used.add("use_bnb_optimizer")
    if (flat.text("pos_emb") or "").lower() == "learned":
        flat.problem(
            "use_bnb_optimizer",
            "with pos_emb: learned GPT-NeoX adds a norm to the positions (StableEmbedding), which is not available",
            "set it to false and take the native optimizer.type: adamw_8bit",
        )
    if kind != "adamw":
        native.note(f"use_bnb_optimizer: it changes Adam only, and has no effect on {kind}")
        return kind
    native.note("optimizer.type: adamw_8bit. Its moments have 8 bits as in bitsandbytes, rounded in another way")
    return "adamw_8bit"


def _parameter(flat: Flat, name: str, value: Any, default: Any, key: str = "optimizer") -> Any:
    """`value` if it has the kind of `default`, else a problem and the default."""
    owner = "optimizer.params" if key == "optimizer" else key
    if isinstance(default, bool) and isinstance(value, bool):
        return value
    if isinstance(default, list):
        items = value if isinstance(value, (list, tuple)) else []
        numbers = [float(found) for item in items if (found := as_number(item)) is not None]
        if len(numbers) == len(items) == len(default):
            return numbers
    elif not isinstance(default, bool) and (number := as_number(value)) is not None:
        return float(number)
    kind = {list: "two numbers", bool: "true or false"}.get(type(default), "a number")
    hint = str(value).replace("_", "-") if isinstance(value, str) else None
    meant = f"; {hint} is meant?" if hint and as_number(hint) is not None else ""
    flat.problem(key, f"{owner}.{name} must be {kind}", f"write it as in {default}{meant}", value=value)
    return default


def _weight_decay(flat: Flat, native: Native, params: dict) -> float:
    """Weight decay is a key of the top level. GPT-NeoX fails where `params` has it too. Here the two must agree."""
    inside = params.pop("weight_decay", None)
    if inside is None:
        value, name = flat.defaulted_number("weight_decay"), "weight_decay"
    else:
        value, name = _parameter(flat, "weight_decay", inside, 0.0), "optimizer.params.weight_decay"
        if flat.given("weight_decay") and flat.number("weight_decay") != value:
            flat.problem("weight_decay", f"must agree with optimizer.params.weight_decay ({inside})", "remove one")
        native.used.add("weight_decay")
    native.put("optimizer.weight_decay", value, name)
    return value


def _other_parameters(flat: Flat, params: dict, kind: str) -> None:
    known = [*PARAMETERS[kind], "weight_decay", *FIXED]
    for name, value in params.items():
        if name in FIXED and value == FIXED[name]:
            continue
        near = difflib.get_close_matches(str(name), known, 1)
        rule = f"optimizer.params.{name} must be {FIXED[name]}" if name in FIXED else f"{kind} has no parameter {name}"
        fix = f"take {near[0]}" if near and name not in FIXED else "remove it"
        flat.problem("optimizer", rule, fix, value={name: value})


def _schedule(flat: Flat, native: Native, lr: float | None) -> None:
    kind = flat.choice("lr_decay_style", SCHEDULES, NO_SCHEDULE) or "constant"
    native.put("schedule.type", kind, "lr_decay_style")
    native.put("schedule.warmup_fraction", flat.defaulted_number("warmup"), "warmup")
    steps, fraction = flat.integer("train_iters"), flat.number("lr_decay_fraction")
    if flat.given("lr_decay_iters"):
        native.put("schedule.steps", flat.integer("lr_decay_iters"), "lr_decay_iters")
        native.unused("lr_decay_iters wins over it, as in GPT-NeoX", "lr_decay_fraction")
    elif fraction not in (None, 1) and flat.given("train_epochs"):
        flat.problem(
            "lr_decay_fraction",
            "lr_decay_fraction must go with train_iters: the steps of train_epochs are counted later, from the data",
            "give lr_decay_iters: deepy config show prints training.steps",
        )
    elif steps:
        value = steps if fraction is None else max(1, math.floor(steps * fraction))
        native.put("schedule.steps", value, "train_iters" if fraction is None else "lr_decay_fraction")
    floor = flat.defaulted_number("min_lr")
    if lr is not None and floor > lr:
        flat.problem("min_lr", f"min_lr must not be above the peak, optimizer.params.lr ({lr})", "make it smaller")
    elif lr is not None:
        native.put("schedule.min_lr_ratio", floor / lr if lr else 0.0, "min_lr", "optimizer.params.lr")
    _compatibility(flat, native)


def _compatibility(flat: Flat, native: Native) -> None:
    """GPT-NeoX changed its learning rates in August 2023, which its files do not show. One native key chooses.

    The default is what GPT-NeoX computes from the file today. A file does not say which version it was written for."""
    native.put("schedule.compat", "neox", "lr_decay_style")
    steps, cosine = flat.integer("train_iters"), str(flat.raw("lr_decay_style")).lower() == "cosine"
    end = flat.integer("lr_decay_iters")
    rises = (
        ", and after lr_decay_iters they stay, where GPT-NeoX's rise again"
        if end and steps and cosine and end < steps
        else ""
    )
    native.note(
        "schedule.compat: neox, the learning rates that GPT-NeoX computes from this file today"
        f"{rises}. To repeat a run of GPT-NeoX 1.0 (Pythia, GPT-NeoX-20B, all before 2023-08), whose rates differ by "
        "several percent, give schedule.compat=neox-v1"
    )


def _precision(flat: Flat, native: Native) -> None:
    """One number format out of `precision` and the fp16 and bf16 dictionaries, which must agree."""
    found: dict[str, str] = {}
    if (named := flat.choice("precision", FORMATS)) is not None:
        found["precision"] = named
    for name in ("fp16", "bf16"):
        if (options := flat.mapping(name)) is not None:
            _format(flat, native, name, options, found)
    if len(set(found.values())) > 1:
        said = ", ".join(f"{name} says {value}" for name, value in found.items())
        flat.problem(list(found)[-1], f"precision, fp16 and bf16 must agree, and {said}", "keep the one that is meant")
    names = list(found) or ["precision"]
    native.put("precision.compute", found[names[0]] if found else "fp32", *names)
    _accumulation_format(flat, native)


def _format(flat: Flat, native: Native, name: str, options: dict, found: dict[str, str]) -> None:
    """Translate one of the dictionaries `fp16` and `bf16` and record the format that it switches on."""
    enabled = options.get("enabled")
    if not isinstance(enabled, bool):
        if name == "bf16" and found.get("precision") == "bf16" and enabled is None:
            enabled = True
        else:
            flat.problem(name, f"{name}.enabled must be true or false", "add enabled: true or enabled: false")
    for extra in sorted(map(str, options.keys() - LOSS_SCALE.keys() - PLAIN_PARTS)):
        near = difflib.get_close_matches(extra, LOSS_SCALE, 1)
        flat.problem(name, f"{name} has no key {extra}", f"take {near[0]}" if near else "remove it", value=extra)
    if not enabled:
        native.unused("it is not enabled", name)
        return
    brain = name == "bf16" or str(options.get("type")).lower() in ("bfloat16", "bf16")
    found[name] = "bf16" if brain else "fp16"
    if brain:
        return
    for key, own in LOSS_SCALE.items():
        if key in options:
            value = _parameter(flat, key, options[key], 1.0, name)
            value = value if own in ("static", "minimum") else int(value)
            native.put(f"precision.loss_scale.{own}", value, f"{name}.{key}")


def _accumulation_format(flat: Flat, native: Native) -> None:
    types = flat.mapping("data_types") or {}
    for extra in sorted(map(str, types.keys() - {"grad_accum_dtype"})):
        flat.problem("data_types", "data_types has the key grad_accum_dtype", f"remove {extra}", value=extra)
    given = types.get("grad_accum_dtype")
    if given is not None and str(given).lower() not in NUMBERS:
        flat.problem("data_types", "grad_accum_dtype must be fp32, bf16 or fp16", "write fp32", value=given)
    native.put("precision.accumulate", NUMBERS.get(str(given).lower(), "fp32"), "data_types.grad_accum_dtype")
    reduce = flat.choice("communication_data_type", NUMBERS) if flat.given("communication_data_type") else "fp32"
    native.put("precision.reduce", reduce or "fp32", "communication_data_type")
    if native.result.values["precision"]["compute"] != "fp32" and given is None:
        native.note("precision.accumulate and precision.reduce: fp32. GPT-NeoX's default is the compute type")
