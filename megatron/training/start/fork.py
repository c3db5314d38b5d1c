"""A branch of a run: another run from one of its checkpoints, mostly for the decay of the learning rate.

The branch is a run of its own. Its folder has the checkpoint, as hard links where possible, so that it needs no
space and outlives the trunk's retention. Its YAML file has the values that the trunk was given, replaced by its own.
It reads the batches that the trunk would have read next."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron.checkpoint.format.durable import move, step_of
from megatron.checkpoint.read.reader import open_checkpoint
from megatron.checkpoint.save.store import Store
from megatron.config import Config
from megatron.config.problems import UserError
from megatron.config.schema import dotted, parse_path
from megatron.config.show.difference import Described, described
from megatron.config.source.layers import ConfigSource, merge
from megatron.config.tree import drop, get, leaves, put, thaw
from megatron.report.ledger import Ledger, left_out

from ..schedule import Schedule

FILE = "fork.yml"
OF_THE_TRUNK = ("run", "checkpoint.dir", "checkpoint.resume", "training.stop_at_step", "data.cache")


def fork(trunk: Path, at: int, steps: int, folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Make a branch of a run that decays the learning rate to its floor.

    Args:
        trunk: a run's directory.
        at: the step of the checkpoint where the branch begins.
        steps: the length of the branch, all of it decay.
        folder: of the branch. Must not exist.
        changes: dotted keys with other values in the branch.

    Returns:
        The file to start the branch with.

    Raises:
        UserError: there is no such checkpoint, the trunk's rate is not constant there, or the folder exists.
        ConfigError, CheckpointError: the trunk's files cannot be read.
    """
    config_file = trunk / "config.yml"
    if not config_file.is_file():
        raise UserError(f"{trunk} is no run: it has no config.yml")
    if folder.exists():
        raise UserError(f"{folder} exists already: choose another --output, or remove it")
    source = described(str(trunk))
    checkpoint = _checkpoint(Path(source.config.checkpoint.dir), at)
    values = branch_values(source, at, steps, folder, changes)
    meta = open_checkpoint(checkpoint, verify="checksums").meta
    making = folder.with_name(f"{folder.name}.making")
    if making.exists():
        shutil.rmtree(making)
    target = making / "checkpoints" / checkpoint.name
    _link(checkpoint, target)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    head = f"# A branch of {trunk} from its step {at}: the learning rate decays over {steps} steps.\n"
    (making / FILE).write_text(head + text, encoding="utf-8")
    common = {"checkpoint": str(checkpoint), "decay_steps": steps}
    skipped = left_out(trunk / "ledger.jsonl", meta.ledger.get("bytes", 0), at)  # also since the checkpoint was saved
    more = {} if skipped is None else {"left_out": skipped}
    Ledger(making / "ledger.jsonl").write("forked", step=at, trunk=str(trunk), **common, **more)
    move(making, folder)
    Ledger(trunk / "ledger.jsonl").write("fork", step=at, branch=str(folder), **common)
    return folder / FILE


def branch_values(
    trunk: Described, at: int, steps: int, folder: Path, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Values of the branch's file: the trunk's given values, then `changes` and the branch's own.

    Raises:
        UserError: the trunk's learning rate is not constant from `at` on.
    """
    config = trunk.config
    _refuse_moving_rate(config, at)
    values = given(trunk)
    for key in OF_THE_TRUNK:
        drop(values, tuple(key.split(".")))
    if config.checkpoint.store is not None:  # where the trunk's copies are
        levels = [each for each in values["checkpoint"]["levels"] if each["place"] != "store"]
        put(values, ("checkpoint", "levels"), levels)
    end = at + steps
    put(values, ("run",), {"name": folder.name, "dir": str(folder)})
    # The order of the data depends on training.steps if texts are read several times, so the trunk's stays.
    if end < config.training.steps:
        put(values, ("training", "stop_at_step"), end)
    else:
        put(values, ("training", "steps"), end)
    kind = "infinite" if config.schedule.type == "infinite" else "wsd"
    put(values, ("schedule", "type"), kind)
    put(values, ("schedule", "steps"), end)
    put(values, ("schedule", "decay_steps"), steps)
    if config.schedule.warmup_fraction is not None:  # a share of another length now
        length = (config.schedule.steps or 0) - config.schedule.start
        drop(values, ("schedule", "warmup_fraction"))
        put(values, ("schedule", "warmup_steps"), round(config.schedule.warmup_fraction * length))
    changed: dict[str, Any] = {}
    for key, value in (changes or {}).items():
        put(changed, parse_path(key), value)
    return merge([ConfigSource(values), ConfigSource(changed)])[0].values if changed else values


def given(run: Described) -> dict[str, Any]:
    """The given values of a resolved configuration, as a tree. Lists are kept whole."""
    everything = thaw(run.config.model_dump())
    values: dict[str, Any] = {}
    for path, value in leaves(everything):
        if run.origins.get(dotted(path), "default").startswith(("default", "derived", "at start")):
            continue
        index = next((number for number, part in enumerate(path) if isinstance(part, int)), None)
        path, value = (path, value) if index is None else (path[:index], get(everything, path[:index]))
        put(values, path, value)
    return values


def _refuse_moving_rate(config: Config, at: int) -> None:
    """A decay must begin at the rate that the trunk has there and would have kept."""
    kind, schedule = config.schedule.type, Schedule(config)
    if kind not in ("constant", "wsd", "infinite"):
        raise UserError(
            f"the trunk's schedule.type is {kind!r}, whose rate is never constant: a branch that decays must come from "
            "a trunk of type constant, wsd or infinite"
        )
    if schedule.lr(at) != schedule.lr(at - 1) or (kind != "infinite" and schedule.lr(at) != config.optimizer.lr):
        raise UserError(
            f"the trunk's learning rate is moving at step {at} ({schedule.lr(at):.3g} after "
            f"{schedule.lr(at - 1):.3g}): a branch must begin after the warmup and before the decay"
        )


def _checkpoint(folder: Path, at: int) -> Path:
    paths = {step_of(path): path for path in Store(folder).paths()}
    if at in paths:
        return paths[at]
    steps = ", ".join(map(str, paths)) or "none"
    raise UserError(f"there is no checkpoint of step {at} in {folder}. There are: {steps}")


def _link(source: Path, target: Path) -> None:
    """Link a checkpoint's files under another name, or copy them where the file system has no links."""

    def one(file: str, other: str) -> None:
        try:
            os.link(file, other)
        except OSError:
            shutil.copy2(file, other)

    shutil.copytree(source, target, copy_function=one)
