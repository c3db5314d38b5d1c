"""A bad loss or gradient norm of a step, and the action that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOSS, NORM = "loss", "gradient norm"
REPORT, SKIP, CLIP, ROLLBACK, STOP = "report", "skip", "clip", "rollback", "stop"


@dataclass(frozen=True)
class Spike:
    """What was found, and what is done.

    Attributes:
        name: LOSS or NORM.
        value: of the step.
        limit: what it should not have exceeded; None where the value is no number.
        action: one of the words above. All but `report` and `clip` leave the update out.
    """

    name: str
    value: float
    limit: float | None
    action: str

    @property
    def finite(self) -> bool:
        return math.isfinite(self.value)

    @property
    def leaves_out(self) -> bool:
        """Whether the update is not applied."""
        return self.action in (SKIP, ROLLBACK, STOP)
