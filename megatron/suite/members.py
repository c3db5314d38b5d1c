"""A suite's file (bases, axes with their values), the run of every combination, and the progress of each run."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.config.problems import ConfigError, Problem, UserError
from megatron.config.resolution import Resolved, load
from megatron.config.schema import dotted
from megatron.config.sections.output import RUN_NAME
from megatron.config.source.layers import Origin
from megatron.config.source.yaml_source import parse
from megatron.config.tree import get, leaves, thaw
from megatron.installation import configuration_file
from megatron.report.jsonl import read_lines, sound_metrics
from megatron.report.ledger import read_ledger

from .forks import Fork, read_forks, resolved_fork, unsaved

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEYS = {"name", "dir", "ranks", "files", "set", "axes", "forks"}
FORK = "fork"  # the axis of branches, in tables
TRUNK = "-"  # a run from the start there
MOST = 10_000  # members of a suite


@dataclass(frozen=True)
class Member:
    """One run of a suite."""

    name: str  # the names of its values, joined by dashes, and the first step of a branch. Also the name of its folder.
    values: Mapping[str, str]  # axis -> name of the value
    folder: Path  # the run's directory
    files: tuple[str, ...]  # its configuration files, later ones winning
    overrides: tuple[str, ...]  # `key=value` words after them
    fork: Fork | None = None  # None for a run from the start
    trunk: Member | None = None  # the run that it is a branch of

    @property
    def words(self) -> list[str]:
        """Arguments of train.py that start it."""
        return [*self.files, *self.overrides]

    @property
    def first(self) -> int:
        """Its first step."""
        return 0 if self.fork is None else self.fork.at

    def branch(self, fork: Fork) -> Member:
        """A branch of this run. Its file is made when the run has the checkpoint."""
        from megatron.training.start.fork import FILE

        name = f"{self.name}-from-{fork.at}"
        folder = self.folder.with_name(name)
        return Member(name, {**self.values, FORK: str(fork)}, folder, (str(folder / FILE),), (), fork, self)


@dataclass(frozen=True)
class Suite:
    """A suite as its file describes it."""

    path: Path  # the file
    name: str
    folder: Path  # where the runs are, one folder each
    ranks: int | None  # processes of each run, None for the launcher's choice
    axes: Mapping[str, tuple[str, ...]]  # axis -> names of its values
    members: tuple[Member, ...]  # runs from the start first, then their branches

    def resolved(self, *, check_inputs: bool = False) -> dict[str, Resolved]:
        """The configuration of every member, by its name.

        Raises:
            ConfigError: with the problems of all members. Shared problems occur once.
        """
        found: dict[str, Resolved] = {}
        problems: dict[str, Problem] = {}
        forks = [member.fork for member in self.members if member.fork and member.trunk is self.members[0]]
        for member in self.members:
            try:
                resolved = self._one(member, found, check_inputs)
                if resolved is not None:
                    found[member.name] = resolved
                    if member.fork is None:
                        problems |= {str(each): each for each in unsaved(forks, resolved.config, str(self.path))}
            except ConfigError as error:
                for problem in error.problems:
                    if problem.fatal:
                        problems.setdefault(str(problem), problem)
            except UserError as error:
                rule = f"must begin at a constant learning rate: {error}"
                problem = Problem("forks", rule, "choose other steps, or another schedule", where=str(self.path))
                problems.setdefault(str(problem), problem)
        problems |= {str(each): each for each in self._shared_stores(found)}
        if problems:
            raise ConfigError(problems.values())
        return found

    def _shared_stores(self, found: Mapping[str, Resolved]) -> Iterator[Problem]:
        """Problems with shared places: checkpoints are named by their steps, so runs would overwrite each other's."""
        users: dict[str, list[str]] = {}
        for name, resolved in found.items():
            if (level := resolved.config.checkpoint.store) is not None and level.url is not None:
                users.setdefault(level.url.rstrip("/"), []).append(name)
        for url, names in users.items():
            if len(names) > 1:
                shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                rule = f"must be a place of its own for every run, and {shown} have {url}"
                fix = f"use url: {url}/{RUN_NAME}, or remove the store"
                yield Problem("checkpoint.levels", rule, fix, where=str(self.path))

    def _one(self, member: Member, found: Mapping[str, Resolved], check_inputs: bool) -> Resolved | None:
        """A member's configuration. None for a branch of a run without one."""
        ranks = self.ranks or 1
        if member.fork is None or member.trunk is None:
            return load(list(member.files), list(member.overrides), ranks=ranks, check_inputs=check_inputs)
        trunk = found.get(member.trunk.name)
        if trunk is None:
            return None
        return resolved_fork(member.fork, member.folder, trunk, ranks=ranks, check_inputs=check_inputs)


