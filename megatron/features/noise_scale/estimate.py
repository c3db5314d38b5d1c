"""The gradient noise scale: the batch size at which noise and gradient are equally large (McCandlish et al. 2018).

With G the true gradient and S the trace of the covariance of one label's gradient, the gradient of b labels has the
expected square norm |G|^2 + S / b. Two batch sizes give both (arXiv 1812.06162, appendix A.1). Here they are the whole
batch and its first samples, by their numbers in the run's order, independent of the layout.

The gradient is a mean by weight. With weights w, it is as noisy as that of (sum w)^2 / sum w^2 labels of equal
weight, so b counts labels in that way. With equal weights it is their number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron.data.batch import StepBatch

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
