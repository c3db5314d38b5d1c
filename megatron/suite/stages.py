"""A chain: stages of one file, each from the ones before it. A stage trains, aligns, or is any other command of deepy.

Each stage has a folder, and when it is done a manifest `stage.json`. It has the stage's command, and hashes of its
configuration files, of the files in its folder, and of the manifests of its parents, the stages that it read from. So a
manifest names everything that a stage follows from, and a stage is done again only in another folder. The folder has
these facts from its start, so a training does not resume after something that it follows from has changed."""

import json
import os
import shlex
import shutil
import signal
import string
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.config.file_access import read_json, replace_file
from megatron.config.problems import ConfigError, Problem, UserError
from megatron.config.resolution import load
from megatron.config.source.layers import Origin
from megatron.config.source.yaml_source import parse
from megatron.data.hashing import file_hash
from megatron.installation import root
from megatron.worker.writer_lock import take

from .members import SuiteFile
from .members import values_of as flat

MANIFEST, CHAIN = "stage.json", "chain.json"
BEGUN = "stage.begun"  # in the folder of a stage that has not ended: the facts that it follows from
LOCK = ".launch"  # in the chain's folder
KEYS = {"name", "dir", "ranks", "set", "stages"}
STAGE_KEYS = {"run", "files", "set", "from", "after", "verb"}
OWN_KEYS = ("run.dir", "run.name")
VERBS = ("train", "align")


@dataclass(frozen=True)
class Stage:
    """One stage."""

    name: str
    folder: Path
    words: tuple[str, ...]  # of its command, as `deepy` gets them
    parents: tuple[str, ...]  # names of the stages that it reads from
    files: tuple[str, ...]  # configuration files, whose contents count. Empty for other commands.

    @property
    def trains(self) -> bool:
        return bool(self.files)

    @property
    def manifest(self) -> Path:
        return self.folder / MANIFEST


