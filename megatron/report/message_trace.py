"""Single messages of a run's last timed steps, and all ranks of them as one trace for Chrome's and Perfetto's viewers.

Each rank is a process of the trace. Its threads are the phases of the step, and one per group with its messages. The
part of a message until the last rank came is a slice `waiting` inside it, and arrows go from sends to receives. The
format is Chromium's "Trace Event Format"."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.file_access import replace_file

from .communication import FOLDER
from .jsonl import encode, read_lines, sign


def write_events(folder: str | Path, rank: int, steps: Sequence[dict[str, Any]]) -> None:
    """Write one rank's last steps, in the place of an earlier start's."""
    path = Path(folder, FOLDER, f"events_{rank}.jsonl")
    with contextlib.suppress(OSError):  # a trace must not end a run. Accounts report a full disk
        replace_file(path, b"".join(sign(encode({"rank": rank, **each})) for each in steps))


def read_events(folder: str | Path) -> dict[int, dict[int, dict[str, Any]]]:
    """Step -> rank -> its record.

    Raises:
        ValueError: there are none.
    """
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for path in sorted(Path(folder, FOLDER).glob("events_*.jsonl")):
        for record in read_lines(path, _is_sound):
            found.setdefault(record["step"], {})[record["rank"]] = record
    if not found:
        raise ValueError(
            f"{Path(folder, FOLDER)} has no times of messages (events_<n>.jsonl): train with "
            "logging.communication=times. They are written when the run ends"
        )
    return dict(sorted(found.items()))


def _is_sound(record: Mapping[str, Any]) -> bool:
    """Whether a phase is (name, two times), and a message has six names, bytes, a start, two times and stalls."""
    time = (int, type(None))
    forms: dict[str, tuple[Any, ...]] = {"spans": (str, int, int), "messages": (*[str] * 6, int, int, time, time, list)}
    try:
        numbers = [(record[name], int) for name in ("step", "rank")]
        values = [pair for name, form in forms.items() for row in record[name] for pair in zip(row, form, strict=True)]
    except (KeyError, TypeError, ValueError):
        return False
    return all(isinstance(value, form) and not isinstance(value, bool) for value, form in (*numbers, *values))


def trace(steps: dict[int, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """The trace of some steps of all ranks, as JSON. Times are microseconds since its first event."""
    records = [record for ranks in steps.values() for record in ranks.values()]
    zero = min(
        [begin for record in records for _, begin, _ in record["spans"]]
        + [row[7] for record in records for row in record["messages"]],
        default=0,
    )
    threads = _Threads()
    events: list[dict[str, Any]] = []
    for step, ranks in steps.items():
        arrows = _Arrows(step)
        for rank, record in sorted(ranks.items()):
            events += _events(record, step, rank, zero, threads, arrows)
        events += arrows.events()
    error = max((record["clock_error"] for record in records), default=0)
    return {
        "traceEvents": [*threads.names(), *events],
        "displayTimeUnit": "ms",
        "otherData": {"clock": "rank 0", "largest_error_us": error / 1e3, "steps": sorted(steps)},
    }


def rank_traces(steps: dict[int, dict[int, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """The same as a trace for each rank, as torch's profiler writes them, for Holistic Trace Analysis. Arrows
    between ranks are omitted."""
    whole = trace(steps)
    ranks = sorted({event["pid"] for event in whole["traceEvents"]})
    facts = {"schemaVersion": 1, **{name: value for name, value in whole.items() if name != "traceEvents"}}
    return {
        rank: {
            **facts,
            "distributedInfo": {"rank": rank, "world_size": len(ranks)},
            "traceEvents": [each for each in whole["traceEvents"] if each["pid"] == rank and each["ph"] in "MX"],
        }
        for rank in ranks
    }


def write_trace(path: str | Path, steps: dict[int, dict[int, dict[str, Any]]]) -> None:
    """Write `trace` to a file, or `rank_traces` into an existing folder as `rank_<n>.json`."""
    made = {Path(path): trace(steps)}
    if Path(path).is_dir():
        made = {Path(path, f"rank_{rank}.json"): each for rank, each in rank_traces(steps).items()}
    for file, content in made.items():
        replace_file(file, json.dumps(content))


def _events(
    record: dict[str, Any], step: int, rank: int, zero: int, threads: "_Threads", arrows: "_Arrows"
) -> Iterator[dict[str, Any]]:
    thread = threads.find(rank, "phases")
    for name, begin, end in sorted(record["spans"], key=lambda span: (span[1], -span[2])):
        yield _slice(name, "phase", rank, thread, (begin, end), zero, {"step": step})
    for phase, layer, group, members, operation, dtype, size, start, end, latest, stalls in record["messages"]:
        if end is None:
            continue
        thread = threads.find(rank, f"{group} ({members})", start, end)
        facts = {"step": step, "phase": phase, "layer": layer, "type": dtype, "bytes": size}
        facts["exposed_us"] = sum(b - a for a, b in stalls) / 1e3
        yield _slice(operation, "communication", rank, thread, (start, end), zero, facts)
        if latest is not None and latest > start:
            yield _slice("waiting", "waiting", rank, thread, (start, min(latest, end)), zero, {"step": step})
        arrows.add(operation, members, rank, thread, (start - zero) / 1e3, (end - zero) / 1e3)


def _slice(
    name: str, kind: str, rank: int, thread: int, span: tuple[int, int], zero: int, facts: dict[str, Any]
) -> dict[str, Any]:
    at, length = (span[0] - zero) / 1e3, max(0, span[1] - span[0]) / 1e3
    return {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": thread, "ts": at, "dur": length, "args": facts}


class _Threads:
    """Numbers of threads. Slices of one thread must be nested or disjoint, so concurrent messages of a group need
    several."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, str], list[tuple[int, int]]] = {}  # (number, end of its last slice)
        self._count = 0

    def find(self, rank: int, line: str, start: int = 0, end: int = 0) -> int:
        """A thread of this line that is free at `start`, and is taken until `end`."""
        lanes = self._lines.setdefault((rank, line), [])
        for place, (number, busy) in enumerate(lanes):
            if busy <= start:
                lanes[place] = (number, end)
                return number
        self._count += 1
        lanes.append((self._count, end))
        return self._count

    def names(self) -> Iterator[dict[str, Any]]:
        """Metadata: names of processes and threads, and their order in a viewer."""
        for (rank, line), lanes in self._lines.items():
            for number, _ in lanes:
                for name, value in (
                    ("process_name", {"name": f"rank {rank}"}),
                    ("process_sort_index", {"sort_index": rank}),
                    ("thread_name", {"name": line}),
                    ("thread_sort_index", {"sort_index": number}),
                ):
                    yield {"ph": "M", "name": name, "pid": rank, "tid": number, "args": value}


