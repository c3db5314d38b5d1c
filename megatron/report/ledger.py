"""ledger.jsonl: what happened to a run, in order, never rewritten.

Every line has `event` and `time` (UTC). Events: start, resume, batches (the hash of every step's global batch),
checkpoint, uploaded (a copy elsewhere that is whole), copies_left, superseded, spike, rollback, stop, error, end;
restart and given_up, of the launcher. Where the time of a run has gone is in the entries that have `spent` (see
`goodput`), `mark` among them. After a resume the same steps may come again: the last entry about a step is the one that
the weights saw.
"""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .append import AppendFile
from .jsonl import encode, read_lines

BATCHES_PER_LINE = 100


def hash_text(value: int) -> str:
    """A 64-bit batch hash as it is written everywhere: 16 hexadecimal digits."""
    return f"{value % 2**64:016x}"


class Ledger:
    """An append-only file of events. Each is on disk when `write` returns, or waits in memory for room there.

    Threads may share it: what copies checkpoints elsewhere tells of them from its own.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._end_broken_line()
        self._file = AppendFile(self.path, sync=True)
        self._first = 0
        self._hashes: list[str] = []
        self._lock = threading.RLock()
        self._closed = False

    def _end_broken_line(self) -> None:
        """A process killed while it wrote leaves half a line; what follows must not be glued to it."""
        if not self.path.exists():
            return
        with open(self.path, "rb+") as file:
            size = file.seek(0, os.SEEK_END)
            if not size:
                return
            file.seek(size - 1)
            if file.read(1) != b"\n":
                content = self.path.read_bytes()
                file.truncate(content.rfind(b"\n") + 1)

    def write(self, event: str, **facts: Any) -> None:
        """Append an event with its facts (JSON values).

        Raises:
            ValueError: the ledger is closed.
        """
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.path} is closed")
            self.flush()
            self._append({"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **facts})

    def batch(self, step: int, hash_of_batch: int) -> None:
        """Note the hash of a step's global batch; steps come in order, lines of up to 100 of them are written."""
        with self._lock:
            if self._hashes and step != self._first + len(self._hashes):
                self.flush()
            if not self._hashes:
                self._first = step
            self._hashes.append(hash_text(hash_of_batch))
            if len(self._hashes) == BATCHES_PER_LINE:
                self.flush()

    def flush(self) -> None:
        """Write the batches that are still held back."""
        with self._lock:
            if self._hashes:
                hashes, self._hashes = self._hashes, []
                now = datetime.now(UTC).isoformat(timespec="milliseconds")
                self._append({"event": "batches", "time": now, "first_step": self._first, "hashes": hashes})

    def position(self) -> int:
        """Bytes written so far, held-back batches included. A resumed checkpoint's, told in the event `resume`, says
        which
        entries are of steps that its weights have seen: those before it."""
        with self._lock:
            self.flush()
            return self.path.stat().st_size + self._file.waiting

    def _append(self, entry: dict[str, Any]) -> None:
        self._file.write((encode(entry) + "\n").encode())

    def close(self) -> None:
        with self._lock:
            self.flush()
            self._closed = True
            self._file.close()


def read_ledger(path: str | Path) -> list[dict[str, Any]]:
    """All events, oldest first."""
    return list(read_lines(path))


def batch_hashes(path: str | Path) -> dict[int, str]:
    """The hash of the batch that each step's update used; where a step was repeated, the last one."""
    hashes: dict[int, str] = {}
    for entry in read_lines(path):
        if entry["event"] == "batches":
            hashes.update(enumerate(entry["hashes"], start=entry["first_step"]))
    return hashes


def left_out(path: str | Path) -> list[list[int]] | None:
    """The batches that a run skips, as pairs (step, batches) in the order of `megatron.data.skipped_batches`, from its
    last start, resumption or rollback; None if its ledger has none of these."""
    found: list[list[int]] | None = None
    for entry in read_lines(path) if Path(path).exists() else ():
        if entry["event"] in ("start", "resume", "rollback"):
            found = entry.get("left_out", [])
    return found
