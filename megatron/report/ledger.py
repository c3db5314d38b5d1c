"""ledger.jsonl: the events of a run, in order, never rewritten.

Every line has `event` and `time` (UTC), and a checksum (`crc`). Events: start, resume, batches (the hash of every
step's global batch), blend (its weights), checkpoint, uploaded (a whole copy elsewhere), copies_left, superseded,
spike, rollback, stop, error, end. The launcher writes restart and given_up. damaged names lines that are now in
ledger.damaged.jsonl.
Entries with `spent` are marks of the run's time (see `goodput`). A mark has `since`, the launch of this start (seconds
since the epoch), `attempt`, `completed` updates, and the seconds of each kind, which sum to the time since `since`.
`within` has the parts of `steps`. A killed start has no last mark. Then `restart` has the times of its failure and its
end. After a resume the same steps may come again: the weights saw the batch of the last entry about a step."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import sqrt
from pathlib import Path
from typing import Any

from megatron.config.problems import UserError

from .append import AppendFile
from .console import duration
from .jsonl import encode, is_number, is_step, put_aside, read_lines, sign

BATCHES_PER_LINE = 100


def hash_text(value: int) -> str:
    """A 64-bit batch hash as text: 16 hexadecimal digits."""
    return f"{value % 2**64:016x}"


class Ledger:
    """An append-only file of events. Each is on disk when `write` returns, or waits in memory if the disk is full.

    Threads may share it: the thread that uploads checkpoints writes to it too."""

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
            self._append(event, **facts)

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
                self._append("batches", first_step=self._first, hashes=hashes)

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

    def _append(self, event: str, **facts: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._file.write(sign(encode({"event": event, "time": now, **facts})))

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


KINDS = ("start", "steps", "evaluation", "save", "end")  # seconds in a mark
PARTS = {  # of the wall time, with descriptions
    "kept": "steps whose result the run still has",
    "lost": "steps that were repeated after a failure or a rollback, or were never saved",
    "start": "from the launch to the first step: processes, data, model, reading a checkpoint",
    "evaluation": "validation, benchmarks, samples",
    "save": "training stood still for a checkpoint",
    "detection": "from a failure to its end: noticed, and all ranks ended",
    "wait": "between a start that failed and the next one",
    "end": "after the last step: curves, summary",
}


@dataclass(frozen=True)
class Goodput:
    """Wall time by part, in seconds."""

    seconds: dict[str, float]  # of each of `PARTS`
    starts: int = 0  # number of launches
    failures: int = 0
    saves: int = 0  # checkpoints for which training stood still.
    # Of the kept steps, by phase, and in collectives ("waiting")
    within: dict[str, float] = field(default_factory=dict)
    again: float = 0.0  # part of `start` after a failure
    completed: int = 0

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The share of the wall time in kept steps (effective training time ratio)."""
        return self.seconds["kept"] / self.wall if self.wall > 0 else 0.0

    def text(self) -> str:
        """One line, with the largest parts first."""
        parts = sorted(((seconds, name) for name, seconds in self.seconds.items() if name != "kept"), reverse=True)
        large = [f"{name} {seconds / self.wall:.1%}" for seconds, name in parts if seconds >= 0.0005 * self.wall > 0]
        starts = f" in {self.starts} starts" if self.starts > 1 else ""
        return f"{self.share:.1%} of {duration(self.wall)}{starts}" + (f" ({', '.join(large)})" if large else "")


@dataclass
class _Piece:
    """Steps done between two numbers of completed updates, with their time."""

    first: int
    last: int
    seconds: float
    within: dict[str, float]


