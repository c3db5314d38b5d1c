"""Where the wall time of this process went since its launch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.worker.beacon import END, EVALUATE, NAMES, SAVE, SETUP, START, Beacon

SINCE = "JOB_SINCE"  # when the launcher started the ranks
_KINDS = {START: "start", SETUP: "start", EVALUATE: "evaluation", SAVE: "save", END: "end"}


@dataclass(frozen=True)
class WallTime:
    """The account of one start of a run.

    Attributes:
        beacon: measures the phases of this process.
        since: time of launch, in seconds since the epoch.
        before: seconds from then until the beacon was made.
        attempt: number of earlier starts, which failed.
    """

    beacon: Beacon
    since: float = field(default_factory=time.time)
    before: float = 0.0
    attempt: int = 0

    @classmethod
    def of(cls, beacon: Beacon, attempt: int, environment: Mapping[str, str] = os.environ) -> WallTime:
        """From the launcher's start of this process. Without a launcher, from the start of the process."""
        now, age = time.time(), time.monotonic() - beacon.born
        try:
            since = float(environment[SINCE])
        except (KeyError, ValueError):
            since = now - _process_age(age)
        return cls(beacon, since, max(now - age - since, 0.0), attempt)

    def spent(self, completed: int) -> dict[str, Any]:
        """A mark for the ledger after this number of updates. See `megatron.report.goodput`."""
        kinds = {"start": self.before, "steps": 0.0, "evaluation": 0.0, "save": 0.0, "end": 0.0}
        within = {"waiting": 0.0}
        for phase, (seconds, waited) in enumerate(zip(self.beacon.spent(), self.beacon.waits())):
            kinds[_KINDS.get(phase, "steps")] += seconds
            if phase not in _KINDS:
                within[NAMES[phase]] = seconds - waited
                within["waiting"] += waited
        rounded = {kind: round(seconds, 6) for kind, seconds in kinds.items()}
        parts = {part: round(seconds, 6) for part, seconds in within.items()}
        return {"since": self.since, "attempt": self.attempt, "completed": completed, **rounded, "within": parts}


def _process_age(least: float) -> float:
    """Seconds since this process began, or `least` if the system does not provide it."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), least)
    except (OSError, ValueError, IndexError, AttributeError):
        return least
