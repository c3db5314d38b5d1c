"""A training run as a process of its own. Trials start it, watch it, damage it and start it again."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.format.durable import step_name, step_of
from megatron.installation import root
from megatron.report.jsonl import read_lines

MARK = "DEEPY_TRIAL"  # variable by which all processes of a job are known
LOOK = 0.05  # seconds between two polls
# exec: the launcher keeps this process id.
OWN_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
# Before a rate. A burst is longer than a packet of loopback, or none would pass.
SLOW_LINK = ("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "burst", "80kb", "latency", "2s", "rate")
PATIENCE = 1800.0  # seconds until a wait fails, on a busy machine too


def _variable(pid: int, name: str) -> list[str]:
    return [each.partition("=")[2] for each in fields(pid, "environ") if each.startswith(f"{name}=")]


class TrialError(RuntimeError):
    """A run did not behave as the trial needs. The message has its last lines."""


class TrialJob:
    """`deepy.py train.py ...` in a folder.

    Args:
        folder: has `run`, the run's directory, and `output.txt`, the launcher's output. `orders` is for the hook
            `inject.Orders`, and `tmp` for temporary files.
        ranks: number of processes, on each host if there are hosts.
        network: give the ranks a network namespace of their own. Needs root.
        hosts: hosts on which the run is tried, as in `tests/chaos/hosts.py`. None: this machine.
        spares: number of hosts that start unused and replace lost ones.
    """

    def __init__(
        self, folder: Path, words: Sequence[str], ranks: int, network: bool = False, hosts: Any = None, spares: int = 0
    ) -> None:
        self.network, self.hosts, self.spares = network, hosts, spares
        self.left = spares  # not yet used in this start of the launcher
        self.folder, self.run, self.output = folder, folder / "run", folder / "output.txt"
        self.words, self.ranks = list(words), ranks
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None
        self._cut = ""  # name of the disconnected host
        self.orders, self.temporary = folder / "orders", folder / "tmp"
        for each in (self.orders, self.temporary):
            each.mkdir(parents=True, exist_ok=True)

    def start(self, *overrides: str) -> None:
        top = root()
        where = ["--ranks", str(self.ranks)]
        if self.hosts is not None:
            (self.folder / "hosts").write_text(self.hosts.hostfile(self.ranks))
            where = ["--hostfile", str(self.folder / "hosts"), "--runner", self.hosts.runner]
        command = [sys.executable, str(top / "deepy.py"), *where, str(top / "train.py")]
        command += [*self.words, f"run.dir={self.run}", *overrides]
        if self.hosts is not None:
            command.append(f"launch.spares={self.spares}")
        elif self.network:
            command = [*OWN_NETWORK, *command]
        more = {} if self.hosts is None else self.hosts.variables
        self.left = self.spares
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI_"))}
        for name in ("RANK", "WORLD_SIZE", "JOB_CONFIG"):
            keep.pop(name, None)
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **keep, **more, MARK: self.mark, "TMPDIR": str(self.temporary)},
            )  # fmt: skip

    @property
    def world(self) -> int:
        return self.ranks if self.hosts is None else self.ranks * (len(self.hosts.names) - self.spares)

    @property
    def status(self) -> int | None:
        """The launcher's exit status, negative for a signal. None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def wait(self, until: Callable[[], bool], what: str) -> bool:
        """Whether a condition came true. False: the launcher ended first.

        Raises:
            TrialError: neither happened in time.
        """
        self.wait_until(lambda: until() or self.status is not None, what)
        return until()

    def expect(self, until: Callable[[], bool], what: str) -> None:
        """Wait for a condition.

        Raises:
            TrialError: the launcher ended first, or it did not happen in time.
        """
        if not self.wait(until, what):
            raise TrialError(f"the launcher ended with status {self.status}. {self.tail()}")

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Wait for a condition that may come true after the launcher's end.

        Raises:
            TrialError: it did not happen in time.
        """
        limit = time.monotonic() + PATIENCE
        while not done():
            if time.monotonic() > limit:
                raise TrialError(f"{what} has not come in {PATIENCE:.0f} s. {self.tail()}")
            time.sleep(LOOK)

    def finish(self) -> int:
        """Wait for the launcher's end. Returns its status."""
        self.wait_until(lambda: self.status is not None, "the end of the run")
        status = self.status
        assert status is not None
        return status

    def close(self) -> None:
        for pid in self.processes():
            kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    # ---- its processes

    def processes(self) -> list[int]:
        """Ids of all living processes of this job, whatever their process group."""
        mark = f"{MARK}={self.mark}"
        return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and mark in fields(entry, "environ")]

    def agents(self) -> list[int]:
        return [pid for pid in self.processes() if "--agent" in fields(pid, "cmdline")]

    def members(self) -> dict[int, int]:
        return {rank: pid for (rank, _), pid in self._members().items()}

    def on_host(self, agent: int) -> list[int]:
        """Process ids of an agent and its ranks."""
        return [agent, *(pid for (_, parent), pid in self._members().items() if parent == agent)]

    def _members(self) -> dict[tuple[int, int], int]:
        agents, found = set(self.agents()), dict[tuple[int, int], int]()
        for pid in self.processes():
            numbers = "".join(fields(pid, "stat")).rpartition(")")[2].split()
            if numbers and (parent := int(numbers[1])) in agents:
                found |= {(int(rank), parent): pid for rank in _variable(pid, "RANK")}
        return found

    # ---- its network

    def cut(self, draw: random.Random) -> str:
        """Disconnect a host, or on one machine all ranks. Returns its name, or "" on failure."""
        if self.hosts is not None:
            self._cut = draw.choice(self._used())
            self.hosts.cut(self._cut)
            return self._cut
        return "no packet passes" if self._loopback("ip", "link", "set", "lo", "down") else ""

    def join(self) -> str:
        if self.hosts is not None:
            self.hosts.join(self._cut)
            return self._cut
        return "joined" if self._loopback("ip", "link", "set", "lo", "up") else ""

    def slow(self, draw: random.Random, kilobits: int, seconds: float) -> str:
        """Slow down the network of a host, or of all ranks, for some seconds."""
        if self.hosts is not None:
            name = draw.choice(self._used())
            self.hosts.slow(name, kilobits)
            time.sleep(seconds)
            self.hosts.fast(name)
            return name
        if not self._loopback(*SLOW_LINK, f"{kilobits}kbit"):
            return ""
        time.sleep(seconds)
        self._loopback("tc", "qdisc", "del", "dev", "lo", "root")
        return "loopback"

    def _used(self) -> list[str]:
        places = {place.rpartition("/")[0] for pid in self.members().values() for place in _variable(pid, "JOB_PLACE")}
        return sorted(places) or self.hosts.names[:1]

    def _loopback(self, *command: str) -> bool:
        words = () if self.process is None else ("nsenter", "-t", str(self.process.pid), "-n", *command)
        return bool(words) and subprocess.run(words, capture_output=True).returncode == 0

    # ---- what it leaves

    def checkpoints(self) -> list[int]:
        """Steps of its checkpoints in order, damaged ones included."""
        folder = self.run / "checkpoints"
        found = [step_of(path) for path in folder.iterdir()] if folder.is_dir() else []
        return sorted(step for step in found if step is not None)

    def checkpoint(self, step: int) -> Path:
        return self.run / "checkpoints" / step_name(step)

    def step(self) -> int:
        """Last step in its metrics, -1 before the first."""
        last = -1
        for record in self._lines("metrics.jsonl"):
            last = record["step"] if "loss" in record else last
        return last

    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self._lines("metrics.jsonl") if "loss" in line}

    def events(self, *names: str) -> list[dict]:
        """Entries of its ledger, only of these events if names are given."""
        return [each for each in self._lines("ledger.jsonl") if not names or each["event"] in names]

    def tail(self, lines: int = 20) -> str:
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        return "Its last lines:\n" + "\n".join(text.splitlines()[-lines:])

    def _lines(self, name: str) -> Iterator[dict]:
        path = self.run / name
        try:
            yield from read_lines(path) if path.exists() else ()
        except (ValueError, OSError):  # being written or just replaced: the next poll reads it
            return


def fields(pid: int | str, name: str) -> list[str]:
    """Zero-terminated parts of a file of /proc/<pid>. Empty: the process has ended, or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").split("\0")
    except OSError:
        return []


def kill(pid: int, number: int) -> bool:
    """Send a signal. Returns whether the process existed."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
