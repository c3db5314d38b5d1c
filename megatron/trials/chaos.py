"""Faults drawn from a seed happen to a run until it is done; its end must be that of a run that was left alone."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from megatron.config import Config
from megatron.report.ledger import batch_hashes
from megatron.trials.resume import compare

from .faults import AGAIN, FAULTS, GOES_ON, KEPT, Fault, mount, unmount_all
from .hosts import TrialHosts
from .job import OWN_NETWORK, SLOW_LINK, TrialError, TrialJob
from .resume import complete, with_hook

MISSED = "the run ended as if nothing had been"
SPARES = 8  # hosts that may be lost until the launcher is started anew
DISK = 24  # checkpoints that the small disk has room for


@dataclass
class Event:
    """A fault and what came of it; times in seconds after it.

    Attributes:
        fault, told: which, and on whom.
        step: the last one that was logged before it.
        detected: until the launcher had ended the start, or the ledger had the event; None where nothing need notice.
        recovered: until the next step was logged.
        lost: steps that were done again.
        status: of the failed start.
        problem: what was not as it must be.
    """

    fault: str
    told: str
    step: int
    detected: float | None = None
    recovered: float | None = None
    lost: int = 0
    status: int | None = None
    problem: str = ""


@dataclass
class Round:
    """One run from its beginning to its end, with what happened to it and what is wrong with its end."""

    number: int
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Arena:
    """What all rounds share.

    Attributes:
        folder: of everything.
        words: configuration file and overrides.
        config: what they resolve to.
        ranks: processes, on each host if there are several.
        steps, every: length of a run, and steps between its checkpoints.
        tell: hears of each fault.
        hosts: made of namespaces, `SPARES` of which are kept back; None for this machine as it is.
    """

    folder: Path
    words: Sequence[str]
    config: Config
    ranks: int
    steps: int
    every: int
    tell: Callable[[str], None]
    hosts: TrialHosts | None = None

    def job(self, name: str) -> TrialJob:
        words = [*self.words, *overrides(self.steps, self.every)]
        network = self.hosts is None and own_network()
        return TrialJob(self.folder / name, words, self.ranks, network, self.hosts, SPARES if self.hosts else 0)

    def possible(self, disk: bool) -> list[Fault]:
        """Faults that can happen to this run."""
        zero, layout = self.config.zero.stage, self.config.parallel
        ranks = self.ranks * (len(self.hosts.names) - SPARES if self.hosts else 1)
        replicas = zero == 0 and ranks > layout.tensor * layout.pipeline * layout.context
        network = self.hosts is not None or own_network()
        has = {"ranks": ranks > 1, "replicas": replicas, "masters": zero > 0, "disk": disk, "network": network}
        has["hosts"] = self.hosts is not None
        return [each for each in FAULTS if all(has[need] for need in each.needs)]


@cache
def own_network() -> bool:
    """Whether a job may have a network of its own here, and it can be made slow."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "tc"))):
        return False
    return subprocess.run((*OWN_NETWORK, *SLOW_LINK, "1mbit"), capture_output=True).returncode == 0


def overrides(steps: int, every: int) -> list[str]:
    """What a run needs to notice everything soon, and to go on by itself."""
    return [
        f"training.steps={steps}",
        f"checkpoint.every={every}",
        f"checkpoint.keep_last={KEPT}",
        "logging.every=1",  # every loss is compared
        "checkpoint.prove=true",
        "training.hashes=5",
        "training.hashes_at_rest=always",
        "spikes.action=skip",
        "spikes.confirm=true",
        "spikes.window=8",
        "spikes.sigma=100",
        "launch.restarts=1000000",
        "launch.restart_delay=0.05",
        "launch.grace=60",
        *[f"watch.{phase}=20" for phase in ("step", "data", "evaluation", "save")],
    ]