class _Arrows:
    """From the n-th send of a rank to the n-th receive of its peer."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._ends: dict[tuple[str, int], list[tuple[int, int, float]]] = {}
        self._members: dict[str, set[int]] = {}

    def add(self, operation: str, members: str, rank: int, thread: int, start: float, end: float) -> None:
        """Add a message. Only sends and receives count."""
        if operation in ("send", "recv"):
            at = start if operation == "send" else end
            self._members.setdefault(members, set()).add(rank)
            self._ends.setdefault((f"{operation} {members}", rank), []).append((rank, thread, at))

    def events(self) -> Iterator[dict[str, Any]]:
        for members, ranks in self._members.items():
            for sender in sorted(ranks):
                for receiver in sorted(ranks - {sender}):
                    sent = self._ends.get((f"send {members}", sender), ())
                    received = self._ends.get((f"recv {members}", receiver), ())
                    for number, (begin, end) in enumerate(zip(sent, received)):
                        name = f"{self._step}:{sender}>{receiver}:{number}"
                        for kind, (rank, thread, at) in (("s", begin), ("f", end)):
                            yield {
                                "ph": kind, "id": name, "name": "message", "cat": "message", "pid": rank,
                                "tid": thread, "ts": at, **({"bp": "e"} if kind == "f" else {}),
                            }  # fmt: skip
