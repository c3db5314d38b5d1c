"""Inject faults, drawn from a seed, into a run until it ends. Its end must equal that of an undisturbed run."""

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from megatron.config import Config
from megatron.config.problems import counted
from megatron.report.ledger import batch_hashes
from megatron.trials.resume import compare

from .faults import AGAIN, FAULTS, GOES_ON, KEPT, Fault, mount, unmount_all
from .job import OWN_NETWORK, SLOW_LINK, TrialError, TrialJob
from .resume import complete, with_hook

MISSED = "the run ended without noticing it"
SPARES = 8  # hosts that may be lost during one start of the launcher
DISK = 24  # capacity of the small disk, in checkpoints


@dataclass
class Event:
    """One fault and its consequences. Times are seconds after the fault.

    Attributes:
        `told`: the rank, process, file or host that it hit.
        step: last step logged before it.
        detected: until the launcher ended the start, or the ledger had the event. None where nothing has to notice.
        recovered: until the next step was logged.
        lost: number of steps done again.
        status: of the failed start.
        problem: the expectation that was not met.
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
    """One run from beginning to end: its faults, and the differences found at its end."""

    number: int
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Arena:
    """Settings that all rounds share."""

    folder: Path
    words: Sequence[str]  # configuration file and overrides
    config: Config
    ranks: int  # number of processes, per host where there are several
    steps: int
    every: int
    report: Callable[[str], None]  # called with a line about each fault
    hosts: Any = None  # hosts to try it on, `SPARES` of them spare, as in `tests/chaos/hosts.py`. None: this machine.

    def job(self, name: str) -> TrialJob:
        words = [*self.words, *overrides(self.steps, self.every)]
        network = self.hosts is None and own_network()
        return TrialJob(self.folder / name, words, self.ranks, network, self.hosts, SPARES if self.hosts else 0)

    def possible(self, disk: bool) -> list[Fault]:
        zero, layout = self.config.zero.stage, self.config.parallel
        ranks = self.ranks * (len(self.hosts.names) - SPARES if self.hosts else 1)
        replicas = zero == 0 and ranks > layout.tensor * layout.columns * layout.pipeline * layout.context
        network = self.hosts is not None or own_network()
        has = {"ranks": ranks > 1, "replicas": replicas, "masters": zero > 0, "disk": disk, "network": network}
        has["hosts"] = self.hosts is not None
        return [each for each in FAULTS if all(has[need] for need in each.needs)]


@cache
def own_network() -> bool:
    """Whether a job can have a network namespace of its own here, and it can be made slow."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "tc"))):
        return False
    return subprocess.run((*OWN_NETWORK, *SLOW_LINK, "1mbit"), capture_output=True).returncode == 0


