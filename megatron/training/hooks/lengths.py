"""Stages of sequence length in the records and the ledger."""

from __future__ import annotations

from megatron.config import Config
from megatron.config.stages import stage_at

from ..hook import Hook, HookContext
from ..trainer import Trainer


class LengthsHook(Hook):
    """Reports `training.sequence_schedule`. The loader and the engine follow it by themselves."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._told: int | None = None  # number of the last reported stage

    @classmethod
    def of(cls, parts: HookContext) -> LengthsHook | None:
        return cls(parts.config) if parts.config.training.sequence_schedule else None

    def before_step(self, trainer: Trainer, step: int) -> None:
        stage = stage_at(self._config, step)
        trainer.extra_metrics["sequence_length"] = stage.length
        if stage.number == self._told:
            return
        self._told = stage.number
        schedule = self._config.training.sequence_schedule
        rotary = schedule[stage.number].rotary if stage.end is not None else {}
        turned = {name: own.model_dump(mode="json") for name, own in rotary.items()}
        samples = self._config.training.global_batch_size * stage.pieces
        until = "the end" if stage.end is None else f"step {stage.end}"
        named = "".join(f", {name} with rotary base {own.base:g} ({own.scaling.type})" for name, own in rotary.items())
        trainer.log(f"from step {step} to {until}: {samples} sequences of {stage.length} tokens per step{named}")
        trainer.record("stage", step=step, sequence_length=stage.length, samples_per_step=samples, rotary=turned)
