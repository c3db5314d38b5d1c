"""A chain: stages of one file, each from the ones before it. A stage trains, aligns, or is any other command of deepy.

Each stage has a folder, and when it is done a manifest `stage.json`. It has the stage's command, and hashes of its
configuration files, of the files that it wrote, and of the manifests of its parents, the stages that it read from. So a
manifest names everything that a stage follows from, and a stage is done again only in another folder.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import string
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.config.file_access import read_json, replace_file
from megatron.config.problems import ConfigError, Problem, UserError
from megatron.config.resolution import load
from megatron.config.schema import dotted
from megatron.config.source.layers import Origin
from megatron.config.source.yaml_source import parse
from megatron.data.hashing import file_hash
from megatron.installation import configuration_file, root

from .members import values_of as flat

MANIFEST, CHAIN = "stage.json", "chain.json"
BEGUN = "stage.begun"  # in the folder of a command that has not ended
KEYS = {"name", "dir", "ranks", "set", "stages"}
STAGE_KEYS = {"run", "files", "set", "from", "after", "verb"}
VERBS = ("train", "align")
Tell = Callable[[tuple[str | int, ...], str, str], None]


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        words: of its command, as `deepy` gets them.
        parents: names of the stages that it reads from.
        files: configuration files, whose contents count. Empty for other commands.
    """

    name: str
    folder: Path
    words: tuple[str, ...]
    parents: tuple[str, ...]
    files: tuple[str, ...]

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
            UserError: it was done from something else.
        """
        if not stage.manifest.is_file():
            return "begun" if stage.folder.is_dir() else "waiting"
        made, now = read_json(stage.manifest), self.facts(stage)
        changed = [key for key in now if made.get(key) != now[key]]
        if changed:
            raise UserError(
                f"{stage.folder} was made with other {', '.join(changed)}: undo the change of {self.path}, delete the "
                "folder and the later ones, or give the chain another `dir`"
            )
        return "done"

    def check(self) -> None:
        """Resolve the configuration of each stage that trains.

        Raises:
            ConfigError: with the errors of all of them. Inputs that earlier stages write may be missing.
        """
        problems: dict[str, Problem] = {}
        for stage in self.stages:
            try:
                if stage.trains:
                    overrides = list(stage.words[1 + len(stage.files) :])
                    load(list(stage.files), overrides, ranks=self.ranks or 1, check_inputs=False)
            except ConfigError as error:
                problems |= {str(each): each for each in error.problems if each.fatal}
        if problems:
            raise ConfigError(problems.values())

    def launch(self, tell: Callable[[str], None]) -> str | None:
        """Do the stages that are not done, in order. Returns the name of one that has failed."""
        self.check()
        self.folder.mkdir(parents=True, exist_ok=True)
        listed = [{"stage": each.name, "parents": list(each.parents), "trains": each.trains} for each in self.stages]
        replace_file(self.folder / CHAIN, json.dumps({"name": self.name, "stages": listed}, indent=1) + "\n")
        for stage in self.stages:
            if (state := self.state(stage)) == "done":
                continue
            if state == "begun" and not stage.trains:  # a run resumes, another command begins again
                if not (stage.folder / BEGUN).is_file():
                    raise UserError(f"{stage.folder} must not exist: no stage has made it. Rename it, or the stage")
                shutil.rmtree(stage.folder)
            stage.folder.mkdir(parents=True, exist_ok=True)
            if not stage.trains:
                (stage.folder / BEGUN).touch()
            tell(f"{stage.name}: deepy {shlex.join(stage.words)}")
            log = self.folder / f"{stage.name}.out"
            with log.open("ab") as out:
                paths = os.pathsep.join([str(root()), *filter(None, [os.environ.get("PYTHONPATH")])])
                own = {**os.environ, "PYTHONPATH": paths}
                status = subprocess.call(self.command(stage), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=own)
            if status:
                tell(f"{stage.name}: failed with status {status}, see {log}")
                return stage.name
            (stage.folder / BEGUN).unlink(missing_ok=True)
            found = {**self.facts(stage), "outputs": dict(_outputs(stage))}
            replace_file(stage.manifest, json.dumps(found, indent=1) + "\n")
        return None

    def command(self, stage: Stage) -> list[str]:
        """The command line of a stage. A first word `python` runs a script of the user."""
        if stage.words[0] == "python":
            return [sys.executable, *stage.words[1:]]
        start = "import sys\nfrom megatron.command.main import main\nsys.exit(main())"
        ranks = ["--ranks", str(self.ranks)] if stage.trains and self.ranks else []
        return [sys.executable, "-c", start, stage.words[0], *ranks, *stage.words[1:]]


def _outputs(stage: Stage) -> Iterator[tuple[str, str]]:
    """The files that a stage has written, with their SHA-256: of a run its configuration and its newest checkpoint."""
    files = [each for each in stage.folder.rglob("*") if each.is_file() and each.name != MANIFEST]
    if stage.trains:
        from megatron.checkpoint.save.store import find_checkpoint

        newest = find_checkpoint(stage.folder)
        files = [each for each in files if newest in each.parents or each.parent == stage.folder / "rollouts"]
        files.append(stage.folder / "config.yml")
    for path in sorted(files):
        yield str(path.relative_to(stage.folder)), file_hash(path)


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
    problems = list(wrong)

    def tell(at: tuple[str | int, ...], rule: str, fix: str) -> None:
        origin = next((origins[at[:end]] for end in range(len(at), 0, -1) if at[:end] in origins), path)
        problems.append(Problem(dotted(at), rule, fix, where=str(origin)))

    chain = _chain(path, values, tell)
    if problems:
        raise ConfigError(problems)
    return chain


def _chain(path: Path, values: Mapping[str, Any], tell: Tell) -> Chain:
    for key in values.keys() - KEYS:
        tell((key,), "must be one of " + ", ".join(sorted(KEYS)) + " in a file with stages", "correct or remove it")
    name = str(values.get("name", path.stem))
    folder, ranks, common = values.get("dir", f"runs/{name}"), values.get("ranks"), values.get("set", {})
    if not isinstance(folder, str) or not folder:
        tell(("dir",), "must be the path of a folder", "give a path, or remove it")
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        tell(("ranks",), "must be a number of processes, at least 1", "give one, or remove it")
    given = values["stages"]
    if not isinstance(given, dict) or not given or not isinstance(common, dict):
        tell(("stages",), "must be a mapping of names, each with `run` or `files`", "stages: {base: {files: [a.yml]}}")
        return Chain(path, name, Path(str(folder)), None, ())
    places, stages = {"dir": str(folder)}, list[Stage]()
    for key, each in given.items():
        at = ("stages", str(key))
        if not str(key).replace("_", "").isalnum() or key in ("dir", "here"):
            tell(at, "must be a name of letters, digits and underscores, other than dir and here", "rename it")
        elif not isinstance(each, dict) or each.keys() - STAGE_KEYS or ("run" in each) == ("files" in each):
            keys = ", ".join(sorted(STAGE_KEYS))
            tell(at, f"must have either run or files, and only {keys}", "run: data tokenize ..., or files: [a.yml]")
        else:
            own = Path(str(folder)) / str(key)
            stages.append(_stage(str(key), own, each, common, places, path.parent, partial(tell, at)))
            places[str(key)] = str(own)
    return Chain(path, name, Path(str(folder)), ranks, tuple(stages))


def _stage(
    name: str,
    folder: Path,
    given: Mapping[str, Any],
    common: dict[str, Any],
    places: Mapping[str, str],
    beside: Path,
    tell: Callable[[str, str], None],
) -> Stage:
    used = list[str]()

    def filled(text: str) -> str:
        """With {stage} for the folders of earlier stages, {dir} for the chain's and {here} for this one's."""
        found = ""
        try:
            for plain, field, *_ in string.Formatter().parse(text):
                found += plain
                if field is not None:
                    used.append(field)
                    found += {**places, "here": str(folder)}[field]
        except (KeyError, ValueError):
            tell(f"must refer to an earlier stage, {{dir}} or {{here}} in {text!r}", "correct the name in braces")
        return found

    def deep(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: deep(each) for key, each in value.items()}
        if isinstance(value, list):
            return [deep(each) for each in value]
        return filled(value) if isinstance(value, str) and "{" in value else value

    words: tuple[str, ...]
    files: tuple[str, ...] = ()
    if "run" in given:
        words = tuple(map(filled, shlex.split(str(given["run"]))))
        if not words or (given.keys() & {"set", "from", "verb"}):
            tell("must have a command in run, and no set, from or verb with it", "write them into the command")
    else:
        listed = [given["files"]] if isinstance(given["files"], str) else given["files"]
        found = {str(each): _file(str(each), beside) for each in listed}
        if missing := [each for each, path in found.items() if path is None]:
            tell(f"must name configuration files that exist, and {missing[0]!r} does not", "correct the path")
        files = tuple(path or each for each, path in found.items())
        keys = {
            ".".join(map(str, path)): value for part in (common, given.get("set", {})) for path, value in flat(part)
        }
        verb = given.get("verb", "train")
        if verb not in VERBS:
            tell(f"verb must be {' or '.join(VERBS)}", "correct it")
        if "from" in given:
            used.append(str(given["from"]))
            keys["checkpoint.initialize_from"] = places.get(str(given["from"]), "")
        keys |= {"run.name": name, "run.dir": str(folder)}
        words = (str(verb), *files, *(f"{key}={json.dumps(deep(value))}" for key, value in keys.items()))
    used += [given["after"]] if isinstance(given.get("after"), str) else given.get("after", [])
    parents = tuple(dict.fromkeys(each for each in used if each not in ("dir", "here")))
    if unknown := [each for each in parents if each not in places]:
        tell(f"must come from earlier stages, and {unknown[0]!r} is none", "move it up, or correct the name")
    return Stage(name, folder, words, parents, files)


def _file(word: str, beside: Path) -> str | None:
    return str(beside / word) if (beside / word).is_file() else configuration_file(word)
