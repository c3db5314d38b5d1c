"""Faults of a run, one function each: it damages a `TrialJob` and returns a description of its target."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .inject import CLOCK, DIE_IN_SAVE, FLIP, FLIP_MASTER, FLIP_MOMENT, GRADIENT, NAN, SLOW_DISK, SPIKE
from .job import TrialJob, kill

KEPT = 4  # checkpoints that a run keeps
RESTART, AGAIN, GOES_ON = "restarted by the launcher", "started again by hand", "continues"
Act = Callable[[TrialJob, random.Random], str]


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: in tables.
        act: injects it, and returns its target.
        then: expected consequence: `RESTART`, `AGAIN` or `GOES_ON`.
        noticed: the expected event in the ledger where the run continues. None: it need not notice.
        undo: ends it once it was noticed, where it does not end by itself.
        needs: requirements of the run. `"ranks"`: several. `"replicas"`: ranks with the same bits. `"disk"`: a file
            system of its own for checkpoints. `"network"`: a network of its own. `"masters"`: master weights.
            `"hosts"`: several.
        loses: whether a host is lost with it.
    """

    name: str
    act: Act
    then: str
    noticed: str | None = None
    undo: Act | None = None
    needs: tuple[str, ...] = ()
    loses: bool = False


def _rank(job: TrialJob, draw: random.Random) -> tuple[str, int]:
    """Name and process id of a living rank."""
    members = job.members()
    rank = draw.choice(sorted(members)) if members else -1
    return f"rank {rank}", members.get(rank, -1)


def _agent(job: TrialJob, draw: random.Random) -> tuple[str, int]:
    return "agent", next(iter(job.agents()), -1)


def _launcher(job: TrialJob, draw: random.Random) -> tuple[str, int]:
    return "launcher", job.process.pid if job.process is not None else -1


def _signal(who: Callable[[TrialJob, random.Random], tuple[str, int]], number: signal.Signals) -> Act:
    def act(job: TrialJob, draw: random.Random) -> str:
        name, pid = who(job, draw)
        return name if pid > 0 and kill(pid, number) else ""

    return act


def _term_in_save(job: TrialJob, draw: random.Random) -> str:
    """Send TERM while a checkpoint is being written, if one is within a minute."""
    folder, limit = job.run / "checkpoints", time.monotonic() + 60
    while time.monotonic() < limit and job.status is None:
        if any(folder.glob("*.tmp-*")):
            return _signal(_launcher, signal.SIGTERM)(job, draw)
    return ""


def _pause(who: Callable[[TrialJob, random.Random], tuple[str, int]]) -> Act:
    """Stop a process, and continue it later."""

    def act(job: TrialJob, draw: random.Random) -> str:
        name, pid = who(job, draw)
        if pid < 0 or not kill(pid, signal.SIGSTOP):
            return ""
        seconds = draw.uniform(0.2, 3.0)
        time.sleep(seconds)
        kill(pid, signal.SIGCONT)
        return f"{name}, {seconds:.1f} s"

    return act


def _order(kind: str) -> Act:
    def act(job: TrialJob, draw: random.Random) -> str:
        rank = draw.randrange(job.world)
        (job.orders / f"{kind}.{rank}").touch()
        return f"rank {rank}"

    return act


# ---- files


def _files(job: TrialJob, step: int) -> list[Path]:
    return sorted(path for path in job.checkpoint(step).rglob("*") if path.is_file() and path.stat().st_size)


def damage(file: Path, draw: random.Random, how: str) -> str:
    """Flip a bit of a file, truncate it, or delete it."""
    size = file.stat().st_size
    if how == "delete":
        file.unlink()
        return f"{file.name} deleted"
    if how == "cut":
        os.truncate(file, draw.randrange(size))
        return f"{file.name} cut"
    at, bit = draw.randrange(size), draw.randrange(8)
    with open(file, "rb+") as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 1 << bit]))
    return f"bit {bit} of byte {at} of {file.name}"


def _damaged(how: str, places: tuple[int, ...], then: Act | None) -> Act:
    """Damage a file of checkpoints, given by their places from the newest (-1) on. `then` is another fault at the
    same time."""

    def act(job: TrialJob, draw: random.Random) -> str:
        steps = job.checkpoints()
        if len(steps) <= max(-place for place in places):  # one must be left
            return ""
        said = []
        if then is not None:  # first: no save may come between
            said.append(then(job, draw))
            if not said[0]:
                return ""
        for place in places:
            said.append(f"step {steps[place]}: {damage(draw.choice(_files(job, steps[place])), draw, how)}")
        return "; ".join(said)

    return act


def _both(*acts: Act) -> Act:
    def act(job: TrialJob, draw: random.Random) -> str:
        return "; ".join(filter(None, [each(job, draw) for each in acts]))

    return act


# ---- the disk of checkpoints


