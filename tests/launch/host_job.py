"""Something that is started on the login host of a `Cluster` and runs on the others: deepy.py, srun, mpirun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.launch.namespaces import Cluster, wait_for
from tests.launch.running import CONFIG
from tests.paths import ROOT

DEEPY = (sys.executable, str(ROOT / "deepy.py"))
OURS = ("deepy.py", "gloo_worker", "train.py", "torch.distributed.run")
FORWARD = "launch.forward=[NOTES, GLOO_TIMEOUT, OMP_NUM_THREADS, PYTHON*]"
_NEEDS = {"pdsh": "pdsh", "openmpi": "mpirun.openmpi", "mpich": "mpiexec.hydra"}


def skip_without(runner: str) -> None:
    """Skip the test where a runner's program is not installed."""
    program = _NEEDS.get(runner)
    if program and not shutil.which(program):
        pytest.skip(f"needs {program} (tests/launch/debian-packages)")


def looping(
    folder: Path,
    *own: str,
    options: Sequence[str] = (),
    overrides: Sequence[str] = (),
    hostfile: bool = True,
    slots: int = 1,
) -> list[str]:
    """The command that starts tests/launch/gloo_worker.py by deepy.py, `slots` ranks on each host of the cluster."""
    (folder / "a.yml").write_text(CONFIG)
    (folder / "hosts").write_text(f"node1 slots={slots}\nnode2 slots={slots}\n")
    hosts = ("--hostfile", "hosts") if hostfile else ()
    worker = str(ROOT / "tests" / "launch" / "gloo_worker.py")
    return [*DEEPY, *hosts, *options, worker, "a.yml", FORWARD, *overrides, "--", *(own or ("loop",))]


class HostJob:
    """A running command.

    Args:
        folder: where it runs. Notes of gloo_worker are in `notes` there.
        host: on which it is started.
        environment: where not that of the tests.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        command: Sequence[str],
        host: str = "login",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster, self.notes = cluster, folder / "notes"
        self.notes.mkdir(exist_ok=True)
        self.environment = {
            **(environment or os.environ),
            "NOTES": str(self.notes),
            "OMP_NUM_THREADS": "1",
            "GLOO_TIMEOUT": "600",
            "PYTHONPATH": str(ROOT),
        }
        self.process = subprocess.Popen(
            cluster.enter(host, command, folder),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, path: Path, timeout: float = 300.0) -> Path:
        """Until a file is there."""
        wait_for(lambda: path.exists() or self.process.poll() is not None, timeout, lambda: f"no {path}")
        assert path.exists(), f"no {path}: {self.process.communicate(timeout=10)}"
        return path

    def note(self, name: str) -> dict:
        return json.loads(self.wait_for(self.notes / name).read_text())

    def up(self, ranks: int) -> list[dict]:
        """Notes of the ranks when they have met."""
        return [self.note(f"up.{rank}") for rank in range(ranks)]

    def saved(self, ranks: int) -> list[str]:
        """The signal at which each rank has saved."""
        paths = [self.notes / f"saved.{rank}" for rank in range(ranks)]
        return [path.read_text() if path.exists() else "" for path in paths]

    def launcher(self) -> int:
        """The process id of deepy.py itself, seen from here (nsenter forks into the host)."""
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            for entry in filter(str.isdigit, os.listdir("/proc")):
                try:
                    words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                    variables = Path("/proc", entry, "environ").read_bytes().split(b"\0")
                except OSError:  # it ended while we looked
                    continue
                mine = words[0] == DEEPY[0].encode() and b"deepy.py" in words[1] and b"--agent" not in words
                if mine and f"NOTES={self.notes}".encode() in variables:
                    return int(entry)
            time.sleep(0.05)
        raise AssertionError("no launcher")

    def finish(self, timeout: float = 300.0) -> tuple[int, str, str]:
        """(status, standard output, standard error) at the end."""
        out, error = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, error

    def nothing_left(self, *hosts: str, within: float = 200.0) -> bool:
        """Whether no process of ours is, soon, on the given hosts (by default the living ones)."""
        names = hosts or tuple(self.cluster.inits)
        end = time.monotonic() + within
        while left := [line for name in names for line in self.cluster.processes(name, *OURS)]:
            if time.monotonic() > end:
                print(*left, sep="\n")
                return False
            time.sleep(0.2)
        return True

    def end(self) -> None:
        """End what a test that failed has left."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for name in tuple(self.cluster.inits):
            for line in self.cluster.processes(name, *OURS):
                self.cluster.run(name, ["kill", "-9", line.split()[0]])
        self.process.communicate()
