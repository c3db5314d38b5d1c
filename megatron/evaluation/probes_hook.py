"""Probe sets during training: the loss of each example, on the current weights."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.save.policy import SavePolicy
from megatron.config import Config
from megatron.config.sections.output import ProbeOptions
from megatron.data.tokenizer import build_tokenizer
from megatron.engine.protocol import Engine
from megatron.evaluation.scoring import Scorer, Text
from megatron.training.exchange import StepReport
from megatron.training.hook import Hook, HookContext
from megatron.training.trainer import Trainer
from megatron.training.world import World
from megatron.worker.beacon import EVALUATE

from .probes import longest_of, read_probes


class ProbesHook(Hook):
    """Scores `evaluation.probes` at their intervals, or whenever a checkpoint is due by its step."""

    def __init__(self, config: Config, engine: Engine, world: World) -> None:
        tokenizer = build_tokenizer(config.tokenizer)
        self._probes = [
            (options, [Text(*each) for each in read_probes(options.path, tokenizer, longest_of(config, options))])
            for options in config.evaluation.probes
        ]
        self._policy = SavePolicy.of(config.checkpoint)
        self._scorer = Scorer(config, engine, world.mesh, world.device, texts=config.training.micro_batch_size)

    @classmethod
    def of(cls, parts: HookContext) -> ProbesHook | None:
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
        return self._policy.due(trainer.completed, last_step=trainer.steps) is not None