def overrides(steps: int, every: int) -> list[str]:
    """Settings with which a run notices faults soon, and resumes by itself."""
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
    """Yield rounds as they end, until `until` says so.

    Args:
        until: asked before each fault. Once true, the last run may finish.
        only: names of faults. All possible ones by default.

    Raises:
        TrialError: no fault is possible (raised before any run), or the undisturbed run fails.
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
            if disk and found.problems:  # unmounting would lose them
                shutil.copytree(job.run / "checkpoints", job.folder / "checkpoints")
            if disk:
                unmount_all(job.run / "checkpoints")
        yield found
        if not found.problems:
            shutil.rmtree(job.folder)


def _drawn_from(arena: Arena, disk: bool, only: Iterable[str]) -> list[Fault]:
    """Faults that are both wanted and possible.

    Raises:
        TrialError: there is none. The message lists their needs.
    """
    wanted = [each for each in FAULTS if not only or each.name in only]
    possible = arena.possible(disk)
    if not any(each in possible for each in wanted):
        needs = "; ".join(f"{each.name}: {', '.join(each.needs)}" for each in wanted)
        raise TrialError(f"none of these faults can happen to this run. They need {needs} (disk and network need root)")
    return [each for each in wanted if each in possible]


def _round(
    arena: Arena, job: TrialJob, found: Round, faults: list[Fault], draw: random.Random, until: Callable[[], bool],
    bag: list[str],
) -> None:  # fmt: skip
    """One run, to its end or to the first problem."""
    hook = {"type": "megatron.trials.inject:Orders", "options": {"folder": str(job.orders)}}
    extra = with_hook(arena.config, hook)
    job.start(extra)
    furthest = 0
    while True:
        target = furthest + arena.every + draw.randrange(arena.every)
        if not job.wait(lambda target=target: job.step() >= target, f"step {target}"):  # type: ignore[misc]
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
        arena.report(row(event))
        if event.problem:
            found.problems.append(f"{event.fault}: {event.problem}")
            return
    if job.status:
        found.problems.append(f"the run ended with status {job.status}. {job.tail()}")


def _happens(job: TrialJob, fault: Fault, draw: random.Random, extra: str, last: int) -> Event | None:
    """Inject a fault and follow its consequences. None: there was no occasion."""
    if fault.loses and job.hosts is not None and not job.left:
        return None
    step, known, began = job.step(), len(job.events("restart", "start", "resume")), len(job.events())
    target = fault.act(job, draw)
    job.left -= fault.loses and bool(target)
    if not target:
        return None
    at, event = time.monotonic(), Event(fault.name, target, step)
    try:
        if fault.then == GOES_ON:
            _goes_on(job, fault, draw, event, at, began)
        else:
            _starts_again(job, fault, event, at, known, extra)
    except TrialError as error:
        event.problem = str(error)
    for order in job.orders.iterdir():  # an order that was not carried out must not add to the next fault
        order.unlink(missing_ok=True)
    if event.problem == MISSED and step >= last - 2:  # the run was at its end already
        return None
    return event


def _goes_on(job: TrialJob, fault: Fault, draw: random.Random, event: Event, at: float, began: int) -> None:
    def noticed() -> bool:
        # A disk that refuses the very last save ends the start, which the ledger has as a restart.
        return any(each["event"] in (fault.noticed, "restart") for each in job.events()[began:])

    if fault.noticed:
        job.expect(noticed, f"the event {fault.noticed}")
        event.detected = time.monotonic() - at
    if fault.undo:
        fault.undo(job, draw)
    now = job.step()
    job.expect(lambda: job.step() > now or job.status == 0, "the next step")
    event.recovered = time.monotonic() - at


def _starts_again(job: TrialJob, fault: Fault, event: Event, at: float, known: int, extra: str) -> None:
    def news() -> list[dict]:
        return job.events("restart", "start", "resume")[known:]

    if fault.then == AGAIN:
        job.finish()
        job.wait_until(lambda: not job.processes(), "the end of all its processes")
        event.detected, event.status = time.monotonic() - at, job.status
        if job.status == 0:  # the run was at its end already
            return
        job.start(extra)
    else:
        if not job.wait(lambda: bool(news()), "a restart") and not job.status:
            raise TrialError(MISSED)
        job.expect(lambda: bool(news()), "a restart")
        event.detected = time.monotonic() - at
        event.status = next((each["status"] for each in news() if each["event"] == "restart"), None)
        if fault.undo:
            fault.undo(job, random.Random())

    def resumed() -> list[dict]:
        return [each for each in news() if each["event"] != "restart"]

    job.expect(lambda: bool(resumed()), "the next start")
    begun = resumed()[-1]["step"]
    event.lost = max(event.step + 1 - begun, 0)
    job.expect(lambda: job.step() >= begun or job.status == 0, f"step {begun}")
    event.recovered = time.monotonic() - at


def problems_of(alone: TrialJob, job: TrialJob, steps: int) -> list[str]:
    """Differences between an ended run and the undisturbed one, and whatever it left behind."""
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


def row(event: Event) -> str:
    seconds = {"detected in": event.detected, "recovered in": event.recovered}
    parts = [f"after step {event.step}"]
    parts += [f"{name} {value:.1f} s" for name, value in seconds.items() if value is not None]
    parts += [f"lost steps {event.lost}", *([] if event.status is None else [f"status {event.status}"])]
    return f"{event.fault} ({event.told}): {', '.join(parts)}" + (f": {event.problem}" if event.problem else "")


HEAD = ("fault", "times", "detected in", "recovered in", "lost steps", "status")


def where(config: Config, ranks: int, hosts: int) -> str:
    parallel, words = config.parallel, [f"ZeRO {config.zero.stage}"]
    for name in ("tensor", "columns", "depth", "pipeline", "context", "expert"):
        if (size := getattr(parallel, name)) > 1:
            words.append(f"{name} {size}")
    words.append(counted(ranks * hosts, "rank"))
    return ", ".join([*words, *([counted(hosts, "host")] if hosts > 1 else [])])


def table(rounds: Sequence[Round]) -> str:
    """A row per kind of fault (seconds: median and maximum), and a sentence about all."""
    problems = [f"run {each.number}: {problem}" for each in rounds for problem in each.problems]
    return "\n".join([*aligned([HEAD, *rows(rounds)]), "", summary(rounds), *problems])


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first row is its head."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def rows(rounds: Sequence[Round]) -> list[tuple[str, ...]]:
    events = [event for each in rounds for event in each.events]
    by_name = {fault.name: [event for event in events if event.fault == fault.name] for fault in FAULTS}
    return [_row(name, found) for name, found in by_name.items() if found]


def summary(rounds: Sequence[Round]) -> str:
    events = [event for each in rounds for event in each.events]
    good = sum(not each.problems for each in rounds)
    return (
        f"{len(events)} faults in {len(rounds)} runs, {sum(event.lost for event in events)} steps done again. "
        f"{good} of {len(rounds)} runs ended equal in every bit, with every batch read once and nothing left behind"
    )


def _row(name: str, events: Sequence[Event]) -> tuple[str, ...]:
    lost = [event.lost for event in events]
    status = sorted({str(event.status) for event in events if event.status is not None})
    detected = _seconds([event.detected for event in events])
    recovered = _seconds([event.recovered for event in events])
    steps = str(lost[0]) if len(set(lost)) == 1 else f"{min(lost)}-{max(lost)}"
    return name, str(len(events)), detected, recovered, steps, ", ".join(status)


def _seconds(values: Sequence[float | None]) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return ""
    return f"{there[0]:.1f}" if len(there) == 1 else f"{median(there):.1f} ({max(there):.1f})"
