"""Next-token prediction: all labels count alike, and each costs its cross-entropy."""

from __future__ import annotations

from ..contract import Objective


class CrossEntropy(Objective):
    """The defaults of `Objective`."""
