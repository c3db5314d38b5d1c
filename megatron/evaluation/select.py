"""The requested tasks: the harness's names, groups, patterns, files and the project's own, checked before use.

They have their data here, and texts that are too long for a model are found. Without torch."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import yaml

import eval_tasks
from megatron.data.tokenizer import Tokenizer, unreachable

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

    from megatron.config.sections.output import TaskOptions


OWN = Path(eval_tasks.__file__).parent / "tasks"
HARNESS = "lm_eval"
OTHERS = {"group", "class", "include"}  # keys of files that are not, or may not be, a task of the usual form


class TaskError(ValueError):
    """A task needs something that this model or its tokenizer lacks, or its data are missing. The text has the fix."""


@dataclass(frozen=True)
class Request:
    """A task and its settings."""

    name: str  # of a task, group or tag, a pattern with `*`, or the path of a task file (.yaml)
    few_shot: int | None = None  # examples before each question. None: the task's number.
    limit: float | None = None  # only the first n documents. A number below 1 is a share of them. None: all.

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
    if request.limit is not None and (request.limit <= 0 or (request.limit > 1 and request.limit % 1 != 0)):
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


GENERATED = 256  # tokens of a generation, if the task has no number. The harness's default
EXAMPLE_SEED = 1234  # the harness's, for examples


def alike(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests that one call of the harness can answer."""
    groups: dict[tuple, list[Request]] = {}
    for request in requests:
        groups.setdefault((request.few_shot, request.limit), []).append(request)
    return list(groups.values())


def named_tasks(requests: Sequence[Request], index: TaskManager) -> list[str]:
    """The tasks and groups of requests, each once."""
    return list(dict.fromkeys(name for request in requests for name in tasks_of_request(request, index)))


@contextlib.contextmanager
def data_of(what: str) -> Iterator[None]:
    """Add a fix to errors of the library that loads tasks' data."""
    try:
        yield
    except (ConnectionError, FileNotFoundError) as error:
        raise TaskError(
            f"the data of {what} cannot be loaded: {error}\nfix: check the network and the task's data files. Without "
            f"a network, benchmarks.py unpacks real benchmarks, and the tasks deepy_* need nothing{_near(error)}"
        ) from error


def _near(error: Exception) -> str:
    """A suggestion for the path in quotes at the end of the library's message."""
    words = [word for word in str(error).split("'") if "/" in word and "://" not in word]
    return did_you_mean(words[-1]) if words else ""


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    import datasets
    from huggingface_hub import constants

    switch = partial(mock.patch.object, attribute="HF_HUB_OFFLINE", new=True)
    with switch(datasets.config), switch(constants):
        yield


def load(name: str, index: TaskManager) -> dict[str, Task]:
    """A task, or all tasks of a group or tag, with their data: by name.

    Data on this machine are used as they are. If the hub is needed and does not answer, that is reported at once: its
    library would try for half a minute.

    Raises:
        TaskError: the data are missing, or the task's file or code is wrong.
    """
    from huggingface_hub import constants

    with data_of(name):
        try:
            with _offline():
                return index.load([name])["tasks"]
        except (ConnectionError, FileNotFoundError):
            if constants.HF_HUB_OFFLINE or not _of_the_hub(name, index):
                raise
            if why := unreachable(constants.ENDPOINT):
                raise ConnectionError(f"it is not in the hub's local cache, and {why}") from None
        except Exception as error:
            raise _useless(name, error) from error
        return index.load([name])["tasks"]


def _useless(name: str, error: Exception) -> TaskError:
    """A task is a user's file and code, which may raise anything."""
    return TaskError(f"the task {name} cannot be used: {type(error).__name__}: {error}. Fix its file, code or data")


def _of_the_hub(name: str, index: TaskManager) -> bool:
    """Whether a task may have its data on the hub: its file names a data set, not files."""
    entry = index.task_index.get(name)
    settings = (entry.cfg if entry is not None else None) or {}
    return "data_files" not in (settings.get("dataset_kwargs") or {})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def data_problems(
    requests: Sequence[Request], folders: tuple[str, ...], tokenizer: Tokenizer, longest: int, truncate: bool
) -> list[str]:
    """Problems of the tasks' data, a sentence each with its fix: missing, or too long for the model.

    Args:
        longest: tokens that the model reads at once.
        truncate: whether contexts may lose their beginnings.
    """
    found = []
    with quiet():
        for request in requests:
            index = manager_for([request], folders)
            for name in named_tasks([request], index):
                try:
                    tasks = load(name, index)
                except TaskError as error:
                    found.append(str(error))
                    continue
                for each, task in tasks.items():
                    try:
                        asked = _requests(task, request)
                    except Exception as error:
                        found.append(str(_useless(each, error)))
                    else:
                        found += Lengths(tokenizer, longest, truncate).problems(each, asked)
    return list(dict.fromkeys(found))