@dataclass
class _Sum:
    """Adds the entries of a ledger one by one."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    pieces: list[_Piece] = field(default_factory=list)
    since: float | None = None  # of the start that the last mark or failure is of
    marked: dict[str, Any] | None = None  # the last mark of that start
    at: float = 0.0  # end of the accounted time
    starts: int = 0
    failures: int = 0
    saves: int = 0
    again: float = 0.0

    def mark(self, event: str, spent: Mapping[str, Any]) -> None:
        """A mark of a running process."""
        if spent["since"] != self.since:
            self._start(float(spent["since"]), bool(spent["attempt"]))
        before = self.marked or dict.fromkeys(KINDS, 0.0) | {"completed": spent["completed"]}
        new = {kind: max(float(spent[kind]) - float(before[kind]), 0.0) for kind in KINDS}
        for kind in KINDS:
            if kind != "steps":
                self.seconds[kind] += new[kind]
        self.again += new["start"] if spent["attempt"] else 0.0
        if event in ("start", "resume"):  # steps since the last mark are lost
            self.seconds["lost"] += new["steps"]
            self._forget(int(spent["completed"]))
        else:
            old = before.get("within", {})
            parts = {name: max(seconds - old.get(name, 0.0), 0.0) for name, seconds in spent.get("within", {}).items()}
            self.pieces.append(_Piece(int(before["completed"]), int(spent["completed"]), new["steps"], parts))
        self.saves += event == "checkpoint"
        self.marked = dict(spent)
        self.at = float(spent["since"]) + sum(float(spent[kind]) for kind in KINDS)

    def failure(self, since: float, failed: float, ended: float, attempt: int) -> None:
        """The launcher's report of a failed start. `attempt` counts earlier starts."""
        self.failures += 1
        if since != self.since:  # it failed before its first mark
            self._start(since, attempt > 0)
        tail = max(min(failed, ended) - self.at, 0.0)
        self.seconds["lost" if self.marked else "start"] += tail
        self.again += tail if attempt and not self.marked else 0.0
        self.at += tail
        self.seconds["detection"] += max(ended - self.at, 0.0)
        self.at = max(ended, self.at)

    def _start(self, since: float, again: bool) -> None:
        if again and self.since is not None:  # time before a start by a user does not count
            self.seconds["wait"] += max(since - self.at, 0.0)
        self.starts += 1
        self.since, self.marked, self.at = since, None, since

    def _forget(self, completed: int) -> None:
        """The run resumes after this number of updates. Later steps are lost."""
        kept = []
        for piece in self.pieces:
            beyond = max(piece.last - max(piece.first, completed), 0)
            share = beyond / (piece.last - piece.first) if beyond else float(piece.first > completed)
            self.seconds["lost"] += share * piece.seconds
            if share < 1.0:
                parts = {name: (1.0 - share) * seconds for name, seconds in piece.within.items()}
                kept.append(_Piece(piece.first, min(piece.last, completed), (1.0 - share) * piece.seconds, parts))
        self.pieces = kept

    def result(self) -> Goodput:
        seconds, within = {**self.seconds, "kept": sum(piece.seconds for piece in self.pieces)}, dict[str, float]()
        for piece in self.pieces:
            for name, part in piece.within.items():
                within[name] = within.get(name, 0.0) + part
        completed = sum(piece.last - piece.first for piece in self.pieces)
        return Goodput(seconds, self.starts, self.failures, self.saves, within, self.again, completed)


def goodput(entries: Iterable[Mapping[str, Any]], *, since: float | None = None) -> Goodput:
    """The account of a run's ledger, whose entries come oldest first.

    Time between two starts counts as waiting if the second is a restart, and not at all if a user started it.

    Args:
        since: only this start of the run.
    """
    total = _Sum()
    for entry in entries:
        spent = entry.get("spent")
        if entry["event"] in ("restart", "given_up") and "since" in entry and since is None:
            total.failure(entry["since"], entry["failed"], entry["ended"], entry["attempt"] - 1)
        elif spent is not None and since in (None, spent["since"]):
            total.mark(entry["event"], spent)
    return total.result()


def best_interval(save: float, between: float) -> float:
    """Seconds between two checkpoints with the least lost time (Daly 2006, equation 37, and Young 1974 for the first
    term).

    Args:
        save: seconds that a checkpoint stops the run.
        between: mean seconds between failures.
    """
    interval = sqrt(2 * save * between)
    if save < between / 2:
        interval = max(save, interval * (1 + sqrt(save / (2 * between)) / 3 + save / (18 * between)) - save)
    return interval
