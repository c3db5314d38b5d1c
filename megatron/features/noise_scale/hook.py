"""Computes a step of a part of the batch before the step itself, and compares the gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.config.arithmetic.batches import batches_of
from megatron.data.batch import StepBatch
from megatron.engine.part import part_of
from megatron.engine.protocol import StepResult
from megatron.features.spikes.gate import StepGate
from megatron.features.spikes.options import NAME
from megatron.training.hook import Hook, HookContext, Look, RunStep

from .estimate import label_weights, noise_scale, small_batch
from .options import LOGGING

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer


class NoiseScaleHook(Hook):
    """Adds `noise_scale` to the record of every n-th step."""

    def __init__(self, every: int, gate: StepGate) -> None:
        self._every, self._gate = every, gate

    @classmethod
    def of(cls, parts: HookContext) -> NoiseScaleHook | None:
        every, gate = LOGGING.of(parts.config).noise_scale, part_of(parts.engine, NAME)
        return None if every is None or gate is None else cls(every, gate)

    def run_step(self, trainer: Trainer, run: RunStep, batch: StepBatch, lr: float, look: Look) -> StepResult:
        if trainer.at % self._every:
            return run(batch, lr, look)
        part = small_batch(batch, trainer.loader.indices(batch.step), batches_of(trainer.config).size(batch.step))
        self._gate.prepare(trial=True, hashes=False)
        small = trainer.engine.step(part, lr, None)
        result = run(batch, lr, look)
        _compare(trainer, part, small, batch, result)
        return result


def _compare(trainer: Trainer, part: StepBatch, small: StepResult, batch: StepBatch, large: StepResult) -> None:
    """Put the noise scale into the record, from the gradients of the batch and of its part."""
    at = trainer.mesh.at
    counts = at.tensor == at.context == at.pipeline == 0  # other ranks have the same batch
    own = [*label_weights(part), *label_weights(batch)] if counts else [0.0] * 4
    b, b_squares, B, B_squares = trainer.exchange.sum(own).tolist()
    if small.grad_norm is None or large.grad_norm is None or small.skipped or large.skipped or not b:
        return
    b, B = b**2 / b_squares, B**2 / B_squares
    if not b < B:
        return
    trainer.extra_metrics["noise_scale"] = noise_scale(float(small.grad_norm), b, float(large.grad_norm), B)
