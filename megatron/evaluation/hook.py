"""Benchmark tasks during training, on the current weights. Training continues bitwise as without them."""

from functools import partial
from typing import Any

from megatron.checkpoint.format.communicator import from_rank_0
from megatron.checkpoint.save.policy import reason_to_save
from megatron.config import Config
from megatron.config.sections.output import ProbeOptions, TaskOptions
from megatron.config.sequences import stage_of
from megatron.data.tokenizer import build_tokenizer
from megatron.engine.protocol import Engine
from megatron.evaluation.scoring import Scorer, Text
from megatron.training.exchange import StepReport
from megatron.training.hook import Hook, HookContext
from megatron.training.trainer import Trainer
from megatron.training.world import World
from megatron.worker.beacon import EVALUATE
from megatron.worker.place import StartError

from .arguments import during_training
from .harness import load_tasks, numbers, run_tasks
from .probes import longest_of, read_probes
from .select import Request, TaskError


class TasksHook(Hook):
    """Runs `evaluation.tasks` at their intervals, and after the last step if they have none."""

    def __init__(self, config: Config, engine: Engine, world: World) -> None:
        self._tasks, self._communicator = during_training(config), world.communicator
        self._folders = tuple(config.evaluation.task_folders)
        self._tokenizer = build_tokenizer(config.tokenizer)
        texts = config.training.micro_batch_size
        self._scorer = Scorer.of_tasks(config, engine, world.mesh, world.device, texts)

    @classmethod
    def of(cls, parts: HookContext) -> "TasksHook | None":
        if not during_training(parts.config) or parts.engine is None or parts.world is None:
            return None
        return cls(parts.config, parts.engine, parts.world)

    def on_start(self, trainer: Trainer) -> None:
        """Have rank 0 load all tasks, so that a run with mistakes ends here and not at the first evaluation."""
        work = partial(load_tasks, [*map(Request.of, self._tasks)], self._folders)
        _, failure = from_rank_0(self._communicator, work, TaskError)
        if failure:
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
            found = numbers(results)
            trainer.sinks.write({"step": trainer.completed, "tasks": found})
            trainer.record("tasks", step=trainer.completed, batch_hash=f"{report.batch_hash:016x}", tasks=found)

    @staticmethod
    def _due(task: TaskOptions, trainer: Trainer) -> bool:
        if task.every is None:
            return trainer.completed == trainer.steps
        return trainer.completed % task.every == 0


class ProbesHook(Hook):
    """Scores `evaluation.probes` at their intervals, or whenever a checkpoint is due by its step."""

    def __init__(self, config: Config, engine: Engine, world: World) -> None:
        tokenizer = build_tokenizer(config.tokenizer)
        self._probes = [
            (options, [Text(*each) for each in read_probes(options.path, tokenizer, longest_of(config, options))])
            for options in config.evaluation.probes
        ]
        self._saves = config.checkpoint
        self._scorer = Scorer(config, engine, world.mesh, world.device, texts=config.training.micro_batch_size)

    @classmethod
    def of(cls, parts: HookContext) -> "ProbesHook | None":
        if not parts.config.evaluation.probes or parts.engine is None or parts.world is None:
            return None
        return cls(parts.config, parts.engine, parts.world)

    def on_start(self, trainer: Trainer) -> None:
        if not trainer.start:
            self._score(trainer)

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        self._score(trainer)

    def _score(self, trainer: Trainer) -> None:
        due = [each for each in self._probes if self._due(each[0], trainer)]
        if not due:
            return
        trainer.settle()
        found: dict[str, Any] = {}
        for options, texts in due:
            with trainer.aside(EVALUATE, options.name):
                losses = [-each.log_likelihood for each in self._scorer.score(texts)]
            found[options.name] = {"loss": sum(losses) / sum(text.scored for text in texts), "examples": losses}
        if trainer.is_main:
            trainer.sinks.write({"step": trainer.completed, "probes": found})

    def _due(self, options: ProbeOptions, trainer: Trainer) -> bool:
        if options.every is not None:
            return trainer.completed % options.every == 0
        return reason_to_save(self._saves, trainer.completed, last_step=trainer.steps) is not None