def mount(folder: Path, size: int) -> bool:
    """Mount a small file system on a folder. False where that is not permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    return _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))


def unmount(folder: Path) -> bool:
    """Unmount the uppermost file system. False where there is none."""
    return _run("umount", "-l", str(folder))


def unmount_all(folder: Path) -> None:
    """Unmount all, also what a fault that was not undone left on top."""
    while unmount(folder):
        pass


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def _fill(job: TrialJob, draw: random.Random) -> str:
    """Leave no room for a checkpoint. Waits while an older one is being deleted, since the next could use its room."""
    folder, limit = job.run / "checkpoints", time.monotonic() + 60
    while time.monotonic() < limit and job.status is None:
        _take_all(folder / "filler", draw.randrange(4096))
        if len(job.checkpoints()) <= KEPT and not any(folder.glob("*.t*-*")):  # no draft, no deletion in progress
            return "no room"
        _empty(job, draw)
        time.sleep(0.05)
    return ""


def _take_all(file: Path, left: int) -> None:
    with open(file, "wb", buffering=0) as handle:
        try:
            while True:
                handle.write(b"x" * 4096)
        except OSError:
            pass
        handle.truncate(max(handle.tell() - left, 0))


def _empty(job: TrialJob, draw: random.Random) -> str:
    (job.run / "checkpoints" / "filler").unlink()
    return "room again"


def _forbid(job: TrialJob, draw: random.Random) -> str:
    folder = str(job.run / "checkpoints")
    done = _run("mount", "--bind", folder, folder) and _run("mount", "-o", "remount,ro,bind", folder)
    return "read-only" if done else ""


def _allow(job: TrialJob, draw: random.Random) -> str:
    return "writable" if unmount(job.run / "checkpoints") else ""


# ---- the network between ranks, and hosts


def _cut_for_a_while(job: TrialJob, draw: random.Random) -> str:
    who = job.cut(draw)
    if not who:
        return ""
    seconds = draw.uniform(0.5, 4.0)
    time.sleep(seconds)
    job.join()
    return f"{who}, {seconds:.1f} s"


def _slow_network(job: TrialJob, draw: random.Random) -> str:
    rate, seconds = draw.randrange(200, 2000), draw.uniform(1.0, 4.0)
    who = job.slow(draw, rate, seconds)
    return f"{who}, {rate} kbit/s, {seconds:.1f} s" if who else ""


def _lose_host(job: TrialJob, draw: random.Random) -> str:
    agents = sorted(job.agents())
    if not agents:
        return ""
    ended = [kill(pid, signal.SIGKILL) for pid in job.on_host(draw.choice(agents))]
    return f"{len(ended)} processes" if any(ended) else ""


KILL_RANK, KILL_AGENT = _signal(_rank, signal.SIGKILL), _signal(_agent, signal.SIGKILL)
KILL_LAUNCHER = _signal(_launcher, signal.SIGKILL)
FAULTS = (
    Fault("rank killed", KILL_RANK, RESTART),
    Fault("agent killed", KILL_AGENT, RESTART, loses=True),
    Fault("launcher killed", KILL_LAUNCHER, AGAIN),
    Fault("TERM to the launcher", _signal(_launcher, signal.SIGTERM), AGAIN),
    Fault("TERM during a save", _term_in_save, AGAIN),
    Fault("rank killed during a save", _order(DIE_IN_SAVE), RESTART),
    Fault("rank stopped for a while", _pause(_rank), GOES_ON),
    Fault("agent stopped for a while", _pause(_agent), GOES_ON),
    Fault("launcher stopped for a while", _pause(_launcher), GOES_ON),
    Fault("rank stopped for good", _signal(_rank, signal.SIGSTOP), RESTART, needs=("ranks",)),
    Fault("newest checkpoint: bit flipped, and kill", _damaged("flip", (-1,), KILL_RANK), RESTART),
    Fault("newest checkpoint: file cut, and kill", _damaged("cut", (-1,), KILL_RANK), RESTART),
    Fault("newest checkpoint: file deleted, and kill", _damaged("delete", (-1,), KILL_RANK), RESTART),
    Fault("two newest checkpoints: bits flipped, and kill", _damaged("flip", (-1, -2), KILL_RANK), RESTART),
    Fault("older checkpoint: bit flipped", _damaged("flip", (-2,), None), GOES_ON),
    Fault("older checkpoint: file cut", _damaged("cut", (-2,), None), GOES_ON),
    Fault("NaN in a gradient", _order(NAN), GOES_ON, noticed="replay"),
    Fault("spike of a gradient", _order(SPIKE), GOES_ON, noticed="replay"),
    Fault("bit of a summed gradient flipped", _order(GRADIENT), RESTART, needs=("replicas",)),
    Fault("bit of a weight flipped", _order(FLIP), RESTART),
    Fault("bit of a master weight flipped", _order(FLIP_MASTER), RESTART, needs=("masters",)),
    Fault("bit of a moment flipped", _order(FLIP_MOMENT), RESTART),
    Fault("full disk", _fill, GOES_ON, noticed="checkpoint_failed", undo=_empty, needs=("disk",)),
    Fault("read-only disk", _forbid, GOES_ON, noticed="checkpoint_failed", undo=_allow, needs=("disk",)),
    Fault("slow disk", _order(SLOW_DISK), GOES_ON),
    Fault("clock jumps", _order(CLOCK), GOES_ON),
    Fault("network cut for a while", _cut_for_a_while, GOES_ON, needs=("ranks", "network")),
    Fault(
        "network cut until it is noticed",
        lambda job, draw: job.cut(draw),
        RESTART,
        undo=lambda job, draw: job.join(),
        needs=("ranks", "network"),
    ),
    Fault("slow network", _slow_network, GOES_ON, needs=("ranks", "network")),
    Fault("host lost", _lose_host, RESTART, needs=("hosts",), loses=True),
    Fault("two at once: slow disk, and rank killed", _both(_order(SLOW_DISK), KILL_RANK), RESTART),
    Fault("two at once: clock jumps, and agent killed", _both(_order(CLOCK), KILL_AGENT), RESTART, loses=True),
    Fault("two at once: NaN, and rank killed", _both(_order(NAN), KILL_RANK), RESTART),
    Fault("two at once: rank and agent killed", _both(KILL_RANK, KILL_AGENT), RESTART, loses=True),
    Fault("two at once: rank and launcher killed", _both(KILL_RANK, KILL_LAUNCHER), AGAIN),
)
