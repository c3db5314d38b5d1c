"""Starting deepy.py from tests, and checking what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.paths import ROOT

WORKER = ROOT / "tests" / "launch" / "worker.py"
CONFIG = """
run: {name: launched}
model: {layers: "(attention/mlp) x2", hidden_size: 32, attention: {heads: 2}, vocab_size: 64}
training: {steps: 4, micro_batch_size: 2, sequence_length: 16}
optimizer: {lr: 1.0e-3}
data: {synthetic: copy}
"""


class Job:
    """A deepy.py of its own, in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        ranks: int = 2,
        options: tuple[str, ...] = (),
        overrides: tuple[str, ...] = (),
        without: tuple[str, ...] = (),
        stdout: int = subprocess.PIPE,
    ) -> None:
        self.folder, self.notes, self.heard = folder, folder / "notes", b""
        self.notes.mkdir(exist_ok=True)
        (folder / "a.yml").write_text(CONFIG)
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "OMPI_", "PMI_")) and name != "RANK"
        }
        own = ["--", *words] if words else []
        self.command = [
            sys.executable,
            str(ROOT / "deepy.py"),
            "--ranks",
            str(ranks),
            *options,
            str(WORKER),
            "a.yml",
            *overrides,
            *own,
        ]
        self.environment = {"OMP_NUM_THREADS": "1", **clean, "NOTES": str(self.notes)}
        for name in without:
            self.environment.pop(name, None)
        self.process = subprocess.Popen(
            self.command,
            cwd=folder,
            env=self.environment,
            stdout=stdout,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def note(self, name: str, timeout: float = 300.0) -> object:
        """The content of a note, once it is there."""
        end = time.monotonic() + timeout
        while not (self.notes / name).exists():
            if time.monotonic() > end or (self.process.poll() is not None and not (self.notes / name).exists()):
                raise AssertionError(f"no note {name}: {self.finish(1)}")
            time.sleep(0.01)
        return json.loads((self.notes / name).read_text())

    def hears(self, text: str) -> None:
        """Wait until the launcher has written a text to its standard error."""
        while text not in self.heard.decode(errors="replace"):
            more = os.read(self.process.stderr.fileno(), 4096)
            assert more, f"ended without {text!r}: {self.heard.decode(errors='replace')}"
            self.heard += more

    def finish(self, timeout: float = 300.0) -> tuple[int, str, str]:
        """(status, standard output, standard error) at the end."""
        try:
            out, error = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, error = self.process.communicate()
        error = (self.heard + error).decode(errors="replace")
        return self.process.returncode, (out or b"").decode(errors="replace"), error

    def log(self, rank: int) -> str:
        return (self.folder / "runs" / "launched" / "logs" / f"rank_{rank:04d}.log").read_text()


def gone(pid: int, timeout: float = 100.0) -> bool:
    """Whether a process is no longer there (a zombie is not)."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False
