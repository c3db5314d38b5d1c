"""Runs the harness on a model that all ranks hold together, without changing this process."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from torch.utils import collect_env

from megatron.checkpoint.format.communicator import Communicator
from megatron.config.file_access import read_json, replace_file
from megatron.config.problems import aligned
from megatron.data.tokenizer import Tokenizer
from megatron.evaluation.scoring import Scorer

from . import select
from .scoring import Leader, follow
from .select import Request, load, manager_for, named_tasks

if TYPE_CHECKING:
    from .adapter import HarnessModel


Results = Mapping[str, Any]  # of `lm_eval.simple_evaluate`
NOT_METRICS = ("alias", "name", "sample_len", "sample_count")


def numbers(results: Results) -> dict[str, dict[str, float]]:
    """task -> metric -> value, with standard errors (`acc_stderr`) and groups.

    The harness writes `acc,none`, where `none` is the filter. Metrics of other filters keep their names."""
    found: dict[str, dict[str, float]] = {}
    for task, values in {**results["results"], **results.get("groups", {})}.items():
        found[task] = {
            name.removesuffix(",none"): float(value)
            for name, value in values.items()
            if name.partition(",")[0] not in NOT_METRICS and isinstance(value, (int, float))
        }
    return found


def table(results: Results) -> str:
    """One line per task and metric: value, standard error, documents, examples in the prompt, the task's version."""
    rows = [("task", "metric", "value", "stderr", "documents", "few-shot", "version")]
    for task, values in numbers(results).items():
        for metric, value in values.items():
            if "_stderr" in metric:
                continue
            name, _, filtered = metric.partition(",")
            error = values.get(f"{name}_stderr,{filtered}" if filtered else f"{name}_stderr")
            count = results.get("n-samples", {}).get(task, {}).get("effective", "")
            shots, version = results.get("n-shot", {}).get(task, ""), results.get("versions", {}).get(task, "")
            rows.append((
                task,
                metric,
                f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}",
                "" if error is None else f"{error:.4f}",
                str(count),
                str(shots),
                str(version),
            ))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    head, *lines = aligned(rows, left=2)
    return "\n".join([head, "  ".join("-" * width for width in widths), *lines])


def text(results: Results) -> str:
    from lm_eval.utils import handle_non_serializable

    return json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False) + "\n"


def write(path: Path, results: Results) -> None:
    """The whole file or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text(results))


def read(path: Path) -> dict[str, Any] | None:
    """The results in a file. None if it is missing or damaged."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("results"), dict) else None


# Resamples for the standard error of metrics that are no means. The harness's own 100,000 take minutes.
BOOTSTRAPS = 1000
# The harness forks processes for its bootstraps, which a process with a GPU and process groups must not do.
NO_FORKS = "DISABLE_MULTIPROC"


def run_tasks(
    requests: Sequence[Request],
    scorer: Scorer,
    communicator: Communicator,
    tokenizer: Tokenizer,
    *,
    max_length: int | None = None,
    folders: Sequence[str] = (),
    samples: bool = False,
    facts: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> dict[str, Any] | None:
    """The harness's results, on rank 0. None elsewhere. All ranks call it.

    Args:
        max_length: tokens that the model reads at once, by default as in training.
        samples: keep every document with its prompt and answers.
        facts: of the model, for the results (`config.model_args`).
        progress: show the harness's bars on standard error.

    Raises:
        TaskError: a task asks for something that this model cannot do.
    """
    if communicator.rank:
        follow(scorer, communicator, tokenizer)
        return None
    from .adapter import HarnessModel

    leader = Leader(scorer, communicator, tokenizer)
    try:
        with undisturbed(), contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO()):
            config = scorer.config
            model = HarnessModel(
                leader,
                tokenizer,
                max_length or config.training.sequence_length,
                seed=config.training.seed,
                truncate=config.evaluation.truncate,
            )
            return _evaluate(model, requests, tuple(folders), samples, dict(facts or {}))
    finally:
        leader.dismiss()


def load_tasks(requests: Sequence[Request], folders: tuple[str, ...] = ()) -> None:
    """Load the tasks and their data, so that missing data are found before any computation.

    Raises:
        TaskError: data are missing.
    """
    with undisturbed():
        for request in requests:
            index = manager_for([request], folders)
            for name in select.named_tasks([request], index):
                select.load(name, index)


def _evaluate(
    model: HarnessModel, requests: Sequence[Request], folders: tuple[str, ...], samples: bool, facts: dict[str, Any]
) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    whole: dict[str, Any] = {}
    for alike in select.alike(requests):
        index = manager_for(alike, folders)
        named = ", ".join(request.name for request in alike)
        with select.data_of(named), mock.patch("lm_eval.evaluator.get_git_commit_hash", _commit):
            results = simple_evaluate(
                model=model,
                tasks=select.named_tasks(alike, index),
                num_fewshot=alike[0].few_shot,
                limit=alike[0].limit,
                bootstrap_iters=BOOTSTRAPS,
                log_samples=samples,
                task_manager=index,
            )
        _merge(whole, results)
    whole["config"] = {**whole["config"], "model": "deepy", "model_args": facts}
    return whole


def _commit() -> str | None:
    """The commit of the working directory, as the harness notes it, without git's error message."""
    try:
        done = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def _merge(whole: dict[str, Any], results: Mapping[str, Any]) -> None:
    for name, value in results.items():
        if isinstance(value, Mapping):
            whole[name] = {**whole.get(name, {}), **value}
        else:
            whole[name] = value


@functools.cache
def _environment(describe: Callable[[], str] = collect_env.get_pretty_env_info) -> str:
    """The harness's description of this machine, made once: it starts pip and more, seconds for each group of tasks."""
    return describe()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """The harness seeds every generator of the process, and prints. Restores all of that afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    forks = os.environ.get(NO_FORKS)
    os.environ[NO_FORKS] = "1"  # not by mock.patch.dict, which empties the environment for a moment at the end
    try:
        with mock.patch.object(collect_env, "get_pretty_env_info", _environment), select.quiet():
            yield
    finally:
        os.environ.pop(NO_FORKS, None)
        if forks is not None:
            os.environ[NO_FORKS] = forks
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if devices:
            torch.cuda.set_rng_state_all(devices)


def texts(requests: Sequence[Request], folders: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Names and texts of the scored documents of tasks: the prompt without examples, and the right answer."""
    with undisturbed():
        index = manager_for(requests, folders)
        tasks = {name: task for each in named_tasks(requests, index) for name, task in load(each, index).items()}
        for name, task in tasks.items():
            for number, document in enumerate(task.eval_docs):
                yield f"{name}:{number}", text_of(task, document)


def text_of(task: Any, document: dict[str, Any]) -> str:
    """A document of a task as one text, with the first right answer."""
    context, target = task.doc_to_text(document), task.doc_to_target(document)
    choices = task.doc_to_choice(document) if task.OUTPUT_TYPE == "multiple_choice" else None
    if choices and isinstance(context, int):  # the choices are beginnings of one given text
        context = choices[context]
    elif choices and isinstance(target, int):
        target = choices[target]
    if isinstance(target, (list, tuple)):
        target = target[0] if target else ""
    between = "" if str(context)[-1:].isspace() or str(target)[:1].isspace() else " "
    return f"{context}{between}{target}"
