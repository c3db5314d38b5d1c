"""Checkpoints and logs: what to start from, what to keep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as File

from megatron.extras import EXTRAS, absent

from ..arithmetic import machine
from ..foreign import advice, neox_checkpoint
from ..problems import Problem
from ..rule_context import RuleContext


def one_way_to_start(context: RuleContext) -> Iterator[Problem]:
    checkpoint = context.config.checkpoint
    if checkpoint.initialize_from is not None and checkpoint.resume not in ("auto", "none"):
        yield context.problem(
            "checkpoint.initialize_from",
            "checkpoint.resume",
            rule="a run must either resume a checkpoint or take another one's weights, not both",
            fix="remove one of them (resume: auto goes on after an interruption, and else takes the weights)",
        )


def resume_exists(context: RuleContext) -> Iterator[Problem]:
    resume = context.config.checkpoint.resume
    if resume in ("auto", "none"):
        return
    if resume.lower() in ("no", "off", "false", "never", "null", "") and not File(resume or "no").exists():
        yield context.problem(
            "checkpoint.resume",
            rule="resume must be auto, none, or the path of a checkpoint",
            fix="write none to start anew",
        )
    elif "://" not in resume and not File(resume).exists():  # a URL is looked at by the run itself
        yield context.problem(
            "checkpoint.resume",
            rule=f"must be a checkpoint that exists; there is no checkpoint {resume}",
            fix=f"check the path (it is seen from {File.cwd()}), or use auto or none",
        )


def other_programs_checkpoints_are_recognised(context: RuleContext) -> Iterator[Problem]:
    """A run that took them for nothing would start anew beside them."""
    checkpoint = context.config.checkpoint
    for name in ("dir", "resume", "initialize_from"):
        where = getattr(checkpoint, name)
        step = None if where is None or "://" in where else neox_checkpoint(where)
        if step is not None:
            yield context.problem(
                f"checkpoint.{name}",
                rule=f"must not hold GPT-NeoX checkpoints: {where} has {step.name}",
                fix=advice(step, context.files, weights=name == "initialize_from"),
            )


def initial_weights_exist(context: RuleContext) -> Iterator[Problem]:
    path = context.config.checkpoint.initialize_from
    if path is not None and "://" not in path and not File(path).exists():
        yield context.problem(
            "checkpoint.initialize_from",
            rule=f"must be a checkpoint or a folder that exists; there is no checkpoint or folder {path}",
            fix=f"check the path; it is seen from {File.cwd()} (deepy checkpoint from-hf fetches a model of the hub)",
        )


def urls_can_be_opened(context: RuleContext) -> Iterator[Problem]:
    """Before the first save finds out: is there anything that speaks the protocol?"""
    checkpoint = context.config.checkpoint
    urls = {name: getattr(checkpoint, name) for name in ("resume", "initialize_from")}
    urls |= {f"levels.{number}.url": level.url for number, level in enumerate(checkpoint.levels)}
    for name, url in urls.items():
        wrong = protocol_problem(url) if url is not None and "://" in url else None
        if wrong is not None:
            yield context.problem(f"checkpoint.{name}", rule=wrong[0], fix=wrong[1])


def protocol_problem(url: str) -> tuple[str, str] | None:
    """Rule and fix if nothing here speaks the protocol of a URL."""
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(url.partition("://")[0].partition("::")[0])
    except (ImportError, ValueError) as error:
        rule = f"the package for the URL's protocol must be installed: {error}"
        return rule, "install it on all hosts (s3:// s3fs, gs:// gcsfs, abfs:// adlfs), or mend the URL"
    return None


def kept_checkpoints_are_saved(context: RuleContext) -> Iterator[Problem]:
    checkpoint, steps = context.config.checkpoint, context.config.training.steps
    regular = checkpoint.every or checkpoint.minutes or checkpoint.auto or checkpoint.store_every
    saves = regular or checkpoint.steps or checkpoint.log_spaced
    for name in ("keep_last", "keep_every"):
        if getattr(checkpoint, name) is not None and not saves:
            yield context.warning(
                f"checkpoint.{name}",
                "checkpoint.every",
                rule="must go with checkpoint.every: nothing is saved before the end",
                fix="give checkpoint.every",
            )
    if checkpoint.keep_every and checkpoint.every and checkpoint.keep_every % checkpoint.every:
        yield context.warning(
            "checkpoint.keep_every",
            "checkpoint.every",
            rule="keep_every must be a multiple of every: only saved steps can be kept",
            fix=f"use {-(-checkpoint.keep_every // checkpoint.every) * checkpoint.every}",
        )
    wrong = [step for step in checkpoint.steps if step < 0]
    if wrong:
        yield context.problem(
            "checkpoint.steps", rule=f"steps must be at least 0, and {wrong[0]} is not", fix="remove it"
        )
    late = [step for step in checkpoint.steps if step > steps]
    if late:
        yield context.warning(
            "checkpoint.steps",
            "training.steps",
            rule=f"must be at most training.steps: the run ends before step {late[0]}",
            fix="remove it",
        )


def resuming_needs_optimizer_state(context: RuleContext) -> Iterator[Problem]:
    checkpoint = context.config.checkpoint
    if not checkpoint.optimizer_state and context.given("checkpoint.resume") and checkpoint.resume == "auto":
        yield context.warning(
            "checkpoint.optimizer_state",
            "checkpoint.resume",
            rule="optimizer_state must be true for checkpoints to resume from",
            fix="use optimizer_state: true, or resume: none",
        )


def profiled_steps_are_run(context: RuleContext) -> Iterator[Problem]:
    profile, training = context.config.logging.profile, context.config.training
    if profile.start is not None and profile.start > training.steps:
        yield context.warning(
            "logging.profile.start",
            "training.steps",
            rule="must be at most training.steps: the run ends before the profile starts",
            fix=f"use at most {training.steps}",
        )
    if profile.start is not None and context.ranks is not None:
        wrong = [rank for rank in profile.ranks if not 0 <= rank < context.ranks]
        if wrong:
            yield context.problem(
                "logging.profile.ranks",
                rule=f"must be ranks of the run, 0 to {context.ranks - 1}, and {wrong[0]} is not",
                fix="name ranks of the run",
            )


def map_has_its_source(context: RuleContext) -> Iterator[Problem]:
    checkpoint = context.config.checkpoint
    if checkpoint.initialize_vocabulary != "same" and checkpoint.initialize_from is None:
        yield context.problem(
            "checkpoint.initialize_vocabulary",
            "checkpoint.initialize_from",
            rule="must go with checkpoint.initialize_from: rows are added to existing weights",
            fix="give checkpoint.initialize_from, or use initialize_vocabulary: same",
        )
    if checkpoint.initialize_map and checkpoint.initialize_from is None:
        yield context.problem(
            "checkpoint.initialize_map",
            "checkpoint.initialize_from",
            rule="must go with checkpoint.initialize_from: tensors are made from those of that checkpoint",
            fix="give checkpoint.initialize_from, or leave the map out",
        )
    for ours, theirs in checkpoint.initialize_map.items():
        if theirs != "new" and ours.count("*") != theirs.count("*"):
            yield context.problem_at(
                ("checkpoint", "initialize_map", ours),
                rule="both names must have the same number of *",
                fix="write as many * on the right as on the left, or 'new'",
            )


def layers_have_a_source(context: RuleContext) -> Iterator[Problem]:
    key, given = "checkpoint.initialize_layers", context.config.checkpoint.initialize_layers
    if not given:
        return
    if context.config.checkpoint.initialize_from is None:
        yield context.problem(
            key,
            "checkpoint.initialize_from",
            rule="must go with checkpoint.initialize_from: blocks start as those of that checkpoint",
            fix="give checkpoint.initialize_from, or leave the list out",
        )
    blocks = len(context.blocks)
    if blocks and len(given) != blocks:
        yield context.problem(
            key,
            "model.layers",
            rule=f"must have an entry for each of the model's {blocks} blocks, not {len(given)}",
            fix="name for each block one of the checkpoint's, or identity",
        )
    if any(each != "identity" and each < 0 for each in given):
        yield context.problem(key, rule="numbers of blocks must be at least 0", fix="count the blocks from 0")
    if "identity" in given and context.config.model.residual.norm == "sandwich":
        yield context.problem(
            key,
            "model.residual.norm",
            rule="identity must go with another norm than sandwich, which changes the stream in every block",
            fix="copy a block of the checkpoint instead",
        )


def name_is_a_folders(context: RuleContext) -> Iterator[Problem]:
    """The run's directory follows from its name, and must not be another run's, nor that of all."""
    name = context.config.run.name or ""
    if not context.given("run.dir") and {"", ".", ".."} & set(name.split("/")):
        yield context.problem(
            "run.name",
            rule="must be the name of a folder: the run's directory is runs/<run.name>",
            fix="give a name without . and .. between slashes, or run.dir",
        )


def folders_can_be_written(context: RuleContext) -> Iterator[Problem]:
    """Before the first save finds out, perhaps after hours. Folders of other hosts are theirs."""
    config = context.config
    if not context.starts_here:
        return
    base = File(config.launch.working_directory or ".")
    broken = machine.why_not_writable(base / config.run.dir)
    if broken:
        fix = f"choose another folder, or mend this one (the path is seen from {base.absolute()})"
        yield context.problem("run.dir", rule=f"must be a folder that the run can write into, and {broken}", fix=fix)
    own = machine.why_not_writable(base / config.checkpoint.dir)
    if own and own != broken:  # else it is inside run.dir
        fix = f"choose another folder, or mend this one (the path is seen from {base.absolute()})"
        rule = f"must be a folder that the run can write into, and {own}"
        yield context.problem("checkpoint.dir", rule=rule, fix=fix)


def packages_of_sinks_are_here(context: RuleContext) -> Iterator[Problem]:
    logging = context.config.logging
    asked = {"tensorboard": ("logging.tensorboard", logging.tensorboard, "false")}
    asked["wandb"] = ("logging.wandb.mode", logging.wandb.mode != "disabled", "disabled")
    wanted = [package for package, (_, on, _) in asked.items() if on] if context.starts_here else []
    for package in absent(wanted):
        key, _, off = asked[package]
        command = f'pip install "deepy[{EXTRAS[package]}]"'
        yield context.problem(
            key, rule=f"needs the package {package}, which is not installed", fix=f"{command}, or {off}"
        )


INPUT_RULES = (
    packages_of_sinks_are_here,
    resume_exists,
    other_programs_checkpoints_are_recognised,
    initial_weights_exist,
    urls_can_be_opened,
    name_is_a_folders,
    folders_can_be_written,
)
