"""Whether a run that has failed is started again: by the cause of the failure, and by whether the run gets on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from megatron.worker.job import CONFIG_ERROR, RERUN

from ..report.console import last_traceback
from ..report.status import COMPLAINT, HANG, Failure, describe_status
from .launcher import Result

_OUTSIDE = re.compile(
    r"(\w+\.)*\w*(OS|IO|Timeout|Connection|BrokenPipe|FileNotFound|Permission)\w*Error|(\w+\.)*StoreRefuses"
)  # may pass
CYCLES = 3  # starts in a row that come no further than those before


@dataclass
class Restarts:
    """Decides from one failure to the next.

    Args:
        allowed: how many restarts there may be.
    """

    allowed: int
    done: int = 0
    furthest: int | None = None  # step that some start has come to
    idle: int = 0  # starts in a row that did not come further
    last: tuple[int, int, str] | None = None  # cause of the last failure
    _repeated: bool = field(default=False, repr=False)

    def refusal(self, result: Result) -> str | None:
        """Why a failed run is not started again, in words, "" without a reason to print, None if it is started again.

        It is not after a signal to the launcher, nor where the ranks were never started: hosts that never answered are
        a mistake, not a failure. Nor after a mistake in the configuration.
        """
        self.note(result)
        if self.done >= self.allowed or result.signals or result.status == CONFIG_ERROR:
            return ""
        if self.done == 0 and not result.started:
            return ""
        if self._repeated:
            assert self.last is not None
            step, _, what = self.last
            where = f"at step {step}" if step >= 0 else "before the first step"
            return f"not started again: {what} has come twice {where}, so it would come again"
        if self.idle >= CYCLES:
            return f"not started again: {CYCLES} starts in a row have come no further than step {self.furthest}"
        return None

    def note(self, result: Result) -> None:
        """Take in how a start ended."""
        steps = [each.step for each in result.failures if each.step is not None]
        here = max(steps, default=None)
        if here is not None:
            further = self.furthest is None or here > self.furthest
            self.idle = 0 if further else self.idle + 1
            self.furthest = here if further else self.furthest
        cause = _cause(result.first)
        self._repeated = cause is not None and cause == self.last
        self.last = cause


def _cause(failure: Failure | None) -> tuple[int, int, str] | None:
    """The identity of a failure: step, status, and the exception's own words. None of one that chance may have brought:
    a killed process, a lost host, a hang, a peer that has gone."""
    if failure is None or failure.step is None or failure.status in (HANG, RERUN):
        return None
    if failure.disagreement:
        return failure.step, 0, "a disagreement of ranks"
    if failure.status <= 0:
        return None
    lines = last_traceback(failure.text).strip().splitlines()
    if failure.reason or not lines or "Traceback" not in failure.text or COMPLAINT.search(failure.text):
        return None
    if _OUTSIDE.match(lines[-1]):
        return None
    return failure.step, failure.status, lines[-1][:200] or describe_status(failure.status)
