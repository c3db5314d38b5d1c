"""Checkpoints, their levels, and logs: where a run starts, and what it keeps."""

import re
from collections.abc import Iterator
from pathlib import Path as File

from megatron.extras import EXTRAS, absent

from ..arithmetic import machine
from ..foreign import advice, neox_checkpoint
from ..problems import Problem
from ..rule_context import Check, RuleContext
from ..sections.output import RUN_NAME, LevelSection

FROM = "checkpoint.initialize_from"


def sources_exist(context: RuleContext) -> Iterator[Problem]:
    """The checkpoint to resume and the weights to start from. The run itself opens URLs."""
    checkpoint = context.config.checkpoint
    resume, path = checkpoint.resume, checkpoint.initialize_from
    if resume.lower() in ("no", "off", "false", "never", "null", "") and not File(resume or "no").exists():
        rule = "resume must be auto, none, or the path of a checkpoint"
        yield context.problem("checkpoint.resume", rule=rule, fix="write none to start without a checkpoint")
    elif resume not in ("auto", "none") and "://" not in resume and not File(resume).exists():
        yield context.problem(
            "checkpoint.resume",
            rule=f"must be a checkpoint that exists, and there is no checkpoint {resume}",
            fix=f"check the path (it is seen from {File.cwd()}), or use auto or none",
        )
    if path is not None and "://" not in path and not File(path).exists():
        yield context.problem(
            FROM,
            rule=f"must be a checkpoint or a folder that exists, and there is no checkpoint or folder {path}",
            fix=f"check the path (it is seen from {File.cwd()}), or get it from the hub: deepy checkpoint from-hf",
        )


def other_programs_checkpoints_are_recognised(context: RuleContext) -> Iterator[Problem]:
    """A run that did not recognise them would start at step 0 next to them."""
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


def urls_can_be_opened(context: RuleContext) -> Iterator[Problem]:
    """Before the first save fails: a package for the protocol must be installed."""
    checkpoint = context.config.checkpoint
    urls = {name: getattr(checkpoint, name) for name in ("resume", "initialize_from")}
    urls |= {f"levels.{number}.url": level.url for number, level in enumerate(checkpoint.levels)}
    for name, url in urls.items():
        wrong = protocol_problem(url) if url is not None and "://" in url else None
        if wrong is not None:
            yield context.problem(f"checkpoint.{name}", rule=wrong[0], fix=wrong[1])


def protocol_problem(url: str) -> tuple[str, str] | None:
    """Rule and fix if no installed package has the protocol of a URL."""
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(url.partition("://")[0].partition("::")[0])
    except (ImportError, ValueError) as error:
        rule = f"the package for the URL's protocol must be installed: {error}"
        return rule, "install it on all hosts (s3:// s3fs, gs:// gcsfs, abfs:// adlfs), or fix the URL"
    return None


def kept_checkpoints_are_saved(context: RuleContext) -> Iterator[Problem]:
    checkpoint, steps = context.config.checkpoint, context.config.training.steps
    regular = checkpoint.every or checkpoint.minutes or checkpoint.auto or checkpoint.store_every
    saves = regular or checkpoint.steps or checkpoint.log_spaced
    for name in ("keep_last", "keep_every"):
        if getattr(checkpoint, name) is not None and not saves:
            rule = "must go with checkpoint.every: nothing is saved before the end"
            yield context.warning(f"checkpoint.{name} checkpoint.every", rule=rule, fix="give checkpoint.every")
    if checkpoint.keep_every and checkpoint.every and checkpoint.keep_every % checkpoint.every:
        yield context.warning(
            "checkpoint.keep_every checkpoint.every",
            rule="keep_every must be a multiple of every: only saved steps can be kept",
            fix=f"use {-(-checkpoint.keep_every // checkpoint.every) * checkpoint.every}",
        )
    if wrong := [step for step in checkpoint.steps if step < 0]:
        rule = f"steps must be at least 0, and {wrong[0]} is not"
        yield context.problem("checkpoint.steps", rule=rule, fix="remove it")
    if late := [step for step in checkpoint.steps if step > steps]:
        rule = f"must be at most training.steps: the run ends before step {late[0]}"
        yield context.warning("checkpoint.steps training.steps", rule=rule, fix="remove it")


def resuming_needs_optimizer_state(context: RuleContext) -> Iterator[Problem]:
    checkpoint = context.config.checkpoint
    if not checkpoint.optimizer_state and context.given("checkpoint.resume") and checkpoint.resume == "auto":
        yield context.warning(
            "checkpoint.optimizer_state checkpoint.resume",
            rule="optimizer_state must be true for checkpoints to resume from",
            fix="use optimizer_state: true, or resume: none",
        )


def profiled_ranks_are_there(context: RuleContext) -> Iterator[Problem]:
    profile = context.config.logging.profile
    if profile.start is not None and context.ranks is not None:
        wrong = [rank for rank in profile.ranks if not 0 <= rank < context.ranks]
        if wrong:
            rule = f"must be ranks of the run, 0 to {context.ranks - 1}, and {wrong[0]} is not"
            yield context.problem("logging.profile.ranks", rule=rule, fix="name ranks of the run")


