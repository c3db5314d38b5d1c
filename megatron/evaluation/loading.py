"""The harness's tasks with their data, and texts that are too long for a model. Without torch."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from megatron.data.hub import unreachable
from megatron.data.tokenizer import Tokenizer

from .select import Request, TaskError, did_you_mean, manager_for, tasks_of_request

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

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
    return TaskError(
        f"the task {name} cannot be used: {type(error).__name__}: {error}. Fix its file, its code or its data"
    )


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
