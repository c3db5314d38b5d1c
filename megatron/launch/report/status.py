"""Exit statuses, and the choice of the failure to report."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

HOST_LOST = 255
HANG = 76
NO_PROGRESS = 77  # started again and again, and never came further
STOPPED_EARLY = 128 + signal.SIGUSR1  # warned by the scheduler, saved, and not at the end: start it again
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = "stopped by the launcher"  # the reason of a rank that ended because another had failed
LEFT = "it ended with status 0 before its work was done (a call of exit)"  # the same of a rank that left the others
AT_ONCE = 10.0  # seconds within which an end may be noticed late
# What a rank says whose peer has gone.
COMPLAINT = re.compile(
    r"connection (was likely )?(closed|reset|refused)|socket (unexpectedly )?closed|peer closed the "
    r"connection|broken pipe"
    r"|connectFullMesh|ncclRemoteError",
    re.IGNORECASE,
)
# Not SIGABRT, with which NCCL's watchdog ends a rank that has lost a peer.
KILLS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
FORWARDED_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Failure:
    """The bad end of a rank, or the loss of a host.

    Attributes:
        time: seconds since the epoch, by the launcher's clock, when it failed.
        host: name of the host.
        rank: global rank, or None where the host as a whole was lost or could not start.
        status: exit status as `wait` gives it: negative for a signal.
        reason: why, where no rank says it.
        text: the end of the rank's output.
        since: when it stopped to get on, by the launcher's clock, where that was before it was ended for it (a hang).
        step: the last one that the rank had begun, from 0. -1 before the first, or None where it has no beacon.
        shown: whether the console has shown all that the rank said.
        disagreement: what ranks called differently, where the run failed for that.
    """

    time: float
    host: str
    rank: int | None
    status: int
    reason: str = ""
    text: str = ""
    step: int | None = None
    since: float | None = None
    shown: bool = False
    disagreement: str = ""


def exit_status(status: int) -> int:
    """A wait status as a shell would give it: 128 + n for signal n."""
    return 128 - status if status < 0 else status


def signal_of(status: int) -> signal.Signals | None:
    """The signal behind a status (-n or 128 + n)."""
    number = -status if status < 0 else status - 128
    try:
        return signal.Signals(number) if number > 0 else None
    except ValueError:
        return None


def describe_status(status: int) -> str:
    """A status in words: "status 1", "SIGKILL (137)"."""
    if status == HANG:
        return f"hang (status {HANG})"
    name = signal_of(status)
    return f"{name.name} ({exit_status(status)})" if name else f"status {status}"


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The failure that came first. A rank's own end beats the loss of its host at the same moment.

    A rank that complains of a lost peer may do so before the peer's agent, on a busy host, has noticed the failure.
    Where a rank was killed or failed for a reason of its own at about that time, its failure came first.
    """
    failures = sorted(failures, key=lambda each: (each.time, each.rank is None, each.rank or 0))
    if not failures or not COMPLAINT.search(failures[0].text):
        return failures[0] if failures else None
    soon = (each for each in failures if each.time - failures[0].time < AT_ONCE)
    return next((each for each in soon if _is_a_cause(each)), failures[0])


def _is_a_cause(failure: Failure) -> bool:
    if failure.rank is None or failure.reason:
        return failure.reason == LEFT
    said = bool(failure.text) and not COMPLAINT.search(failure.text)
    return -failure.status in KILLS or (failure.status > 0 and said)


def stopped(status: int, sent: Iterable[int]) -> bool:
    """Whether a rank's status only says that it obeyed one of the signals `sent`."""
    return any(status in (-number, 128 + number) for number in sent)


def outcome(failures: list[Failure], sent: Iterable[int]) -> tuple[int, Failure | None]:
    """The status of the whole run, and the failure to show.

    Args:
        failures: every bad end.
        sent: signals that the launcher had to forward.

    Returns:
        (0, None) if all went well. (128 + n, None) if ranks ended by signal n that the launcher passed on, or at once
        because it came twice, and nothing else went wrong. Otherwise the first failure's status and that failure.
    """
    sent = tuple(sent)
    harmless = [
        each
        for each in failures
        if sent and each.rank is not None and (each.reason == STOPPED or stopped(each.status, sent))
    ]
    first = first_failure(each for each in failures if each not in harmless)
    if first is None:
        obeyed = first_failure(each for each in harmless if stopped(each.status, sent))
        return (exit_status(obeyed.status) if obeyed else 128 + sent[-1] if harmless else 0), None
    return (HOST_LOST if first.rank is None else exit_status(first.status)), first