def read_suite(path: Path) -> Suite:
    """Read a suite's file.

    Raises:
        ConfigError: it cannot be read, or has errors, with all of them and their lines.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"must be a file of text that can be read ({error})"
        raise ConfigError([Problem("", rule, "name the suite's file", where=str(path))]) from error
    values, origins, problems = parse(text, lambda line: Origin("file", file=str(path), line=line))
    reader = _Reader(path, values if isinstance(values, dict) else {}, origins, list(problems))
    if not isinstance(values, dict) and not problems:
        reader.problem((), "must be a mapping with the keys " + ", ".join(sorted(_KEYS)), "see docs/suites.md")
    suite = reader.suite() if isinstance(values, dict) else None
    if reader.problems or suite is None:
        raise ConfigError(reader.problems)
    return suite


class SuiteFile:
    """Values of a file of runs or stages, and their errors with places."""

    def __init__(self, path: Path, values: dict[str, Any], origins: Mapping[Any, Origin], problems: list[Problem]):
        self.path, self.values, self.origins, self.problems = path, values, origins, problems

    def problem(self, at: tuple[str | int, ...], rule: str, fix: str) -> None:
        origin = next((self.origins[at[:end]] for end in range(len(at), 0, -1) if at[:end] in self.origins), None)
        self.problems.append(Problem(dotted(at), rule, fix, where=str(origin or self.path)))

    def place(self, name: str) -> tuple[str, int | None]:
        """The folder of the runs, and the ranks of each."""
        ranks, folder = self.values.get("ranks"), self.values.get("dir", f"runs/{name}")
        if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
            self.problem(("ranks",), "must be a number of processes, at least 1", "give one, or remove it")
        if not isinstance(folder, str) or not folder:
            self.problem(("dir",), "must be the path of a folder", "give a path, or remove it")
        return str(folder), ranks

    def find(self, word: str) -> str | None:
        """A file next to this one, or a file of the command line's search."""
        near = self.path.parent / word
        return str(near) if near.is_file() else configuration_file(word)


