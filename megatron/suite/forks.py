"""Branches of a suite's runs: their steps, the length of their decay, and other changes.

`deepy fork` makes a branch from a run's checkpoint. In a suite it is a run like the others, which can begin once its
trunk has saved that checkpoint."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron.config.problems import Problem, UserError
from megatron.config.resolution import Resolved, combine
from megatron.config.schema import Config
from megatron.config.show.difference import Described
from megatron.config.source.layers import ConfigSource, Origin

KEYS = {"at", "steps", "set"}
# Keys that a branch sets itself.
OWN = ("run", "training.steps", "training.stop_at_step", "checkpoint.dir", "checkpoint.resume")
OWN_SCHEDULE = ("schedule.type", "schedule.steps", "schedule.decay_steps")


@dataclass(frozen=True)
class Fork:
    """A branch of every run."""

    at: int  # the step of the checkpoint where it begins
    steps: int  # its length, all of it decay
    changes: Mapping[str, Any]  # dotted keys that have other values than in the trunk

    @property
    def end(self) -> int:
        return self.at + self.steps

    def __str__(self) -> str:
        return f"{self.at}+{self.steps}"


Tell = Callable[[tuple[str | int, ...], str, str], None]


def read_forks(
    given: Any, keys: Callable[[tuple[str, ...], dict[str, Any]], Mapping[str, Any]], tell: Tell
) -> list[Fork]:
    """The branches in `forks:` of a suite's file. `tell` receives each error (place, rule, fix)."""
    entries = [given] if isinstance(given, dict) else given
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        tell(("forks",), "must be a mapping of `at` and `steps`, or a list of them", "forks: {at: [1000], steps: 100}")
        return []
    found: dict[int, Fork] = {}
    for entry in entries:
        for key in entry.keys() - KEYS:
            tell(("forks", key), "must be one of " + ", ".join(sorted(KEYS)), "correct or remove the key")
        steps, places = entry.get("steps"), entry.get("at")
        places = places if isinstance(places, list) else [places]
        if not places or not all(_whole(each) for each in places):
            tell(("forks", "at"), "must be a step, or a list of steps, from 1 on", "at: [1000, 2000]")
            continue
        if not (_whole(steps) or isinstance(steps, float) and 0 < steps < 1):
            rule = "must be a number of steps, at least 1, or a share below 1 of the steps before the branch"
            tell(("forks", "steps"), rule, "steps: 100, or steps: 0.1")
            continue
        changes = entry.get("set", {})
        if not isinstance(changes, dict):
            tell(("forks", "set"), "must be a mapping of keys", "set: {data.train: data/fine}")
            continue
        changes = keys(("forks", "set"), changes)
        for key in changes:
            if any(key == own or key.startswith(f"{own}.") for own in (*OWN, *OWN_SCHEDULE)):
                tell(("forks", "set"), f"must not set {key}, which is the branch's own", "leave it out")
        for at in places:
            if at in found:
                tell(("forks", "at"), f"must name each step once, and {at} comes again", "leave one out")
            found[at] = Fork(at, max(round(steps * at), 1) if isinstance(steps, float) else steps, changes)
    return list(found.values())


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def resolved_fork(fork: Fork, folder: Path, trunk: Resolved, *, ranks: int, check_inputs: bool) -> Resolved:
    """The configuration of a branch, from its trunk's, as `fork` will write it.

    Raises:
        ConfigError: the changes make mistakes.
        UserError: the trunk's learning rate is not constant there.
    """
    from megatron.training.start.fork import FILE, branch_values

    source = Described(trunk.config, {key: str(origin) for key, origin in trunk.origins.items()})
    values = branch_values(source, fork.at, fork.steps, folder, fork.changes)
    origin = Origin("file", file=str(folder / FILE))
    return combine([ConfigSource(values, fallback=origin)], ranks=ranks, check_inputs=check_inputs, name=folder.name)


def unsaved(forks: Sequence[Fork], config: Config, where: str) -> Iterator[Problem]:
    """Problems with branches whose checkpoint a run with this configuration does not save or keep."""
    from megatron.checkpoint.save.policy import reason_to_save

    section, last = config.checkpoint, config.training.stop_at_step or config.training.steps
    late = [each.at for each in forks if each.at > last]
    if late:
        rule = f"must begin by the last step of the run, {last}, and {', '.join(map(str, late))} is later"
        yield Problem("forks", rule, "remove it, or train for longer", where=where)
    lost = [each.at for each in forks if each.at <= last and reason_to_save(section, each.at, last_step=last) is None]
    if lost:
        rule = f"must begin where every run saves a checkpoint, and none is saved at {', '.join(map(str, lost))}"
        yield Problem("forks", rule, f"set: {{checkpoint.steps: {lost}}}", where=where)
    gone = [each.at for each in forks if section.keep_last is not None and each.at % (section.keep_every or last + 1)]
    if gone:
        rule = f"must begin at checkpoints that are kept, and checkpoint.keep_last deletes {', '.join(map(str, gone))}"
        fix = "leave checkpoint.keep_last out, or set checkpoint.keep_every to a step that divides them"
        yield Problem("forks", rule, fix, where=where)


def make(fork: Fork, trunk: Path, folder: Path) -> bool:
    """Make the branch's folder if its trunk has the checkpoint. Return whether the branch can be trained.

    Raises:
        CheckpointError, OSError, UserError: the checkpoint or the trunk's files cannot be read.
    """
    from megatron.checkpoint.format.durable import step_of
    from megatron.checkpoint.save.store import Store
    from megatron.training.start import fork as branches

    if (folder / branches.FILE).is_file():
        return True
    try:
        written = (trunk / "config.yml").stat().st_mtime_ns
    except FileNotFoundError:
        return False
    checkpoints = _checkpoints(trunk.absolute(), written)
    if fork.at not in {step_of(path) for path in Store(checkpoints).paths()}:
        return False
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is no branch of {trunk}: move it away")
    branches.fork(trunk, fork.at, fork.steps, folder, fork.changes)
    return True


@cache
def _checkpoints(run: Path, written: int) -> Path:
    """Folder of a run's checkpoints. It is cached, since reading the configuration takes a second and waiting branches
    poll.

    Args:
        written: time of its config.yml in ns: another file is read again.
    """
    from megatron.config.show.difference import described

    return Path(described(str(run)).config.checkpoint.dir).absolute()