def map_names_tensors(context: RuleContext) -> Iterator[Problem]:
    for ours, theirs in context.config.checkpoint.initialize_map.items():
        if theirs != "new" and ours.count("*") != theirs.count("*"):
            yield context.problem_at(
                ("checkpoint", "initialize_map", ours),
                rule="both names must have the same number of *",
                fix=f"write {ours.count('*')} * on the right as on the left, or 'new'",
            )


def layers_have_a_source(context: RuleContext) -> Iterator[Problem]:
    key, given = "checkpoint.initialize_layers", context.config.checkpoint.initialize_layers
    blocks = len(context.blocks)
    if given and blocks and len(given) != blocks:
        yield context.problem(
            f"{key} model.layers",
            rule=f"must have an entry for each of the model's {blocks} blocks, not {len(given)}",
            fix="name for each block one of the checkpoint's, or identity",
        )
    if any(each != "identity" and each < 0 for each in given):
        yield context.problem(key, rule="numbers of blocks must be at least 0", fix="count the blocks from 0")


def name_is_a_folders(context: RuleContext) -> Iterator[Problem]:
    """The run's directory follows from its name. It must not be another run's, nor the folder of all runs."""
    name = context.config.run.name or ""
    if not context.given("run.dir") and {"", ".", ".."} & set(name.split("/")):
        yield context.problem(
            "run.name",
            rule="must be the name of a folder: the run's directory is runs/<run.name>",
            fix="give a name without . and .. between slashes, or run.dir",
        )


def folders_can_be_written(context: RuleContext) -> Iterator[Problem]:
    """Before the first save fails, perhaps after hours. Other hosts check their own folders."""
    config = context.config
    if not context.starts_here:
        return
    base, earlier = File(config.launch.working_directory or "."), None
    fix = f"choose another folder, or fix this one (the path is seen from {base.absolute()})"
    for key, path in (("run.dir", config.run.dir), ("checkpoint.dir", config.checkpoint.dir)):
        reason = machine.why_not_writable(base / path)
        if reason and reason != earlier:  # else it is inside run.dir
            yield context.problem(key, rule=f"must be a folder that the run can write into, and {reason}", fix=fix)
        earlier = reason


def packages_of_sinks_are_here(context: RuleContext) -> Iterator[Problem]:
    logging = context.config.logging
    asked = {"tensorboard": ("logging.tensorboard", logging.tensorboard, "false")}
    asked["wandb"] = ("logging.wandb.mode", logging.wandb.mode != "disabled", "disabled")
    wanted = [package for package, (_, on, _) in asked.items() if on] if context.starts_here else []
    for package in absent(wanted):
        key, _, off = asked[package]
        fix = f'pip install "deepy[{EXTRAS[package]}]", or {off}'
        yield context.problem(key, rule=f"needs the package {package}, which is not installed", fix=fix)


_IN_URLS = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._~-]*")  # no letters that URLs quote, and no parent folder


def levels_have_their_keys(context: RuleContext) -> Iterator[Problem]:
    for number, level in enumerate(context.config.checkpoint.levels):
        at = f"checkpoint.levels.{number}"
        if level.every != "auto" and level.every < 1:
            yield context.problem(f"{at}.every", rule="must be at least 1, or auto", fix="use 1")
        if level.keep != "all" and level.keep < 1:
            yield context.problem(f"{at}.keep", rule="must be at least 1", fix="use 1")
        if level.place == "store":
            for name in (name for name in ("path", "neighbours") if getattr(level, name)):
                fix = "remove it" + (". A folder is a URL too: url: file:///folder" if name == "path" else "")
                rule = "must be absent with place: store, which has no hosts"
                yield context.problem(f"{at}.{name} {at}.place", rule=rule, fix=fix)
            continue
        if level.keep == "all":
            rule = "must be a number on hosts, which all saves would fill"
            yield context.problem(f"{at}.keep {at}.place", rule=rule, fix="use 2")
        if level.url is not None:
            fix = "use place: store, or remove it"
            yield context.problem(f"{at}.url {at}.place", rule="must go with place: store", fix=fix)


def hosts_have_a_place(context: RuleContext) -> Iterator[Problem]:
    checkpoint, seen = context.config.checkpoint, dict[tuple[str, str | None], int]()
    for number, level in enumerate(checkpoint.levels):
        at = f"checkpoint.levels.{number}"
        if level.place == "store":
            continue
        if level.place == "disk" and level.path is None:
            fix = "give a folder of each host's own disk"
            yield context.problem(f"{at}.path {at}.place", rule="a disk must have a path", fix=fix)
        if level.path is not None and not level.path.startswith("/"):
            yield context.problem(
                f"{at}.path",
                rule="must be an absolute path: ranks start in one folder that all hosts share",
                fix="begin it with /. The word {host} in it stands for the host's name",
            )
        if level.every != "auto" and checkpoint.every and level.every >= checkpoint.every:
            yield context.warning(
                f"{at}.every checkpoint.every",
                rule="must be below checkpoint.every: a copy that is saved less often is never the newest",
                fix=f"use {max(checkpoint.every // 10, 1)}",
            )
        if (level.title, level.path) in seen:
            rule = f"must not be the folder of another level, {seen[level.title, level.path]}"
            yield context.problem(f"{at}.path", rule=rule, fix="remove one of them, or give it another path")
        seen[level.title, level.path] = number