def chaos(arena: Arena, *, seed: int, until: Callable[[], bool], only: Iterable[str] = ()) -> Iterator[Round]:
    """Rounds, until nobody wants more; each is given when it is over.

    Args:
        until: asked before each fault; after it says yes the last run may finish.
        only: names of faults; all that are possible where there are none.

    Raises:
        TrialError: no fault is possible, which is said before any run, or the run that is left alone fails.
    """
    trial = arena.folder / "mounted"
    disk = mount(trial, 1 << 20)
    unmount_all(trial)
    trial.rmdir()
    _drawn_from(arena, disk, only)
    alone = arena.job("alone")
    try:
        complete(alone)
    finally:
        alone.close()
    size = sum(path.stat().st_size for path in alone.checkpoint(arena.steps).rglob("*") if path.is_file())
    draw, number = random.Random(seed), 0
    bag: list[str] = []
    while number == 0 or not until():
        number += 1
        job, found = arena.job(f"round_{number}"), Round(number)
        disk = mount(job.run / "checkpoints", DISK * size + (1 << 20))
        try:
            _round(arena, job, found, _drawn_from(arena, disk, only), draw, until, bag)
            if not found.problems:
                found.problems += problems_of(alone, job, arena.steps)
        finally:
            job.close()
            if disk and found.problems:  # what is there goes with the disk
                shutil.copytree(job.run / "checkpoints", job.folder / "checkpoints")
            if disk:
                unmount_all(job.run / "checkpoints")
        yield found
        if not found.problems:
            shutil.rmtree(job.folder)


def _drawn_from(arena: Arena, disk: bool, only: Iterable[str]) -> list[Fault]:
    """The faults that are wanted and possible.

    Raises:
        TrialError: there is none; with what those that are wanted need.
    """
    wanted = [each for each in FAULTS if not only or each.name in only]
    possible = arena.possible(disk)
    if not any(each in possible for each in wanted):
        needs = "; ".join(f"{each.name}: {', '.join(each.needs)}" for each in wanted)
        raise TrialError(
            f"none of these faults can happen to this run here; they need {needs} (disk and network need root, hosts "
            "--hosts)"
        )
    return [each for each in wanted if each in possible]


def _has_come_to(job: TrialJob, step: int) -> bool:
    return job.step() >= step


def _round(
    arena: Arena, job: TrialJob, found: Round, faults: list[Fault], draw: random.Random, until: Callable[[], bool],
    bag: list[str],
) -> None:  # fmt: skip
    """One run, to its end or to the first thing that is not as it must be."""
    hook = {"type": "megatron.trials.inject:Orders", "options": {"folder": str(job.orders)}}
    extra = with_hook(arena.config, hook)
    job.start(extra)
    furthest = 0
    while True:
        target = furthest + arena.every + draw.randrange(arena.every)
        if not job.wait(partial(_has_come_to, job, target), f"step {target}"):
            break
        if until():
            job.finish()
            break
        if not bag:  # each kind once, in a new order, before any comes again
            bag += draw.sample([each.name for each in faults], len(faults))
        name = bag.pop()
        fault = next((each for each in faults if each.name == name), None)
        if fault is None:
            continue
        event = _happens(job, fault, draw, extra, arena.steps - 1)
        if event is None:
            continue
        furthest = max(job.step(), event.step)
        found.events.append(event)
        arena.tell(row(event))
        if event.problem:
            found.problems.append(f"{event.fault}: {event.problem}")
            return
    if job.status:
        found.problems.append(f"the run ended with status {job.status}. {job.tail()}")


def _happens(job: TrialJob, fault: Fault, draw: random.Random, extra: str, last: int) -> Event | None:
    """Let a fault happen and see what follows; None if there was no occasion."""
    if fault.loses and job.hosts is not None and not job.left:
        return None
    step, known, began = job.step(), len(job.events("restart", "start", "resume")), len(job.events())
    told = fault.act(job, draw)
    job.left -= fault.loses and bool(told)
    if not told:
        return None
    at, event = time.monotonic(), Event(fault.name, told, step)
    try:
        if fault.then == GOES_ON:
            _goes_on(job, fault, draw, event, at, began)
        else:
            _starts_again(job, fault, event, at, known, extra)
    except TrialError as error:
        event.problem = str(error)
    for order in job.orders.iterdir():  # nothing of this fault may come with the next one
        order.unlink(missing_ok=True)
    if event.problem == MISSED and step >= last - 2:  # it was at its end already
        return None
    return event