@dataclass(frozen=True)
class Chain:
    path: Path
    name: str
    folder: Path
    ranks: int | None
    stages: tuple[Stage, ...]

    def facts(self, stage: Stage) -> dict[str, Any]:
        """Facts that a stage follows from. Parents that are not done are missing."""
        done = {each.name: each.manifest for each in self.stages if each.name in stage.parents}
        parents = {name: file_hash(path) for name, path in done.items() if path.is_file()}
        inputs = {file: file_hash(file) for file in stage.files}
        return {"stage": stage.name, "command": list(stage.words), "parents": parents, "inputs": inputs}

    def state(self, stage: Stage) -> str:
        """waiting, begun or done.

        Raises:
            UserError: it was done from something else, or is a training that has begun from something else.
        """
        done = stage.manifest.is_file()
        made = stage.manifest if done else stage.folder / BEGUN
        if done or (stage.trains and made.is_file()):
            self._refuse_another(stage, made)
        return "done" if done else "begun" if stage.folder.is_dir() and any(stage.folder.iterdir()) else "waiting"

    def _refuse_another(self, stage: Stage, path: Path) -> None:
        try:
            made = read_json(path)
        except ValueError:
            made = None
        now = self.facts(stage)
        changed = [key for key in now if not isinstance(made, dict) or made.get(key) != now[key]]
        if changed:
            raise UserError(
                f"{stage.folder} was made with other {', '.join(changed)}: undo the change of {self.path}, delete the "
                "folder and the later ones, or give the chain another `dir`"
            )

    def check(self) -> None:
        """Resolve the configuration of each stage that trains.

        Raises:
            ConfigError: with the errors of all of them. Inputs that earlier stages write may be missing.
        """
        problems: dict[str, Problem] = {}
        for stage in self.stages:
            try:
                if stage.trains:
                    self._resolved(stage)
            except ConfigError as error:
                problems |= {str(each): each for each in error.problems if each.fatal}
        if problems:
            raise ConfigError(problems.values())

    def _resolved(self, stage: Stage) -> Config:
        overrides = list(stage.words[1 + len(stage.files) :])
        return load(list(stage.files), overrides, ranks=self.ranks or 1, check_inputs=False).config

    def launch(self, tell: Callable[[str], None]) -> str | None:
        """Do the stages that are not done, in order. Returns the name of one that has failed.

        Raises:
            UserError: a stage was made from something else, or its folder is of no stage. Files of its parents have
                changed. Another process does the stages of this folder.
        """
        self.check()
        self.folder.mkdir(parents=True, exist_ok=True)
        lock, holder = take(self.folder / LOCK)
        if holder is not None:
            raise UserError(f"{self.folder} is in use by {holder}: wait until it has ended, or stop it")
        try:
            listed = [{"stage": each.name, "parents": each.parents, "trains": each.trains} for each in self.stages]
            replace_file(self.folder / CHAIN, json.dumps({"name": self.name, "stages": listed}, indent=1) + "\n")
            sound = set[str]()
            return next((each.name for each in self.stages if not self._do(each, sound, lock, tell)), None)
        finally:
            if lock is not None:
                os.close(lock)

    def _do(self, stage: Stage, sound: set[str], lock: int | None, tell: Callable[[str], None]) -> bool:
        """Do a stage if it is not done. `sound` has the names of stages whose files were compared."""
        if (state := self.state(stage)) == "done":
            return True
        for each in self.stages:
            if each.name in stage.parents and each.name not in sound:
                _refuse_changed(each)
                sound.add(each.name)
        if state == "begun":
            if not (stage.folder / BEGUN).is_file():
                raise UserError(f"{stage.folder} must not exist: no stage has made it. Rename it, or the stage")
            if not stage.trains:  # a run resumes, another command begins again
                shutil.rmtree(stage.folder)
        stage.folder.mkdir(parents=True, exist_ok=True)
        facts = self.facts(stage)
        replace_file(stage.folder / BEGUN, json.dumps(facts, indent=1) + "\n")
        tell(f"{stage.name}: {'' if stage.words[0] == 'python' else 'deepy '}{shlex.join(stage.words)}")
        log = self.folder / f"{stage.name}.out"
        if status := self._run(stage, log, lock):
            tell(f"{stage.name}: failed with status {status}, see {log}")
            return False
        if stage.trains and (wrong := self._unfinished(stage)):
            tell(f"{stage.name}: {wrong}, see {log}. Launch again to continue")
            return False
        replace_file(stage.manifest, json.dumps({**facts, "outputs": dict(_outputs(stage))}, indent=1) + "\n")
        (stage.folder / BEGUN).unlink()
        return True

    def _run(self, stage: Stage, log: Path, lock: int | None) -> int:
        """The exit status of a stage's command. It saves on Ctrl-C, and holds the lock if this process is killed."""
        paths = os.pathsep.join([str(root()), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log.open("ab") as out:
            child = subprocess.Popen(
                self.command(stage),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": paths},
                pass_fds=[] if lock is None else [lock],
                start_new_session=True,  # so that only this process gets the terminal's Ctrl-C, and forwards it once
            )
            try:
                return child.wait()
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)
                return child.wait() or 128 + signal.SIGINT

    def _unfinished(self, stage: Stage) -> str | None:
        """Why a training that has ended well is not done, such as by `training.stop_after`."""
        from megatron.checkpoint.format.durable import step_of
        from megatron.checkpoint.format.errors import CheckpointError
        from megatron.checkpoint.save.store import find_checkpoint

        training = self._resolved(stage).training
        end = min(training.steps, training.stop_at_step or training.steps)
        try:
            step = step_of(find_checkpoint(stage.folder)) or 0
        except CheckpointError as error:
            return f"has no checkpoint: {error}"
        return f"has stopped after {step} of {end} steps" if step < end else None

    def command(self, stage: Stage) -> list[str]:
        """The command line of a stage. A first word `python` runs a script of the user."""
        if stage.words[0] == "python":
            return [sys.executable, *stage.words[1:]]
        start = "import sys\nfrom megatron.command.main import main\nsys.exit(main())"
        ranks = ["--ranks", str(self.ranks)] if stage.trains and self.ranks else []
        return [sys.executable, "-c", start, stage.words[0], *ranks, *stage.words[1:]]


def _outputs(stage: Stage) -> Iterator[tuple[str, str]]:
    """The files in a stage's folder, with their SHA-256: of a run its configuration, newest checkpoint and rounds."""
    files = [each for each in stage.folder.rglob("*") if each.is_file() and each != stage.folder / BEGUN]
    if stage.trains:
        from megatron.checkpoint.save.store import find_checkpoint

        newest = find_checkpoint(stage.folder)
        files = [each for each in files if newest in each.parents or each.parent == stage.folder / "rollouts"]
        files.append(stage.folder / "config.yml")
    for path in sorted(files):
        yield str(path.relative_to(stage.folder)), file_hash(path)


def _refuse_changed(stage: Stage) -> None:
    """Compare the files of a stage that is done with its manifest.

    Raises:
        UserError: one has changed or is gone.
    """
    for name, digest in read_json(stage.manifest)["outputs"].items():
        path = stage.folder / name
        if not path.is_file() or file_hash(path) != digest:
            raise UserError(
                f"{path} must be as {stage.manifest} says, and has changed since: put it back, or delete "
                f"{stage.folder} and the later ones"
            )


def read_chain(path: Path) -> Chain | None:
    """The chain of a suite's file. None if it has no `stages`, as files of other suites.

    Raises:
        ConfigError: with all errors of the file, and their lines.
    """
    try:
        values, origins, wrong = parse(path.read_text("utf-8"), lambda line: Origin("file", file=str(path), line=line))
    except (OSError, UnicodeDecodeError):
        return None  # `read_suite` says why
    if not isinstance(values, dict) or "stages" not in values:
        return None
    file = SuiteFile(path, values, origins, list(wrong))
    chain = _chain(file)
    if file.problems:
        raise ConfigError(file.problems)
    return chain


def _chain(file: SuiteFile) -> Chain:
    path, values, tell = file.path, file.values, file.problem
    for key in values.keys() - KEYS:
        tell((key,), "must be one of " + ", ".join(sorted(KEYS)) + " in a file with stages", "correct or remove it")
    name = str(values.get("name", path.stem))
    if not isinstance(values.get("name", name), str):
        tell(("name",), "must be a text", "correct or remove it")
    (folder, ranks), common, given = file.place(name), values.get("set", {}), values["stages"]
    if not isinstance(given, dict) or not given or not isinstance(common, dict):
        tell(("stages",), "must be a mapping of names, each with `run` or `files`", "stages: {base: {files: [a.yml]}}")
        return Chain(path, name, Path(folder), None, ())
    places, stages = {"dir": folder}, list[Stage]()
    for key, each in given.items():
        at = ("stages", str(key))
        if not str(key).replace("_", "").isalnum() or key in ("dir", "here"):
            tell(at, "must be a name of letters, digits and underscores, other than dir and here", "rename it")
        elif not isinstance(each, dict) or each.keys() - STAGE_KEYS or ("run" in each) == ("files" in each):
            keys = ", ".join(sorted(STAGE_KEYS))
            tell(at, f"must have either run or files, and only {keys}", "run: data tokenize ..., or files: [a.yml]")
        else:
            own = Path(folder) / str(key)
            stages.append(_stage(str(key), own, each, common, places, file.find, partial(tell, at)))
            places[str(key)] = str(own)
    return Chain(path, name, Path(folder), ranks, tuple(stages))


def _stage(
    name: str,
    folder: Path,
    given: Mapping[str, Any],
    common: dict[str, Any],
    places: Mapping[str, str],
    find: Callable[[str], str | None],
    tell: Callable[[str, str], None],
) -> Stage:
    filler = _Filler(places, folder, tell)
    after = [given.get("after", [])] if isinstance(given.get("after"), str) else given.get("after", [])
    if not isinstance(after, list) or not all(isinstance(each, str) for each in (*after, given.get("from", ""))):
        tell("must have names of earlier stages in from and after", "correct them")
        after = []
    files: tuple[str, ...] = ()
    if "run" in given:
        words = _command(given, filler, tell)
    else:
        files = tuple(_files(given["files"], find, tell))
        verb = given.get("verb", "train")
        if verb not in VERBS:
            tell(f"verb must be {' or '.join(VERBS)}", "correct it")
        keys = _keys(given, common, tell)
        if "from" in given:
            filler.used.append(str(given["from"]))
            keys["checkpoint.initialize_from"] = places.get(str(given["from"]), "")
        keys |= {"run.name": name, "run.dir": str(folder)}
        words = (str(verb), *files, *(f"{key}={json.dumps(filler.deep(value))}" for key, value in keys.items()))
    parents = tuple(dict.fromkeys(each for each in (*filler.used, *after) if each not in ("dir", "here")))
    if unknown := [each for each in parents if each not in places]:
        tell(f"must come from earlier stages, and {unknown[0]!r} is none", "move it up, or correct the name")
    return Stage(name, folder, words, parents, files)


class _Filler:
    """Fills in {stage} for the folders of earlier stages, {dir} for the chain's and {here} for this one's."""

    def __init__(self, places: Mapping[str, str], here: Path, tell: Callable[[str, str], None]) -> None:
        self.places, self.tell, self.used = {**places, "here": str(here)}, tell, list[str]()

    def text(self, text: str) -> str:
        found = ""
        try:
            for plain, name, form, conversion in string.Formatter().parse(text):
                found += plain
                if name is not None:
                    if form or conversion:
                        raise ValueError(name)
                    found += self.places[name]
                    self.used.append(name)
        except (KeyError, ValueError):
            fix = "correct the name in braces, or double braces that are text"
            self.tell(f"must refer to an earlier stage, {{dir}} or {{here}} in {text!r}", fix)
        return found

    def deep(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.deep(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.deep(each) for each in value]
        return self.text(value) if isinstance(value, str) else value


def _command(given: Mapping[str, Any], filler: _Filler, tell: Callable[[str, str], None]) -> tuple[str, ...]:
    """The words of `run`."""
    try:
        words = shlex.split(given["run"]) if isinstance(given["run"], str) else []
    except ValueError as error:
        tell(f"run must be a command: {error}", "close the quotation")
        return ()
    if not words or (given.keys() & {"set", "from", "verb"}):
        tell("must have a command in run, and no set, from or verb with it", "write them into the command")
    return tuple(map(filler.text, words))


def _files(given: Any, find: Callable[[str], str | None], tell: Callable[[str, str], None]) -> Iterator[str]:
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or not listed or not all(isinstance(each, str) and each for each in listed):
        tell("files must be a configuration file, or a list of them", "files: [a.yml]")
        return
    for each in listed:
        path = find(each)
        if path is None:
            tell(f"must name configuration files that exist, and {each!r} does not", "correct the path")
        yield path or each


def _keys(given: Mapping[str, Any], common: dict[str, Any], tell: Callable[[str, str], None]) -> dict[str, Any]:
    """The keys of `set`, of the chain and of the stage, by their dotted names."""
    own = given.get("set", {})
    if not isinstance(own, dict):
        tell("set must be a mapping of keys", "set: {training.steps: 100}")
        return {}
    keys = {".".join(map(str, path)): value for part in (common, own) for path, value in flat(part)}
    for key in (*OWN_KEYS, *(["checkpoint.initialize_from"] if "from" in given else [])):
        if key in keys:
            tell(f"must not set {key}, which is the chain's", "remove it")
    return keys