def stores_have_a_url(context: RuleContext) -> Iterator[Problem]:
    levels, name = context.config.checkpoint.levels, context.config.run.name
    stores = [number for number, level in enumerate(levels) if level.place == "store"]
    for number in stores[1:]:
        yield context.problem(
            f"checkpoint.levels.{number}.place",
            rule=f"must be the only store, and level {stores[0]} is one",
            fix="remove one of them, since stores replicate themselves",
        )
    for number in stores:
        wrong = _wrong_url(context, f"checkpoint.levels.{number}", levels[number], name or "")
        if wrong is not None:
            yield wrong


def _wrong_url(context: RuleContext, at: str, level: LevelSection, name: str) -> Problem | None:
    if level.url is None or "://" not in level.url:
        fix = "use s3://bucket/{run.name}, or file:///folder/{run.name}"
        return context.problem(f"{at}.url {at}.place", rule="a store must have a URL", fix=fix)
    if context.named_store and not _IN_URLS.fullmatch(name):
        return context.problem(
            f"run.name {at}.url",
            rule=f"must be letters, digits and . _ ~ - after a letter or digit, without .., for {RUN_NAME} in a URL",
            fix=f"use another name, or write the URL without {RUN_NAME}",
        )
    if set(level.url) & set("{}"):
        rule = f"must be a URL, in which only {RUN_NAME} may stand in braces"
        return context.problem(f"{at}.url", rule=rule, fix=f"use {RUN_NAME}, or remove the braces")
    return None


def neighbours_are_there(context: RuleContext) -> Iterator[Problem]:
    """Where the hosts are not known yet, the run itself checks."""
    for number, level in enumerate(context.config.checkpoint.levels):
        if level.neighbours and level.place != "store" and context.starts_here:
            yield context.problem(
                f"checkpoint.levels.{number}.neighbours",
                rule="must be fewer than the hosts, and this run has one",
                fix="use neighbours: 0, or start it on several hosts (launch.hostfile)",
            )


CHECKS = (
    Check(
        f"{FROM} checkpoint.resume",
        lambda c: c.checkpoint.initialize_from is not None and c.checkpoint.resume not in ("auto", "none"),
        "a run must either resume a checkpoint or take another one's weights, not both",
        "remove one of them (resume: auto continues after an interruption, and else takes the weights)",
    ),
    Check(
        "logging.profile.start training.steps",
        lambda c: c.logging.profile.start is not None and c.logging.profile.start > c.training.steps,
        "must be at most training.steps: the run ends before the profile starts",
        lambda c: f"use at most {c.training.steps}",
        fatal=False,
    ),
    Check(
        f"checkpoint.initialize_vocabulary {FROM}",
        lambda c: c.checkpoint.initialize_vocabulary != "same" and c.checkpoint.initialize_from is None,
        f"must go with {FROM}: rows are added to existing weights",
        f"give {FROM}, or use initialize_vocabulary: same",
    ),
    Check(
        f"checkpoint.initialize_map {FROM}",
        lambda c: c.checkpoint.initialize_map and c.checkpoint.initialize_from is None,
        f"must go with {FROM}: tensors are made from that checkpoint's tensors",
        f"give {FROM}, or remove the map",
    ),
    Check(
        f"checkpoint.initialize_layers {FROM}",
        lambda c: c.checkpoint.initialize_layers and c.checkpoint.initialize_from is None,
        f"must go with {FROM}: blocks start as that checkpoint's blocks",
        f"give {FROM}, or remove the list",
    ),
    Check(
        "checkpoint.initialize_layers model.residual.norm",
        lambda c: "identity" in c.checkpoint.initialize_layers and c.model.residual.norm in ("sandwich", "deepnorm"),
        "identity must go with another norm than sandwich or deepnorm, which change the stream in every block",
        "copy a block of the checkpoint instead",
    ),
    Check(
        "checkpoint.initialize_layers model.residual.streams",
        lambda c: "identity" in c.checkpoint.initialize_layers and c.model.residual.streams > 1,
        "identity must go with streams: 1, since each block mixes the rows of several",
        "copy a block of the checkpoint instead",
    ),
    Check(
        "checkpoint.optimizer_state",
        lambda c: c.checkpoint.near and not c.checkpoint.optimizer_state,
        "must be true with levels on hosts: a restart begins from them",
        "use optimizer_state: true, or remove these levels",
    ),
)


INPUT_RULES = (
    packages_of_sinks_are_here,
    sources_exist,
    other_programs_checkpoints_are_recognised,
    urls_can_be_opened,
    name_is_a_folders,
    folders_can_be_written,
    neighbours_are_there,
)
