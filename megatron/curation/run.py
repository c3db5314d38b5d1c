"""Runs a recipe: its phases one after another, each by an executor of datatrove."""

import hashlib
import importlib.metadata
import json
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from megatron.data.corpus.job import end_with_parent
from megatron.data.errors import DataError

from .folder import Folder, to_json
from .recipe import Recipe, Stage
from .shards import InputFile, shards_of
from .stages import STAGES
from .tasks import DecideTask, PageTask, ShardTask, phases_of

STATE = "state.json"
LIBRARIES = ("datatrove", "numpy", "zstandard", "xxhash")  # whose versions the output may depend on


def run(recipe: Recipe, quiet: bool = False) -> dict[str, Any]:
    """Run a recipe, or the rest of it after a killed start.

    Args:
        quiet: without datatrove's log.

    Returns:
        The report, as in `report.json`. For Slurm, which works after this has returned, the names of the steps.

    Raises:
        DataError: the output folder has another recipe's result, inputs have changed, there are none, or a task failed
            on Ray. An error of a local task is raised as it is.
    """
    folder, shards = Folder(recipe.section.output), shards_of(recipe.section)
    _claim(folder, recipe, shards)
    folder.clean()
    quiet = quiet and recipe.section.executor == "local"
    if quiet:
        logger.disable("datatrove")
    steps = list(_steps(recipe, shards, quiet))
    executors = [_executor(recipe, number, step, tasks) for number, (step, tasks) in enumerate(steps)]
    if recipe.section.executor == "slurm":
        for former, executor in zip(executors, executors[1:]):
            executor.depends = former
        executors[-1].run()
        return {"started": [f"{step.name} ({tasks} tasks)" for step, tasks in steps]}
    for executor in executors:
        executor.run()
        _finished(folder, executor)
    report: dict[str, Any] = json.loads(folder.read("report.json"))
    return report


def _steps(recipe: Recipe, shards: list[list[InputFile]], quiet: bool) -> Iterator[tuple[PipelineStep, int]]:
    for phase in phases_of(recipe):
        yield ShardTask(recipe, shards, quiet, phase), len(shards)
        if phase.compare:
            yield DecideTask(recipe, shards, quiet, phase), 1
    yield PageTask(recipe, shards, quiet), 1


def _finished(folder: Folder, executor: Any) -> None:
    """Check that all tasks of a step are complete: Ray's executor logs their errors and returns.

    Raises:
        DataError: some are not.
    """
    executor.logging_dir.fs.invalidate_cache()
    if failed := executor.get_incomplete_ranks(skip_completed=True):
        step = executor.pipeline[0].name
        rule = f"{len(failed)} of the {executor.tasks} tasks of the step {step} failed (the first: {failed[0]})"
        fix = f"see {executor.logging_dir.path}/logs. Another start runs only these again"
        raise DataError(folder.url, rule, fix)


def _claim(folder: Folder, recipe: Recipe, shards: list[list[InputFile]]) -> None:
    """Note whose output the folder is. Later starts continue it."""
    files = [[file.to_json() for file in shard] for shard in shards]
    inputs = hashlib.blake2b(to_json(files), digest_size=16).hexdigest()
    versions = {each: importlib.metadata.version(each) for each in LIBRARIES}
    state: dict[str, Any] = {"recipe": recipe.to_json(), "inputs": inputs, "libraries": versions}
    if lists := {path: _hash(path) for path in _read_by_stages(recipe.stages)}:
        state["files"] = lists
    if not folder.exists(STATE):
        if folder.exists("documents"):
            raise DataError(folder.url, "the folder has documents of something else", "name another output")
        folder.write("inputs.json", to_json(files))
        folder.write(STATE, to_json(state))
        return
    known = json.loads(folder.read(STATE))
    names = {"recipe": "the recipe", "inputs": "the input files", "libraries": "the libraries"}
    for name, what in (names | {"files": "the files that stages read"}).items():
        if known.get(name) != state.get(name):
            rule = f"it has the result of another run: {what} must be the same"
            raise DataError(folder.url, rule, "name another output, or remove the folder")


def _read_by_stages(stages: Iterable[Stage]) -> list[str]:
    found = set()
    for stage in stages:
        found |= set(_read_by_stages(stage.inner) if stage.inner else STAGES[stage.name].files(stage.options))
    return sorted(found)


def _hash(path: str) -> str:
    """Of a file, or of all files of a folder with their names."""
    total = hashlib.blake2b(digest_size=16)
    for each in sorted(Path(path).rglob("*")) if Path(path).is_dir() else [Path(path)]:
        if each.is_file():
            total.update(each.relative_to(path).as_posix().encode("utf-8", "surrogateescape"))
            with open(each, "rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _executor(recipe: Recipe, number: int, step: PipelineStep, tasks: int) -> Any:
    section = recipe.section
    logs = f"{section.output.rstrip('/')}/states/logs/{number:02d}_{step.name}"
    if section.executor == "slurm":
        from datatrove.executor.slurm import SlurmPipelineExecutor

        assert section.slurm is not None
        own = section.slurm
        return SlurmPipelineExecutor(
            [step],
            tasks,
            own.time,
            own.partition,
            mem_per_cpu_gb=own.memory,
            workers=section.workers,
            logging_dir=logs,
            env_command=own.prepare,
            job_name=f"curate_{number:02d}_{step.name}",
        )
    if section.executor == "ray":
        from datatrove.executor.ray import RayPipelineExecutor

        return RayPipelineExecutor([step], tasks, workers=section.workers, logging_dir=logs)
    return LocalExecutor([step], tasks, workers=min(section.workers, tasks), logging_dir=logs)


class LocalExecutor(LocalPipelineExecutor):
    """datatrove's local executor without its manager process, which would outlive a killed run. A worker that is killed
    ends the run with an error."""

    def run(self) -> None:
        waiting = self.get_incomplete_ranks(range(self.tasks))
        if self.workers == 1 or len(waiting) < 2:
            for rank in waiting:
                self._run_for_rank(rank)
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([ShardTask.__module__])  # once, and not in each worker of each step
        with ProcessPoolExecutor(self.workers, context, end_with_parent) as pool:
            for task in [pool.submit(self._run_for_rank, rank, int(rank > 0)) for rank in waiting]:
                task.result()
