"""A training run as a process of its own, with its launcher, agents and ranks to lay hands on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron.checkpoint.format.names import step_name, step_of
from megatron.installation import root
from megatron.report.jsonl import read_lines

from .hosts import WORD, TrialHosts

MARK = "DEEPY_TRIAL"  # variable by which all processes of a job are known
LOOK = 0.05  # seconds between two looks
# The command that follows becomes this process: its id stays.
OWN_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
# Before a rate. A burst is longer than a packet of loopback, or none would pass.
SLOW_LINK = ("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "burst", "80kb", "latency", "2s", "rate")
PATIENCE = 1800.0  # seconds in which something must happen, however busy the machine


class TrialError(RuntimeError):
    """A run did not do what a trial needs of it; the message has what it said last."""


class TrialJob:
    """`deepy.py train.py ...` in a folder, which is started, watched, hurt and started again.

    Args:
        folder: `run` in it is the run's directory, `output.txt` what the launcher says, `orders` for the hook of that
            name (`inject`), `tmp` its folder for temporary files.
        words: configuration files and overrides.
        ranks: processes.
        network: whether ranks talk in a network namespace of the job's own, which only root may make.
        hosts: on which `ranks` run each, but for `spares` of them, which take the place of those that are lost.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        ranks: int,
        network: bool = False,
        hosts: TrialHosts | None = None,
        spares: int = 0,
    ) -> None:
        self.network, self.hosts, self.spares = network, hosts, spares
        self.left = spares  # spares that have not been needed in this start of the launcher
        self.folder, self.run, self.output = folder, folder / "run", folder / "output.txt"
        self.words, self.ranks = list(words), ranks
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None
        self._cut = ""  # the host that is cut off
        self.orders, self.temporary = folder / "orders", folder / "tmp"
        for each in (self.orders, self.temporary):
            each.mkdir(parents=True, exist_ok=True)

    def start(self, *overrides: str) -> None:
        """Start the launcher."""
        top = root()
        where = ["--ranks", str(self.ranks)] if self.hosts is None else self._on_hosts(self.hosts)
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

    def _on_hosts(self, hosts: TrialHosts) -> list[str]:
        file = self.folder / "hosts"
        file.write_text(hosts.hostfile(self.ranks))
        return ["--hostfile", str(file), "--runner", WORD]

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.ranks if self.hosts is None else self.ranks * (len(self.hosts.names) - self.spares)

    @property
    def status(self) -> int | None:
        """The launcher's exit status (negative for a signal), None while it lives."""
        assert self.process is not None
        return self.process.poll()

    def wait(self, until: Callable[[], bool], what: str) -> bool:
        """Whether something has come about; False if the launcher ended before.

        Raises:
            TrialError: neither happens.
        """
        limit = time.monotonic() + PATIENCE
        while not until():
            if self.status is not None:
                return until()
            if time.monotonic() > limit:
                raise TrialError(f"{what} has not come in {PATIENCE:.0f} s. {self.tail()}")
            time.sleep(LOOK)
        return True

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Wait for something that may come after the launcher's end.

        Raises:
            TrialError: it does not come.
        """
        limit = time.monotonic() + PATIENCE
        while not done():
            if time.monotonic() > limit:
                raise TrialError(f"{what} has not come in {PATIENCE:.0f} s. {self.tail()}")
            time.sleep(LOOK)

    def finish(self) -> int:
        """Wait for the launcher's end; its status."""
        self.wait_until(lambda: self.status is not None, "the end of the run")
        status = self.status
        assert status is not None
        return status

    def close(self) -> None:
        """End everything that is left."""
        for pid in self.processes():
            kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    # ---- its processes

    def processes(self) -> list[int]:
        """Ids of all living processes of this job, wherever they have got to."""
        mark, found = f"{MARK}={self.mark}".encode(), []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and mark in _read(f"/proc/{entry}/environ").split(b"\0"):
                found.append(int(entry))
        return found

    def agents(self) -> list[int]:
        """Ids of the agents."""
        return [pid for pid in self.processes() if b"--agent" in _read(f"/proc/{pid}/cmdline").split(b"\0")]

    def members(self) -> dict[int, int]:
        """Process id by rank."""
        return {rank: pid for (rank, _), pid in self._members().items()}

    def on_host(self, agent: int) -> list[int]:
        """Process ids of an agent and its ranks."""
        return [agent, *(pid for (_, parent), pid in self._members().items() if parent == agent)]

    def _members(self) -> dict[tuple[int, int], int]:
        """Process id by rank and agent."""
        agents, found = set(self.agents()), {}
        for pid in self.processes():
            fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
            if fields and int(fields[1]) in agents:
                for variable in _read(f"/proc/{pid}/environ").split(b"\0"):
                    if variable.startswith(b"RANK="):
                        found[int(variable[5:]), int(fields[1])] = pid
        return found

    # ---- its network

    def cut(self, draw: random.Random) -> str:
        """Cut a host off, or where there is one alone, the ranks from each other; who it was, "" if that failed."""
        if self.hosts is not None:
            self._cut = draw.choice(self._used())
            self.hosts.cut(self._cut)
            return self._cut
        return "no packet passes" if self._loopback("ip", "link", "set", "lo", "down") else ""

    def join(self) -> str:
        """Undo it."""
        if self.hosts is not None:
            self.hosts.join(self._cut)
            return self._cut
        return "joined" if self._loopback("ip", "link", "set", "lo", "up") else ""

    def slow(self, draw: random.Random, kilobits: int, seconds: float) -> str:
        """Let the network of a host, or of all ranks, be slow for a while."""
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
        """Names of hosts that have ranks now."""
        places = (
            variable.partition(b"=")[2].decode().rpartition("/")[0]
            for pid in self.members().values()
            for variable in _read(f"/proc/{pid}/environ").split(b"\0")
            if variable.startswith(b"JOB_PLACE=")
        )
        assert self.hosts is not None
        return sorted(set(places)) or self.hosts.names[:1]

    def _loopback(self, *command: str) -> bool:
        words = () if self.process is None else ("nsenter", "-t", str(self.process.pid), "-n", *command)
        return bool(words) and subprocess.run(words, capture_output=True).returncode == 0

    # ---- what it leaves

    def checkpoints(self) -> list[int]:
        """Steps of its checkpoints, in order; they may be damaged."""
        folder = self.run / "checkpoints"
        found = [step_of(path) for path in folder.iterdir()] if folder.is_dir() else []
        return sorted(step for step in found if step is not None)

    def checkpoint(self, step: int) -> Path:
        return self.run / "checkpoints" / step_name(step)

    def step(self) -> int:
        """The last step that is in its metrics; -1 if none is."""
        last = -1
        for record in self._lines("metrics.jsonl"):
            last = record["step"] if "loss" in record else last
        return last

    def losses(self) -> dict[int, float]:
        """The training loss of each step."""
        return {line["step"]: line["loss"] for line in self._lines("metrics.jsonl") if "loss" in line}

    def events(self, *names: str) -> list[dict]:
        """Entries of its ledger, of these events only if there are names."""
        return [each for each in self._lines("ledger.jsonl") if not names or each["event"] in names]

    def tail(self, lines: int = 20) -> str:
        """The end of what was said."""
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        return "It said last:\n" + "\n".join(text.splitlines()[-lines:])

    def _lines(self, name: str) -> Iterator[dict]:
        path = self.run / name
        try:
            yield from read_lines(path) if path.exists() else ()
        except (ValueError, OSError):  # it is being written, or was just replaced: the next look sees it
            return


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # it has ended, or belongs to somebody else
        return b""


def kill(pid: int, number: int) -> bool:
    """Whether the process was there to get the signal."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
