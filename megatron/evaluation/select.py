"""The requested tasks: the harness's names, groups, patterns, files and the project's own, checked before use."""

from __future__ import annotations

import difflib
import fnmatch
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

import eval_tasks

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from megatron.config.sections.output import TaskOptions

OWN = Path(eval_tasks.__file__).parent / "tasks"
HARNESS = "lm_eval"
OTHERS = {"group", "class", "include"}  # keys of files that are not, or may not be, a task of the usual form


class TaskError(ValueError):
    """A task needs something that this model or its tokenizer lacks, or its data are missing. The text has the fix."""


@dataclass(frozen=True)
class Request:
    """A task and its settings.

    Attributes:
        name: of a task, group or tag, a pattern with `*`, or the path of a task file (.yaml).
        few_shot: examples before each question. None: the task's number.
        limit: only the first n documents. A number below 1 is a share of them. None: all.
    """

    name: str
    few_shot: int | None = None
    limit: float | None = None

    @classmethod
    def of(cls, task: TaskOptions) -> Request:
        return cls(task.name, task.few_shot, task.limit)


def own_tasks() -> list[str]:
    """Names of the project's tasks, from their files' names, without imports."""
    return sorted(path.stem for path in OWN.glob("[!_]*.yaml"))


@lru_cache(maxsize=4)
def manager(folders: tuple[str, ...] = (), defaults: bool = True) -> TaskManager:
    """The harness's index of tasks. Reading the index of its own ten thousand takes some seconds.

    Args:
        folders: with task files of the user's.
        defaults: whether to include the harness's own tasks.
    """
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=[str(OWN), *folders], include_defaults=defaults)


def manager_for(requests: Sequence[Request], folders: tuple[str, ...] = ()) -> TaskManager:
    """The smallest index with these tasks. Groups and tags may have members among the harness's own."""
    small = manager(folders, defaults=False)
    return small if all(_is_task(request.name, small) for request in requests) else manager(folders)


def _is_task(name: str, index: TaskManager) -> bool:
    """Whether a request is one task that needs no other, by its name in the index, or by its file."""
    if _is_file(name):
        return _holds_task(Path(name))
    return name in index.task_index and index.task_index[name].kind.name == "TASK"


class _Loader(yaml.SafeLoader):
    """Reads task files without importing the functions that they name."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def _holds_task(path: Path) -> bool:
    """Whether a file describes one task. Its includes may be anything. Errors of reading are reported elsewhere."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError):
        return False
    return isinstance(content, dict) and isinstance(content.get("task"), str) and not content.keys() & OTHERS


def tasks_of_request(request: Request, index: TaskManager) -> list[str]:
    """The tasks of a request: itself, or the matches of its pattern, without members of matching groups."""
    if request.name in index.task_index or "*" not in request.name:
        return [request.name]
    found = fnmatch.filter(index.task_index, request.name)
    inner = {each for name in found for each in _members(name, index)}
    return sorted(set(found) - inner)


def _members(name: str, index: TaskManager) -> set[str]:
    """The names below a group or tag, at any depth."""
    entry = index.task_index.get(name)
    if entry is None or entry.kind.name not in ("GROUP", "TAG"):
        return set()
    listed = entry.tags if entry.kind.name == "TAG" else (entry.cfg or {}).get("task") or []
    own = {each if isinstance(each, str) else str(each.get("task") or each.get("group")) for each in listed}
    return own | {deeper for each in own for deeper in _members(each, index)}


def problems(requests: Sequence[Request], folders: tuple[str, ...] = ()) -> list[str]:
    """Mistakes of the requests, a sentence each with its fix."""
    if not requests:
        return ["no task is named: name some by --tasks arc_easy,lambada_openai, or evaluation.tasks"]
    if find_spec(HARNESS) is None:
        return ["the evaluation harness is not installed: pip install -r requirements/eval.txt"]
    found = [
        f"{folder} is not a folder: --include-path and evaluation.task_folders must name folders with task files"
        f"{did_you_mean(folder)}"
        for folder in folders
        if not Path(folder).is_dir()
    ]
    found += [line for request in requests for line in _values(request)]
    found += [
        f"there is no task file {request.name}{did_you_mean(request.name)}"
        for request in requests
        if _is_file(request.name) and not Path(request.name).is_file()
    ]
    if found:
        return found
    index = manager_for(requests, folders)
    return [line for request in requests if (line := _name(request.name, index))]


def did_you_mean(path: str | os.PathLike) -> str:
    """`. Did you mean X?` if the folder has a similar name, else nothing."""
    wanted = Path(path)
    try:
        there = [each.name for each in wanted.parent.iterdir()]
    except OSError:
        return ""
    found = difflib.get_close_matches(wanted.name, there, n=1)
    return f". Did you mean {wanted.with_name(found[0])}?" if found else ""


def _values(request: Request) -> list[str]:
    found = []
    if request.few_shot is not None and request.few_shot < 0:
        found.append(f"{request.name}: few_shot is {request.few_shot}: it must be at least 0")
    if request.limit is not None and (
        request.limit <= 0 or (request.limit > 1 and request.limit != int(request.limit))
    ):
        found.append(f"{request.name}: limit is {request.limit:g}: it must be a share below 1 or a number of documents")
    return found


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _name(name: str, index: TaskManager) -> str | None:
    known = [*index.task_index]
    if _is_file(name) or name in index.task_index or fnmatch.filter(known, name):
        return None
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
    hint = f"Did you mean {', '.join(close)}?" if close else "`lm_eval ls tasks` lists the harness's tasks."
    return f"there is no task {name!r}. {hint} The project's own are {', '.join(own_tasks())}"
