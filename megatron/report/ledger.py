"""ledger.jsonl: the events of a run, in order, never rewritten.

Every line has `event` and `time` (UTC), and a checksum (`crc`). Events: start, resume, batches (the hash of every
step's global batch), blend (its weights), checkpoint, uploaded (a whole copy elsewhere), copies_left, superseded,
spike, rollback, stop, error, end. The launcher writes restart and given_up. damaged names lines that are now in
ledger.damaged.jsonl.
Entries with `spent`, such as `mark`, have the account of the run's time (see `goodput`). After a resume the same
steps may come again: the weights saw the batch of the last entry about a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron.config.problems import UserError

from .append import AppendFile
from .jsonl import encode, is_number, is_step, put_aside, read_lines, sign

BATCHES_PER_LINE = 100


def hash_text(value: int) -> str:
    """A 64-bit batch hash as text: 16 hexadecimal digits."""
    return f"{value % 2**64:016x}"


class Ledger:
    """An append-only file of events. Each is on disk when `write` returns, or waits in memory if the disk is full.

    Threads may share it: the thread that uploads checkpoints writes to it too.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        damaged = put_aside(self.path, sound_event)
        self._file = AppendFile(self.path, sync=True)
        self._first = 0
        self._hashes: list[str] = []
        self._lock = threading.RLock()
        self._closed = False
        if damaged:
            self.write("damaged", lines=damaged, moved_to=f"{self.path.stem}.damaged.jsonl")

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
        """Note the hash of a step's global batch. Steps come in order, and lines of up to 100 of them are written."""
        with self._lock:
            if self._hashes and step != self._first + len(self._hashes):
                self.flush()
            if not self._hashes:
                self._first = step
            self._hashes.append(hash_text(hash_of_batch))
            if len(self._hashes) == BATCHES_PER_LINE:
                self.flush()

    def flush(self) -> None:
        with self._lock:
            if self._hashes:
                hashes, self._hashes = self._hashes, []
                now = datetime.now(UTC).isoformat(timespec="milliseconds")
                self._append({"event": "batches", "time": now, "first_step": self._first, "hashes": hashes})

    def position(self) -> int:
        """Bytes written so far, held-back batches included. The weights of a checkpoint have seen the steps of all
        entries before its position, which the event `resume` has.

        Raises:
            UserError: the file was moved or deleted.
        """
        with self._lock:
            self.flush()
            try:
                return self.path.stat().st_size + self._file.waiting
            except FileNotFoundError:
                raise UserError(
                    f"{self.path} was moved or deleted while the run was writing to it: move its folder (run.dir) "
                    "back, and start the run again"
                ) from None

    def _append(self, entry: dict[str, Any]) -> None:
        self._file.write(sign(encode(entry)))

    def close(self) -> None:
        with self._lock:
            self.flush()
            self._closed = True
            self._file.close()


_KNOWN: dict[str, Callable[[Any], bool]] = {  # the form of entries that readers rely on
    "step": lambda value: value is None or is_step(value),
    "first_step": is_step,
    "to": lambda value: isinstance(value, int),
    "hashes": lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    "left_out": lambda value: isinstance(value, list) and all(map(_is_pair, value)),
    "stall_seconds": is_number,
    "ranks": lambda value: is_step(value) or (isinstance(value, list) and all(map(is_step, value))),
}
_NEEDED = {  # required entries of events
    "start": ("step",),
    "resume": ("step",),
    "batches": ("first_step", "hashes"),
    "uploaded": ("step", "url", "manifest"),
    "rollback": ("to",),
    "copies_left": ("to",),
    "suspect": ("step", "name", "losses", "places"),
    "attribution": ("step",),
}


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_step, value))


def _is_mark(spent: Any) -> bool:
    """Whether it is an account of time. See `goodput`."""
    names = ("since", "attempt", "completed", "start", "steps", "evaluation", "save", "end")
    if not isinstance(spent, dict) or not all(is_number(spent.get(name)) for name in names):
        return False
    within = spent.get("within", {})
    return isinstance(within, dict) and all(map(is_number, within.values()))


def sound_event(entry: Mapping[str, Any]) -> bool:
    """Whether an entry has the form that its readers rely on."""
    event = entry.get("event")
    needed = _NEEDED.get(event, ()) if isinstance(event, str) else ("event",)
    failed = event in ("restart", "given_up") and "since" in entry
    return (
        isinstance(event, str)
        and all(entry.get(name) is not None for name in needed)
        and (not failed or all(is_number(entry.get(name)) for name in ("since", "failed", "ended", "attempt")))
        and all(name not in entry or sound(entry[name]) for name, sound in _KNOWN.items())
        and ("spent" not in entry or _is_mark(entry["spent"]))
        and (event != "error" or isinstance(entry.get("error", ""), str))
    )


def read_ledger(path: str | Path) -> list[dict[str, Any]]:
    """All whole events, oldest first. Damaged ones are skipped with a warning."""
    return list(read_lines(path, sound_event))


def batch_hashes(path: str | Path) -> dict[int, str]:
    """The batch hash of each step's update. Of a repeated step, the last one."""
    hashes: dict[int, str] = {}
    for entry in read_lines(path, sound_event):
        if entry["event"] == "batches":
            hashes.update(enumerate(entry["hashes"], start=entry["first_step"]))
    return hashes


def left_out(path: str | Path, since: int = 0, step: int | None = None) -> list[list[int]] | None:
    """The batches that a run skips, as pairs (step, batches) in the order of `megatron.data.skipped_batches`, from its
    last start, resumption or rollback. None if its ledger has none of these.

    Args:
        since: only entries after this number of bytes count.
        step: of the checkpoint with that number. A branch begins with a checkpoint that counts the bytes of its
            trunk's ledger, so that all of the branch's ledger counts.
    """
    found: list[list[int]] | None = None
    if not Path(path).exists():
        return None
    first = next(iter(read_lines(path, sound_event)), {})
    if first.get("event") == "forked" and first.get("step") == step:
        since, found = 0, first.get("left_out")
    for entry in read_lines(path, sound_event, since=since):
        if entry["event"] in ("start", "resume", "rollback"):
            found = entry.get("left_out", [])
    return found
