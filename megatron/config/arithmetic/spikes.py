"""What a run asks of its updates before they are applied, without torch; see `engine/update_gate.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.parallel.layout.layout import Layout

    from ..schema import Config

ADAGC = "adagc"  # a word of `spikes.action`


def has_gate(config: Config) -> bool:
    """Whether a run has a gate: because it looks at updates, or computes steps without an update."""
    return config.spikes.judges or config.training.audit is not None or config.logging.noise_scale is not None


def meets_early(config: Config, layout: Layout) -> bool:
    """Whether ranks exchange the numbers of a step while its gradients are computed, without their norm.

    They can where they differ in their part of the batch alone: their sums of gradients have the same bits, and so has
    what is made of them. Where steps are computed twice, what is exchanged is that of the second time.
    """
    alike = layout.tensor == layout.pipeline == layout.expert == 1
    twice = config.spikes.confirm or config.spikes.attribute or config.training.audit or config.logging.noise_scale
    return config.spikes.judges and alike and not twice


def exchanges_norm(config: Config, layout: Layout) -> bool:
    """Whether rank 0 tells the others the gradient norm of each step, so that all decide by the same bits."""
    return config.spikes.judges and not meets_early(config, layout)
