"""Accounts of a run's communication as files, and as a table.

Each rank writes `<run.dir>/communication/rank_<r>.jsonl`: a line about the rank, then a line for each step whose
account differs from the previous line's. Most runs send the same messages in every step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.file_access import read_plain
from megatron.parallel.messages.traffic import Duration, Durations, Tally, wire_bytes

from .append import AppendFile, warn
from .jsonl import encode, lines_of, numbered, sign

FOLDER = "communication"


class AccountFile:
    """Writes one rank's accounts.

    Args:
        facts: of the first line: the sizes of the layout and this rank's place.
    """

    def __init__(self, folder: str | Path, rank: int, facts: Mapping[str, Any]) -> None:
        self._file = AppendFile(Path(folder) / FOLDER / f"rank_{rank}.jsonl")
        self._last: list | None = None
        self._write({"rank": rank, **facts})

    def step(self, step: int, inside: Tally, outside: Tally, crossing: Tally, predicted: Tally | None = None) -> None:
        """The account of an update, of messages before it (after the previous update), and of messages to other hosts.

        Args:
            predicted: its predicted messages, if these vary between steps.
        """
        rows = inside.rows()
        record: dict[str, Any] = {"step": step}
        if predicted is not None:
            record["predicted"] = predicted.rows()
        if rows != self._last:
            self._last = record["calls"] = rows
            if len(crossing):
                record["to_other_hosts"] = crossing.rows()
        if len(outside):
            record["before"] = outside.rows()
        if len(record) > 1:
            self._write(record)

    def times(self, step: int, durations: Durations) -> None:
        self._write({"step": step, "times": durations.rows()})

    def close(self, completed: int, outside: Tally) -> None:
        """The run is over after this number of updates. `outside` has the messages after the last one."""
        self._write({"end": completed, **({"before": outside.rows()} if len(outside) else {})})
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(sign(encode(record)))


@dataclass
class RankAccount:
    """The accounts of one rank.

    Attributes:
        facts: of the last start: the layout, this rank's place, and the predicted messages of a step (`predicted`,
            rows) or the reason for their absence (`unpredicted`).
        steps: (first step, account of the steps up to the next entry), in order.
        predicted: step -> predicted messages, where steps vary.
        crossing: first step -> messages to other hosts, if any.
        end: completed updates, 0 if the run did not report it.
        gaps: (first step, next step with an account) around damaged lines.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[int, Tally]] = field(default_factory=list)
    predicted: dict[int, Tally] = field(default_factory=dict)
    crossing: dict[int, Tally] = field(default_factory=dict)
    times: dict[int, Durations] = field(default_factory=dict)
    outside: Tally = field(default_factory=Tally)
    end: int = 0
    gaps: list[tuple[int, float]] = field(default_factory=list)

    def lost(self) -> None:
        """A line is damaged: no account up to the next one."""
        self.gaps.append((self.steps[-1][0] + 1 if self.steps else 0, math.inf))

    def at(self, step: int) -> Tally:
        """The account of an update.

        Raises:
            ValueError: the file does not have it.
        """
        return self._entry(step)[1]

    def expected(self, step: int) -> Tally:
        """Predicted messages of an update.

        Raises:
            KeyError, ValueError: there is no prediction.
        """
        logged = [each for each in self.predicted if each <= step]  # of the last logged step, like the account
        return self.predicted[max(logged)] if logged else Tally.of_rows(self.facts["predicted"])

    def to_other_hosts(self, step: int) -> Tally:
        """Its messages to other hosts.

        Raises:
            ValueError: the file has no account of the step.
        """
        return self.crossing.get(self._entry(step)[0], Tally())

    def _entry(self, step: int) -> tuple[int, Tally]:
        found = [entry for entry in self.steps if entry[0] <= step]
        missing = any(first <= step < last for first, last in self.gaps)
        if not found or missing or (self.end and step >= self.end):
            raise ValueError(f"rank {self.facts.get('rank')} has no account of step {step}")
        return found[-1]


def read_accounts(folder: str | Path) -> dict[int, RankAccount]:
    """The accounts of a run's ranks whose files are here, by rank.

    A damaged line is skipped with a warning. It may have been about later steps, so these have no account.

    Raises:
        ValueError: there are none.
    """
    files = sorted(Path(folder, FOLDER).glob("rank_*.jsonl"))
    accounts = {}
    for path in files:
        account = RankAccount()
        damaged, content = [], read_plain(path)
        for number, begin, end, record in lines_of(content):
            try:
                _take(account, record)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                damaged.append(number)
                if b'"times"' not in content[begin:end]:  # a line with times has no account
                    account.lost()
        if damaged:
            warn(f"{path}: {numbered(damaged)} damaged: the steps up to the next account there have none")
        name = path.stem.removeprefix("rank_")
        accounts[int(name) if name.isascii() and name.isdigit() else -1] = account
    if not accounts:
        raise ValueError(f"{Path(folder, FOLDER)} has no accounts (rank_<n>.jsonl): set logging.communication=counts")
    return dict(sorted(accounts.items()))


