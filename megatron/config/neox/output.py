"""GPT-NeoX's keys of checkpoints, evaluation during training, logs and profiles."""

from typing import Any

from .post_training import trained
from .reader import Flat, Native

# Key -> GPT-NeoX's default.
KEYS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "save load checkpoint_factor extra_save_iters keep_last_n_checkpoints s3_path eval_tasks "
            "tensorboard_dir peak_theoretical_tflops use_wandb wandb_group wandb_team wandb_run_name"
        ).split()
    ),
    "finetune": False,
    "checkpoint_scale": "linear",
    "eval_interval": 1000,
    "eval_iters": 100,
    "log_interval": 100,
    "wandb_project": "neox",
    "wandb_host": "https://api.wandb.ai",
    "profile": False,
    "profile_step_start": 10,
    "profile_step_stop": 12,
    "memory_profiling": False,
}

WANDB_OPTIONS = {
    "wandb_project": "logging.wandb.project",
    "wandb_group": "logging.wandb.group",
    "wandb_team": "logging.wandb.entity",
    "wandb_run_name": "run.name",
}
MOST_LOG_SAVES = 1000


def translate(flat: Flat, native: Native) -> None:
    """Translate the output keys."""
    _when_to_save(flat, native)
    _where_to_save(flat, native)
    _load(flat, native)
    _evaluation(flat, native)
    _logging(flat, native)
    _profile(flat, native)


def _when_to_save(flat: Flat, native: Native) -> None:
    name = "checkpoint_factor"
    if flat.given("save_interval") and flat.given(name):
        flat.problem("save_interval", "save_interval is the old name of checkpoint_factor", "remove save_interval")
    elif flat.given("save_interval"):
        name = "save_interval"
    factor = flat.number(name)
    scale = flat.choice("checkpoint_scale", {"linear": "linear", "log": "log"})
    extra = flat.items("extra_save_iters") or []
    if not all(isinstance(step, int) and not isinstance(step, bool) and step >= 0 for step in extra):
        flat.problem("extra_save_iters", "extra_save_iters must be a list of steps", "write [0, 1, 2, 4]")
        extra = []
    steps = set(extra)
    if factor is not None and scale == "log":
        steps |= _log_steps(flat, factor)
    elif factor is not None and scale == "linear":
        if factor != int(factor) or factor < 1:
            flat.problem(
                name,
                f"{name} must be a whole number of steps, at least 1, with checkpoint_scale linear",
                "write a whole number",
            )
        else:
            native.put("checkpoint.every", int(factor), name, "checkpoint_scale")
    if steps:
        native.put("checkpoint.steps", sorted(steps), "extra_save_iters", "checkpoint_factor", "checkpoint_scale")
    native.unused("it says nothing without checkpoint_factor", "checkpoint_scale")
    native.put("checkpoint.at_end", True, "save")
    if flat.given("keep_last_n_checkpoints"):
        native.put("checkpoint.keep_last", flat.integer("keep_last_n_checkpoints"), "keep_last_n_checkpoints")


def _log_steps(flat: Flat, factor: float) -> set[int]:
    """The steps int(factor ** p) of the run, p = 0, 1, 2, ..."""
    last = flat.integer("train_iters") or 0
    if flat.given("train_epochs"):
        flat.problem("checkpoint_scale", "log must go with train_iters", "give extra_save_iters instead")
    if factor <= 1:
        flat.problem("checkpoint_factor", "checkpoint_factor must be above 1 with checkpoint_scale log", "take 2")
        return set()
    steps, power = set(), 0
    while int(factor**power) <= last and power < MOST_LOG_SAVES:
        steps.add(int(factor**power))
        power += 1
    return steps


def _where_to_save(flat: Flat, native: Native) -> None:
    save = flat.text("save")
    if save is not None:
        native.put("checkpoint.dir", save.rstrip("/") or "/", "save")
        if not any(flat.given(name) for name in ("checkpoint_factor", "save_interval", "extra_save_iters")):
            flat.problem(
                "save",
                "with save, GPT-NeoX files must give checkpoint_factor or extra_save_iters",
                "add checkpoint_factor: the number of steps between checkpoints",
            )
    if (path := flat.text("s3_path")) is not None:
        url = path if "://" in path else f"s3://{path}"
        level = {"place": "store", "url": url, "every": "auto", "keep": "all"}
        native.put("checkpoint.levels", [level], "s3_path")


