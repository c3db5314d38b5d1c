"""After which failures a run is started again."""

from __future__ import annotations

import signal

import pytest

from megatron.launch.launcher.launcher import Result
from megatron.launch.report.console import HANG, HOST_LOST, Failure
from megatron.launch.supervisor import CYCLES, Restarts
from megatron.worker.job import CORRUPT

TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n'


def failed(
    step: int | None, status: int = 1, text: str = TRACE + "ValueError: x", *, rank: int | None = 0, **more
) -> Result:
    first = Failure(0.0, "node1", rank, status, text=text, step=step)
    told = {"signals": (), "started": True, **more}
    return Result(status, first, (first,), told["signals"], 10.0, told["started"])


def answers(*results: Result, allowed: int = 9) -> list[str | None]:
    """The reason after each failure. A restart follows each None."""
    restarts, said = Restarts(allowed), []
    for each in results:
        said.append(restarts.refusal(each))
        restarts.done += 1
    return said


def test_a_failure_that_comes_twice_at_one_step_is_not_tried_again():
    first, second = answers(failed(12), failed(12))
    assert (
        first is None and second == "not started again: ValueError: x has come twice at step 12, so it would come again"
    )


def test_so_is_one_that_comes_twice_before_the_first_step():
    first, second = answers(failed(-1), failed(-1))
    assert first is None and second.endswith(
        "ValueError: x has come twice before the first step, so it would come again"
    )


def test_corruption_is_started_again_unless_it_is_the_same():
    """Status 17: other updates, other words."""
    found = [failed(n, status=CORRUPT, text=f"{TRACE}Corruption: after {n + 1} updates rank 3") for n in (12, 30, 30)]
    first, second, third = answers(*found)
    assert first is second is None and third.startswith(
        "not started again: Corruption: after 31 updates rank 3 has come"
    )


@pytest.mark.parametrize(
    "again",
    [
        failed(13),
        failed(12, text=TRACE + "ValueError: y"),
        failed(12, status=-signal.SIGKILL, text=""),
        failed(12, status=HANG),
        failed(None, status=HOST_LOST, text="", rank=None),
    ],
)
def test_another_failure_or_another_step_is(again):
    assert answers(failed(12), again) == [None, None]


@pytest.mark.parametrize(
    "text",
    [
        "OSError: [Errno 28] No space left on device",
        "RuntimeError: Connection closed by peer",
        "megatron.checkpoint.format.errors.StoreRefuses: /c/step_00000400: [Errno 30] Read-only file system",
    ],
)
def test_what_may_pass_by_itself_is(text):
    assert answers(failed(12, text=TRACE + text), failed(12, text=TRACE + text)) == [None, None]


def test_no_progress_ends_it():
    """Kills, at no later step than before: the first start makes progress, the next three do not."""
    killed = [failed(step, status=-signal.SIGKILL, text="") for step in (20, 15, 20, 3)]
    said = answers(*killed)
    assert said[:CYCLES] == [None] * CYCLES
    assert said[CYCLES] == f"not started again: {CYCLES} starts in a row have come no further than step 20"
    slowly = [failed(step, status=-signal.SIGKILL, text="") for step in (20, 15, 20, 21, 5, 21, 22)]
    assert answers(*slowly) == [None] * 7, "each of them within three starts"


def test_ranks_that_tell_nothing_are_started_as_often_as_allowed():
    assert answers(*[failed(None)] * 5, allowed=4) == [None] * 4 + [""]


def test_signals_mistakes_and_ranks_that_never_started_end_it():
    assert (
        answers(failed(1, signals=(15,))) == answers(failed(1, status=2)) == answers(failed(1, started=False)) == [""]
    )