def _requests(task: Task, request: Request) -> list[Any]:
    """The harness's requests to the model for a task, as `lm_eval.simple_evaluate` makes them."""
    given = task.get_config("num_fewshot")
    if given != 0 and request.few_shot is not None:
        task.set_config(key="num_fewshot", value=request.few_shot)
    elif given is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=EXAMPLE_SEED)
    limit = request.limit
    whole = None if limit is None else math.ceil(len(task.eval_docs) * limit) if limit < 1 else int(limit)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):  # bars
        task.build_all_requests(limit=whole)
    return task.instances


class Lengths:
    """Finds requests that do not fit a model.

    Args:
        longest: tokens that the model reads at once. It can predict one label more.
        truncate: whether contexts may lose their beginnings.
    """

    def __init__(self, tokenizer: Tokenizer, longest: int, truncate: bool) -> None:
        self._tokenizer, self._longest, self._truncate = tokenizer, longest, truncate
        self._known: dict[str, int] = {}

    def problems(self, task: str, requests: Sequence[Any]) -> list[str]:
        """A sentence for each way in which requests of a task do not fit."""
        scored = [each.args for each in requests if each.request_type == "loglikelihood"]
        asked = [each.args for each in requests if each.request_type == "generate_until"]
        self._learn([context + rest for context, rest in scored] + [context for context, _ in asked])
        found = self._continuations(task, scored)
        room = {_generated(settings): self._longest - _generated(settings) for _, settings in asked}
        found += [
            f"{task} generates {tokens} tokens, and the model reads {self._longest}, so nothing is left for the "
            f"prompt. Fix: a smaller max_gen_toks in the task, or --max-length above {tokens}"
            for tokens, left in room.items()
            if left < 1
        ]
        needed = [self._count(context + rest, self._longest) + (not context) - 1 for context, rest in scored]
        for context, settings in asked:
            tokens = _generated(settings)
            needed.append(self._count(context, self._longest - tokens) + tokens)
        long = [number for number in needed if number > self._longest]
        if long and not found and not self._truncate:
            found.append(
                f"{task}: {len(long)} of {len(needed)} texts must fit the {self._longest} tokens that the model reads, "
                f"and the longest has {max(long)}. Fix: fewer examples (few_shot), a longer training.sequence_length "
                "or --max-length, or evaluation.truncate=true, which cuts beginnings off as lm_eval does"
            )
        return found

    def _continuations(self, task: str, scored: Sequence[tuple[str, str]]) -> list[str]:
        """Every predicted token must fit."""
        most = max((self._continuation(context, rest) for context, rest in scored), default=0)
        if most <= self._longest:
            return []
        return [
            f"{task}: continuations must fit the {self._longest} tokens that the model reads, and the longest "
            f"has {most}. Fix: --max-length {most} or more, or a longer training.sequence_length"
        ]

    def _continuation(self, context: str, rest: str) -> int:
        """Its tokens, by the harness's rule: spaces at the end of a context belong to it."""
        if len(rest.encode()) + len(context) - len(context.rstrip()) <= self._longest:
            return 0  # a token is a byte at least
        return self._exact(context + rest) - (self._exact(context.rstrip()) if context.rstrip() else 0)

    def _count(self, text: str, fits: int) -> int:
        """The tokens of a text. 0 if its bytes are few enough."""
        return 0 if len(text.encode()) < fits else self._exact(text)

    def _learn(self, texts: Sequence[str]) -> None:
        """Count the tokens of texts that may be too long, many at a time."""
        long = [text for text in dict.fromkeys(texts) if len(text.encode()) >= self._longest]
        self._known |= {text: len(ids) for text, ids in zip(long, self._tokenizer.encode_batch(long))}

    def _exact(self, text: str) -> int:
        if text not in self._known:
            self._known[text] = len(self._tokenizer.encode(text))
        return self._known[text]


def _generated(settings: dict[str, Any]) -> int:
    """Number of tokens that a request may generate, under the harness's names."""
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
        if settings.get(name) is not None:
            return int(settings[name])
    return GENERATED
