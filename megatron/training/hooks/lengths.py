"""Stages of sequence length and of batch size in the records and the ledger."""

from __future__ import annotations

from megatron.config import Config
from megatron.config.arithmetic.batches import batches_of
from megatron.config.stages import stage_at

from ..hook import Hook, HookContext
from ..trainer import Trainer


class LengthsHook(Hook):
    """Reports `training.sequence_schedule` and `training.batch_schedule`. The loader and the engine follow them by
    themselves."""

    def __init__(self, config: Config) -> None:
        self._config, self._batches = config, batches_of(config)
        self._told: tuple[int, int] | None = None  # numbers of the last reported stages

    @classmethod
    def of(cls, parts: HookContext) -> LengthsHook | None:
        training = parts.config.training
        return cls(parts.config) if training.sequence_schedule or training.batch_schedule else None

    def before_step(self, trainer: Trainer, step: int) -> None:
        stage, batches, schedule = stage_at(self._config, step), self._batches, self._config.training.sequence_schedule
        samples, number = batches.size(step) * stage.pieces, batches.stage(step)
        trainer.extra_metrics |= {"sequence_length": stage.length} if schedule else {}
        trainer.extra_metrics |= {"global_batch_size": samples} if len(batches.sizes) > 1 else {}
        if (stage.number, number) == self._told:
            return
        self._told = stage.number, number
        rotary = schedule[stage.number].rotary if stage.end is not None else {}
        turned = {name: own.model_dump(mode="json") for name, own in rotary.items()}
        ends = [end for end in (stage.end, *batches.begins[number + 1 :][:1]) if end is not None]
        until = f"step {min(ends)}" if ends else "the end"
        named = "".join(f", {name} with rotary base {own.base:g} ({own.scaling.type})" for name, own in rotary.items())
        trainer.log(f"from step {step} to {until}: {samples} sequences of {stage.length} tokens per step{named}")
        trainer.record("stage", step=step, sequence_length=stage.length, samples_per_step=samples, rotary=turned)