def _take(account: RankAccount, record: dict[str, Any] | None) -> None:
    if record is None:
        raise ValueError
    if "rank" in record:
        account.facts = record
    if "step" in record:
        step = int(record["step"])
        if "calls" in record:  # a resumed run writes later steps again
            account.steps = [(first, tally) for first, tally in account.steps if first < step]
            account.steps.append((step, Tally.of_rows(record["calls"])))
            account.gaps = [(first, min(last, step)) for first, last in account.gaps if first < step]
            account.crossing = {at: each for at, each in account.crossing.items() if at < step}
            account.crossing[step] = Tally.of_rows(record.get("to_other_hosts", ()))
        if "predicted" in record:
            account.predicted[step] = Tally.of_rows(record["predicted"])
        if "times" in record:
            account.times = {at: each for at, each in account.times.items() if at < step}
            account.times[step] = Durations.of_rows(record["times"])
    if "before" in record:
        account.outside += Tally.of_rows(record["before"])
    if "end" in record:
        account.end = int(record["end"])


def regular_calls(tally: Tally) -> Tally:
    """Without the exchanges within slow steps: their number depends on time, so they cannot be predicted."""
    return Tally((call, messages, size) for call, messages, size in tally if call.phase != "look")


def by_group(
    tally: Tally, durations: Durations | None = None, crossing: Tally | None = None
) -> dict[str, dict[str, dict[str, float]]]:
    """For records: group -> operation -> messages and bytes, and bytes to other hosts if there are any. Seconds too,
    if there are durations."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (group, operation), (messages, size) in tally.by("group", "operation").items():
        found.setdefault(group, {})[operation] = {"messages": messages, "bytes": size}
    for (group, operation), (_, size) in (crossing.by("group", "operation") if crossing else {}).items():
        found[group][operation]["to_other_hosts"] = size
    for (group, operation), each in (durations.by("group", "operation") if durations else {}).items():
        found.setdefault(group, {}).setdefault(operation, {}).update(
            seconds=each.seconds, exposed_seconds=each.exposed, waiting_seconds=each.waiting
        )
    return found


def readable_bytes(size: float) -> str:
    """Bytes with three digits and a unit: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns side by side, numbers aligned to the right."""
    texts = [list(map(str, headers)), *([str(each) for each in row] for row in rows)]
    numeric = [all(isinstance(row[at], (int, float)) for row in rows) for at in range(len(headers))]
    widths = [max(len(row[at]) for row in texts) for at in range(len(headers))]
    return "\n".join(
        "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, numeric))
        .rstrip()
        for row in texts
    )  # fmt: skip


def step_table(tally: Tally, durations: Durations | None = None) -> str:
    """One step by phase and group: messages, bytes, bytes that a rank sends with a ring, and durations."""
    wire: dict[tuple, float] = {}
    for call, _, size in tally:
        place = (call.phase, call.group, call.operation, call.dtype)
        wire[place] = wire.get(place, 0.0) + wire_bytes(call.operation, call.ranks, size)
    timed = durations.by("phase", "group", "operation", "dtype") if durations else {}
    rows = [
        [*(each or "-" for each in key), messages, readable_bytes(size), readable_bytes(wire[key]),
         *(milliseconds(timed.get(key)) if timed else ())]
        for key, (messages, size) in tally.by("phase", "group", "operation", "dtype").items()
    ]  # fmt: skip
    headers = ["phase", "group", "operation", "type", "messages", "bytes", "sent"]
    return table([*headers, *(TIMES if timed else ())], rows)


TIMES = ("ms", "waiting", "transfer", "exposed")  # headers of `milliseconds`


def milliseconds(duration: Duration | None) -> list[str]:
    """Cells of a row: in all, until the last rank came, after that, and exposed (while nothing else could continue)."""
    if duration is None or not duration.messages:
        return ["-"] * len(TIMES)
    known = duration.split == duration.messages
    split = [duration.waiting, duration.transfer] if known else [None, None]
    return ["-" if each is None else f"{1e3 * each:.3f}" for each in (duration.seconds, *split, duration.exposed)]
