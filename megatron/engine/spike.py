"""A bad loss or gradient norm of a step, and the action that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOSS, NORM = "loss", "gradient norm"
REPORT, SKIP, CLIP, ROLLBACK, STOP = "report", "skip", "clip", "rollback", "stop"


@dataclass(frozen=True)
class Spike:
    """A bad number, and the action taken.

    Attributes:
        name: LOSS or NORM.
        value: of the step.
        limit: upper bound of normal values. None where the value is no number.
        action: one of the constants above. Only `report` and `clip` apply the update.
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
        return self.action in (SKIP, ROLLBACK, STOP)
