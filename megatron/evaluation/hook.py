"""Benchmark tasks during training, on the current weights. Training continues bitwise as without them."""

from __future__ import annotations

from megatron.config import Config
from megatron.config.sections.output import TaskOptions
from megatron.config.stages import stage_of
from megatron.data.tokenizer import build_tokenizer
from megatron.engine.protocol import Engine
from megatron.evaluation.scoring import Scorer
from megatron.training.exchange import StepReport
from megatron.training.hook import Hook, HookContext
from megatron.training.trainer import Trainer
from megatron.training.world import World
from megatron.worker.beacon import EVALUATE
from megatron.worker.place import StartError

from .check import during_training
from .harness import load_tasks, run_tasks
from .results import numbers
from .select import Request, TaskError


class TasksHook(Hook):
    """Runs `evaluation.tasks` at their intervals, and after the last step if they have none."""

    def __init__(self, config: Config, engine: Engine, world: World) -> None:
        self._tasks, self._communicator = during_training(config), world.communicator
        self._folders = tuple(config.evaluation.task_folders)
        self._tokenizer = build_tokenizer(config.tokenizer)
        texts = config.training.micro_batch_size
        self._scorer = Scorer(config, engine, world.mesh, world.device, texts=texts)

    @classmethod
    def of(cls, parts: HookContext) -> TasksHook | None:
        if not during_training(parts.config) or parts.engine is None or parts.world is None:
            return None
        return cls(parts.config, parts.engine, parts.world)

    def on_start(self, trainer: Trainer) -> None:
        """Have rank 0 load all tasks, so that a run with mistakes ends here and not at the first evaluation."""
        failure = None
        if self._communicator.rank == 0:
            try:
                load_tasks([*map(Request.of, self._tasks)], self._folders)
            except TaskError as error:
                failure = str(error)
        if failure := self._communicator.broadcast(failure):
            raise StartError(f"evaluation.tasks: {failure}")

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        due = [task for task in self._tasks if self._due(task, trainer)]
        if not due:
            return
        trainer.settle()
        with trainer.aside(EVALUATE, "tasks"):
            results = run_tasks(
                [*map(Request.of, due)],
                self._scorer,
                self._communicator,
                self._tokenizer,
                max_length=stage_of(trainer.config, trainer.completed).length,
                folders=self._folders,
                progress=False,
            )
        if results is not None:
            self._record(trainer, report, numbers(results))

    @staticmethod
    def _due(task: TaskOptions, trainer: Trainer) -> bool:
        if task.every is None:
            return trainer.completed == trainer.steps
        return trainer.completed % task.every == 0

    @staticmethod
    def _record(trainer: Trainer, report: StepReport, found: dict[str, dict[str, float]]) -> None:
        trainer.sinks.write({"step": trainer.completed, "tasks": found})
        trainer.record("tasks", step=trainer.completed, batch_hash=f"{report.batch_hash:016x}", tasks=found)
