"""Computes a step of a part of the batch before the step itself, and compares the gradients.

The gradient noise scale: the batch size at which noise and gradient are equally large (McCandlish et al. 2018).

With G the true gradient and S the trace of the covariance of one label's gradient, the gradient of b labels has the
expected square norm |G|^2 + S / b. Two batch sizes give both (arXiv 1812.06162, appendix A.1). Here they are the whole
batch and its first samples, by their numbers in the run's order, independent of the layout.

The gradient is a mean by weight. With weights w, it is as noisy as that of (sum w)^2 / sum w^2 labels of equal
weight, so b counts labels in that way. With equal weights it is their number."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron.config.arithmetic.batches import batches_of
from megatron.data.batch import StepBatch
from megatron.engine.part import part_of
from megatron.engine.protocol import StepResult
from megatron.features.spikes.gate import StepGate
from megatron.features.spikes.options import NAME
from megatron.training.hook import Hook, HookContext, Look, RunStep
from megatron.training.trainer import Trainer

from .options import LOGGING

SHARE = 8  # the small batch is the first 1/8 of the samples: noise outweighs the gradient there


def small_batch(batch: StepBatch, indices: np.ndarray, size: int) -> StepBatch:
    """The same batch, in which only the labels of the first samples count.

    Args:
        indices: places of the rank's samples in the global batch, int64 [A, M]. In a stage of shorter samples, the
            batch has pieces of them.
        size: samples of the global batch.
    """
    pieces = batch.sample_ids.shape[1] // indices.shape[1]
    places = torch.from_numpy(indices[..., None] * pieces + np.arange(pieces)).flatten(1)
    chosen = places < max(1, size * pieces // SHARE)
    mask = torch.ones(batch.labels.shape) if batch.loss_mask is None else batch.loss_mask
    return replace(batch, loss_mask=mask * chosen.unsqueeze(-1))


def label_weights(batch: StepBatch) -> tuple[float, float]:
    """Sum of the weights of this rank's labels, and sum of their squares."""
    if batch.loss_mask is None:
        return float(batch.labels.numel()), float(batch.labels.numel())
    weights = batch.loss_mask.double()
    return float(weights.sum()), float(weights.square().sum())


def noise_scale(small: float, b: float, large: float, B: float) -> dict[str, Any]:
    """The noise scale from the norms `small` and `large` of the gradients of b and B labels, b < B.

    Returns:
        noise: S. signal: |G|^2. Estimates from one step may be below 0. tokens: S / |G|^2, if both are above 0.
    """
    noise = (small**2 - large**2) / (1 / b - 1 / B)
    signal = (B * large**2 - b * small**2) / (B - b)
    found: dict[str, Any] = {"noise": noise, "signal": signal}
    if noise > 0 and signal > 0:
        found["tokens"] = noise / signal
    return found


class NoiseScaleHook(Hook):
    """Adds `noise_scale` to the record of every n-th step."""

    def __init__(self, every: int, gate: StepGate) -> None:
        self._every, self._gate = every, gate

    @classmethod
    def of(cls, parts: HookContext) -> "NoiseScaleHook | None":
        every, gate = LOGGING.of(parts.config).noise_scale, part_of(parts.engine, NAME)
        return None if every is None or gate is None else cls(every, gate)

    def run_step(self, trainer: Trainer, run: RunStep, batch: StepBatch, lr: float, look: Look) -> StepResult:
        if trainer.at % self._every:
            return run(batch, lr, look)
        size = batches_of(trainer.config).size(batch.step)
        own = trainer.loader.indices(batch.step) % size  # runs that share batches have ranges of this size
        part = small_batch(batch, own, size)
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