def _load(flat: Flat, native: Native) -> None:
    """`load` with `finetune` takes weights. Without `finetune` it resumes. A load path that does not exist is an error
    here."""
    load, save, finetune = flat.text("load"), flat.text("save"), flat.boolean("finetune")
    same = load is not None and save is not None and load.rstrip("/") == save.rstrip("/")
    if load is None:
        native.unused("there is no load", "finetune")
        native.put("checkpoint.resume", "auto", "load")
    elif finetune:
        native.put("checkpoint.initialize_from", load, "load", "finetune")
        native.put("checkpoint.resume", "none" if same else "auto", "load", "save", "finetune")
    else:
        native.put("checkpoint.resume", "auto" if same else load, "load", "save", "finetune")
        if not same:
            native.note(f"checkpoint.resume: {load}: a missing checkpoint stops the run. GPT-NeoX starts at step 0")


def _evaluation(flat: Flat, native: Native) -> None:
    every, batches = flat.integer("eval_interval"), flat.integer("eval_iters")
    shares = native.result.values["data"].get("split")
    judged = bool(batches) and (shares is None or shares[1] > 0) and trained(flat) != "reinforce"
    native.put("evaluation.at_end", judged, *(["split"] if shares else []), "eval_iters")
    if judged and every:
        native.put("evaluation.every", every, "eval_interval")
    if judged:
        native.put("evaluation.batches", batches, "eval_iters")
    native.unused("there is no evaluation", "eval_interval", "eval_iters")
    _tasks(flat, native)


def _tasks(flat: Flat, native: Native) -> None:
    """Only eval.py runs tasks: GPT-NeoX's training does not."""
    tasks = flat.items("eval_tasks") or []
    if not all(isinstance(name, str) and name for name in tasks):
        flat.problem("eval_tasks", "eval_tasks must be a list of names", "write [lambada_openai, piqa]")
    elif tasks:
        native.put("evaluation.tasks", [{"name": name, "every": 0} for name in tasks], "eval_tasks")
        native.note("evaluation.tasks: run by `deepy evaluate` and not by training, as in GPT-NeoX")


def _logging(flat: Flat, native: Native) -> None:
    native.put("logging.every", flat.integer("log_interval"), "log_interval")
    if flat.given("tensorboard_dir"):
        native.put("logging.tensorboard", True, "tensorboard_dir")
        native.note(f"logging.tensorboard: events go to the run's directory, not to {flat.text('tensorboard_dir')}")
    if (peak := flat.number("peak_theoretical_tflops")) is not None:
        native.put("logging.peak_tflops", float(peak), "peak_theoretical_tflops")
    if not flat.boolean("use_wandb"):
        native.put("logging.wandb.mode", "disabled", "use_wandb")
        native.unused("use_wandb is not true", *WANDB_OPTIONS, "wandb_host")
        return
    native.put("logging.wandb.mode", "online", "use_wandb")
    for name, key in WANDB_OPTIONS.items():
        if flat.raw(name) is not None:
            native.put(key, flat.text(name), name)
    host = flat.text("wandb_host")
    if host != KEYS["wandb_host"]:
        native.put("launch.environment.WANDB_BASE_URL", host, "wandb_host")
    native.unused("W&B's own default", "wandb_host")


def _profile(flat: Flat, native: Native) -> None:
    memory = flat.boolean("memory_profiling")
    if not flat.boolean("profile") and not memory:
        native.unused("nothing is profiled", "profile", "memory_profiling", "profile_step_start", "profile_step_stop")
        return
    start, stop = flat.defaulted_integer("profile_step_start"), flat.defaulted_integer("profile_step_stop")
    if stop <= start:
        flat.problem("profile_step_stop", f"must be above profile_step_start ({start})", f"take {start + 2}")
        return
    names = ("profile", "memory_profiling")
    native.put("logging.profile.start", start, "profile_step_start", *names)
    native.put("logging.profile.steps", stop - start, "profile_step_stop", "profile_step_start")
    native.put("logging.profile.memory", memory, "memory_profiling")