class _Reader(SuiteFile):
    """Converts the values of a file to a suite."""

    def suite(self) -> Suite | None:
        for key in self.values.keys() - _KEYS:
            self.problem((key,), "must be one of " + ", ".join(sorted(_KEYS)), "correct or remove the key")
        name = self._name(("name",), self.values.get("name", self.path.stem))
        folder, ranks = self.place(name)
        base = self._change(("files",), ("set",), self.values)
        axes = self._axes()
        forks = read_forks(self.values["forks"], self._keys, self.problem) if "forks" in self.values else []
        if forks and FORK in axes:
            self.problem(("axes", FORK), f"must not be called {FORK}, as branches are", "choose another name")
        if self.problems:
            return None
        members = tuple(self._members(Path(folder), base, axes, bool(forks)))
        members += tuple(member.branch(fork) for member in members for fork in forks)
        self._refuse_equal_names(members)
        if not all(member.files for member in members):
            rule = "must name at least one configuration file for every run, which train.py needs"
            self.problem(("files",), rule, "files: [quickstart]")
            return None
        names = {axis: tuple(values) for axis, values in axes.items()}
        if forks:
            names[FORK] = (TRUNK, *map(str, forks))
        return Suite(self.path, name, Path(folder), ranks, names, members)

    def _refuse_equal_names(self, members: tuple[Member, ...]) -> None:
        """Such as a-b of the values a-b, and of a and b."""
        names = [member.name for member in members]
        for name in {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ():
            self.problem(("axes",), f"must give every run a name of its own, and {name} is two", "rename a value")

    def _name(self, at: tuple[str, ...], name: Any) -> str:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            self.problem(at, "must be a name of letters, digits, dots, dashes and underscores", "choose another name")
        return str(name)

    def _axes(self) -> dict[str, dict[str, _Change]]:
        axes = self.values.get("axes", {})
        if not isinstance(axes, dict) or not axes or not all(isinstance(each, dict) and each for each in axes.values()):
            self.problem(("axes",), "must name at least one axis, each with its values", "axes: {seed: {s1: {...}}}")
            return {}
        found: dict[str, dict[str, _Change]] = {}
        for axis, values in axes.items():
            self._name(("axes", axis), axis)
            for value, change in values.items():
                at = ("axes", axis, value)
                self._name(at, value)
                if not isinstance(change, dict):
                    self.problem(at, "must be a mapping of keys, or {files: [...], set: {...}}", "write {key: value}")
                    continue
                full = change.keys() <= {"files", "set"}
                found.setdefault(axis, {})[value] = (
                    self._change((*at, "files"), (*at, "set"), change) if full else _Change((), self._keys(at, change))
                )
        size = 1
        for values in found.values():
            size *= len(values)
        if size > MOST:
            self.problem(("axes",), f"must not make more than {MOST:,} runs, and make {size:,}", "leave out values")
        return found

    def _change(self, files_at: tuple[str, ...], set_at: tuple[str, ...], values: Mapping[str, Any]) -> _Change:
        files = values.get("files", [])
        files = [files] if isinstance(files, str) else files
        if not isinstance(files, list) or not all(isinstance(each, str) for each in files):
            self.problem(files_at, "must be a list of configuration files", "files: [pythia/70m, mine.yml]")
            files = []
        paths = [self._file(files_at, each) for each in files]
        keys = values.get("set", {})
        if not isinstance(keys, dict):
            self.problem(set_at, "must be a mapping of keys", "set: {training.steps: 100}")
            keys = {}
        return _Change(tuple(paths), self._keys(set_at, keys))

    def _file(self, at: tuple[str, ...], word: str) -> str:
        found = self.find(word)
        if found is None:
            self.problem(at, f"must be files that exist, and {word!r} does not", "correct the path or the name")
        elif Path(found).is_file() and self.path.samefile(found):
            self.problem(at, f"must be configurations, and {word!r} is this suite", "rename one of the two files")
        return found or word

    def _keys(self, at: tuple[str, ...], keys: dict[str, Any]) -> dict[str, Any]:
        found = {".".join(map(str, path)): value for path, value in values_of(keys)}
        for key in ("run.dir", "run.name"):
            if key in found:
                self.problem(at, f"must not set {key}, which is the suite's", "remove it, since `dir` names the folder")
        return found

    @staticmethod
    def _members(folder: Path, base: _Change, axes: dict[str, dict[str, _Change]], forked: bool) -> Iterator[Member]:
        for chosen in itertools.product(*(values.items() for values in axes.values())):
            name = "-".join(value for value, _ in chosen)
            files = [*base.files, *(file for _, change in chosen for file in change.files)]
            keys = dict(base.keys)
            for _, change in chosen:
                keys.update(change.keys)
            keys |= {"run.name": f"{folder.name}-{name}", "run.dir": str(folder / name)}
            overrides = tuple(f"{key}={json.dumps(value)}" for key, value in keys.items())
            values = {axis: value for axis, (value, _) in zip(axes, chosen)} | ({FORK: TRUNK} if forked else {})
            yield Member(name, values, folder / name, tuple(files), overrides)


@dataclass(frozen=True)
class _Change:
    """Changes of an axis's value: files after the others, and keys after all files."""

    files: tuple[str, ...]
    keys: Mapping[str, Any]


def values_of(tree: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Keys of nested or dotted mappings with their values. A list is one value."""
    lists = set()
    for path, value in leaves(tree):
        whole = next((end for end, part in enumerate(path) if isinstance(part, int)), None)
        if path and whole is None:
            yield path, value
        elif path and path[:whole] not in lists:
            lists.add(path[:whole])
            yield path[:whole], get(tree, path[:whole])


AVERAGED = 20  # the closing loss is the mean over this part of the steps: a twentieth
# Keys that determine the batches of a run, in addition to its data.
_READ = ("global_batch_size", "sequence_length", "seed")
_NOT_READ = ("cache", "workers", "prefetch", "validation", "test")


@dataclass(frozen=True)
class State:
    """State of a member's run, from its files.

    Attributes:
        batches: step -> hash of the batch that the newest weights have seen.
        validation, tasks: the last values by name.
    """

    word: str = "waiting"  # waiting, running (or killed), stopped, failed or finished
    step: int = 0  # updates made
    losses: Mapping[int, float] = field(default_factory=dict)  # step -> training loss
    batches: Mapping[int, str] = field(default_factory=dict)
    validation: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """Mean training loss over the last twentieth of the logged steps."""
        values = [self.losses[step] for step in sorted(self.losses)]
        tail = values[-max(len(values) // AVERAGED, 1) :]
        return sum(tail) / len(tail) if tail else None


def state_of(member: Member) -> State:
    """Read a member's files. A member that has not begun has none.

    Raises:
        OSError: a file cannot be read.
    """
    ledger, metrics = member.folder / "ledger.jsonl", member.folder / "metrics.jsonl"
    word, step, batches = "waiting", 0, dict[int, str]()
    for event in read_ledger(ledger) if ledger.is_file() else ():
        name = event.get("event")
        if name == "batches":
            batches |= {event["first_step"] + place: value for place, value in enumerate(event["hashes"])}
        elif name in ("start", "resume"):
            word, step = "running", event["step"]
            batches = {at: value for at, value in batches.items() if at < step}
        elif name in ("end", "stop", "error"):
            word = {"end": "finished", "stop": "stopped", "error": "failed"}[name]
            step = event.get("step") or step
    losses, validation, tasks = dict[int, float](), dict[str, float](), dict[str, float]()
    for record in read_lines(metrics, sound_metrics) if metrics.is_file() else ():
        if record.get("loss") is not None:
            losses[record["step"]] = record["loss"]
            batches.setdefault(record["step"], record.get("batch_hash", ""))
            step = max(step, record["step"] + 1)
        validation |= {name: each["loss"] for name, each in record.get("validation", {}).items()}
        tasks |= {f"{name} {_main(each)}": each[_main(each)] for name, each in record.get("tasks", {}).items() if each}
    return State(word, step, losses, batches, validation, tasks)


def _main(metrics: Mapping[str, float]) -> str:
    return next((name for name in ("acc_norm", "acc") if name in metrics), next(iter(metrics)))


def data_group(config: Config) -> str:
    """A short name that runs with the same batches share."""
    data = {key: value for key, value in thaw(config.data.model_dump()).items() if key not in _NOT_READ}
    training = {key: getattr(config.training, key) for key in _READ}
    if schedule := config.training.sequence_schedule:
        training["sequence_schedule"] = [(each.until, each.sequence_length) for each in schedule]
    if batches := config.training.batch_schedule:
        training["batch_schedule"] = [each.model_dump() for each in batches]
    text = json.dumps([data, training, thaw(config.tokenizer.model_dump())], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Agreement:
    """Whether the runs of a group have read the same batches.

    Attributes:
        unlike: (step, member, other member) of the first step with different batches, or None.
    """

    members: tuple[str, ...]  # names of members that have read any
    steps: int  # steps that more than one of them has made
    unlike: tuple[int, str, str] | None


def agreement(states: Mapping[str, State]) -> Agreement:
    """Compare the batch hashes of runs step by step."""
    seen: dict[int, tuple[str, str]] = {}
    shared: set[int] = set()
    unlike: tuple[int, str, str] | None = None
    for name, state in states.items():
        for step, value in state.batches.items():
            other, first = seen.setdefault(step, (name, value))
            if other == name:
                continue
            shared.add(step)
            if value != first and (unlike is None or step < unlike[0]):
                unlike = (step, other, name)
    return Agreement(tuple(name for name, state in states.items() if state.batches), len(shared), unlike)
