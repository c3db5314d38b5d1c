"""What is done about losses and gradients that jump, and about those that are no numbers."""

from __future__ import annotations

from typing import Literal

from ..section import Section, key


class SpikeClipSection(Section):
    """ZClip (arXiv 2504.02507)."""

    z: float = key(
        2.5, "action clip: number of standard deviations above the mean from which gradient norms are clipped.", gt=0
    )
    decay: float = key(0.97, "Decay of the running mean and variance of the norms.", gt=0, lt=1)
    warmup: int = key(25, "Norms that the first mean and variance are taken of.", unit="steps", ge=2)


class AdaGCSection(Section):
    """AdaGC (arXiv 2502.11034)."""

    threshold: float = key(
        1.05, "action adagc: a tensor's gradient is clipped to so many times its own moving norm.", gt=0
    )
    decay: float = key(0.98, "Decay of the moving norms.", gt=0, lt=1)
    warmup: int = key(
        100,
        "The first steps, in which the global norm is clipped (optimizer.gradient_clipping), and the moving norms are "
        "the least so far.",
        unit="steps",
        ge=1,
    )


class SpikesSection(Section):
    action: Literal["off", "report", "skip", "clip", "adagc", "rollback"] = key(
        "off",
        "What happens at a spike. report: log it. skip: skip the update. clip: clip its gradient "
        "harder (ZClip). adagc: clip each tensor's gradient by its own past (AdaGC). rollback: return to a checkpoint "
        "and skip some batches (PaLM).",
    )
    non_finite: Literal["stop", "skip", "rollback"] = key(
        "stop", "The same for a loss or gradient norm that is infinite or no number; fp16 overflows are no spikes."
    )
    watch: Literal["both", "loss", "grad_norm"] = key("both", "The numbers that are checked.")
    window: int = key(128, "Steps that the mean and the standard deviation are taken over.", unit="steps", ge=4)
    sigma: float = key(6.0, "Number of standard deviations above the mean that counts as a spike.", gt=0)
    limit: int = key(10, "Most actions within `within` steps, or most rollbacks of a run; then the run stops.", gt=0)
    within: int = key(1000, "See limit.", unit="steps", gt=0)
    back: int = key(100, "rollback: skip batches from this number of steps before the spike.", unit="steps", ge=0)
    leave_out: int = key(200, "rollback: number of batches to skip.", unit="batches", gt=0)
    confirm: bool = key(
        False, "skip and rollback: compute the step of a spike again; what the second time says counts."
    )
    attribute: bool = key(
        False,
        "A bad value that stays when its step is computed again (confirm, which this includes) is computed once more "
        "after a restart with every rank in another place: then it is of the data, or of the place.",
    )
    clip: SpikeClipSection = key(SpikeClipSection, "action clip.")
    adagc: AdaGCSection = key(AdaGCSection, "action adagc.")

    @property
    def judges(self) -> bool:
        """Whether a run looks at its updates before it applies them."""
        return self.action != "off" or self.non_finite != "stop" or self.attribute