def _goes_on(job: TrialJob, fault: Fault, draw: random.Random, event: Event, at: float, began: int) -> None:
    def noticed() -> bool:
        # A disk that refuses the very last save ends the start, which is told as a failure of the run.
        return any(each["event"] in (fault.noticed, "restart") for each in job.events()[began:])

    if fault.noticed:
        if not job.wait(noticed, f"the event {fault.noticed}"):
            event.problem = f"the launcher ended with status {job.status}. {job.tail()}"
            return
        event.detected = time.monotonic() - at
    if fault.undo:
        fault.undo(job, draw)
    now = job.step()
    if not job.wait(lambda: job.step() > now or job.status == 0, "the next step"):
        event.problem = f"the launcher ended with status {job.status}. {job.tail()}"
        return
    event.recovered = time.monotonic() - at


def _starts_again(job: TrialJob, fault: Fault, event: Event, at: float, known: int, extra: str) -> None:
    def news() -> list[dict]:
        return job.events("restart", "start", "resume")[known:]

    if fault.then == AGAIN:
        job.finish()
        job.wait_until(lambda: not job.processes(), "the end of all its processes")
        event.detected, event.status = time.monotonic() - at, job.status
        if job.status == 0:  # it was at its end already
            return
        job.start(extra)
    else:
        if not job.wait(lambda: bool(news()), "a restart"):
            event.problem = f"the launcher ended with status {job.status}. {job.tail()}" if job.status else MISSED
            return
        event.detected = time.monotonic() - at
        event.status = next((each["status"] for each in news() if each["event"] == "restart"), None)
        if fault.undo:
            fault.undo(job, random.Random())

    def resumed() -> list[dict]:
        return [each for each in news() if each["event"] != "restart"]

    if not job.wait(lambda: bool(resumed()), "the next start"):
        event.problem = f"the launcher ended with status {job.status}. {job.tail()}"
        return
    begun = resumed()[-1]["step"]
    event.lost = max(event.step + 1 - begun, 0)
    if not job.wait(lambda: job.step() >= begun, f"step {begun}") and job.status:
        event.problem = f"the launcher ended with status {job.status}. {job.tail()}"
    event.recovered = time.monotonic() - at


def problems_of(alone: TrialJob, job: TrialJob, steps: int) -> list[str]:
    """In what a run that has ended differs from the one that was left alone, and what it has left behind."""
    found = []
    equality = compare(alone.checkpoint(steps), job.checkpoint(steps), alone.losses(), job.losses())
    if equality.different:
        found.append(
            f"{len(equality.different)} of {equality.tensors} tensors differ: {', '.join(equality.different[:3])}"
        )
    if equality.losses != steps or equality.loss:
        found.append(f"{equality.losses} of {steps} losses compared, they differ by up to {equality.loss:.2g}")
    read, expected = (batch_hashes(each.run / "ledger.jsonl") for each in (job, alone))
    if read != expected or sorted(read) != list(range(steps)):
        wrong = [step for step in range(steps) if read.get(step) != expected.get(step)]
        found.append(f"other batches were read in steps {wrong[:5]}")
    if job.processes():
        found.append(f"processes are left: {job.processes()}")
    left = list(job.run.glob(".credentials-*"))
    left += [path for path in job.temporary.iterdir() if not path.name.startswith("torchinductor_")]  # torch's cache
    left += [path for path in (job.run / "checkpoints").iterdir() if ".tmp-" in path.name or ".trash-" in path.name]
    if left:
        found.append(f"files are left: {', '.join(str(path) for path in left[:5])}")
    return found


HEAD = ("fault", "on", "after step", "detected in", "recovered in", "lost steps", "status")


def cells(event: Event) -> tuple[str, ...]:
    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.1f} s"

    status = "" if event.status is None else str(event.status)
    detected, recovered = seconds(event.detected), seconds(event.recovered)
    return (event.fault, event.told, str(event.step), detected, recovered, str(event.lost), status)


def row(event: Event) -> str:
    """One line about an event."""
    told = [f"{name} {cell}" for name, cell in zip(HEAD[2:], cells(event)[2:], strict=True) if cell]
    return f"{event.fault} ({event.told}): {', '.join(told)}" + (f": {event.problem}" if event.problem else "")
