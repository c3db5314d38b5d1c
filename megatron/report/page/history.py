"""A run's files, read for the report, and tables of them, with plain text in cells. The page escapes it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron.config.problems import ABSENT, UserError, shown_value
from megatron.config.schema import dotted
from megatron.config.show.difference import Described, described, differences
from megatron.config.tree import leaves, thaw

from ..curve import branches
from ..jsonl import Sound, flatten, is_number, read_lines, sound_metrics, sound_sample
from ..ledger import sound_event

Record = Mapping[str, Any]
NOT_DRAWN = ("step", "tokens", "peak_tflops", "eta_seconds")


@dataclass(frozen=True)
class Series:
    """Values over updates. `steps` counts the updates that the weights had seen. Both have the same length."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)


@dataclass(frozen=True)
class RunHistory:
    """A run's files, as far as they exist."""

    name: str  # unique name of the run on the page
    folder: Path
    training: list[Record]  # training records in order of their steps
    validation: dict[str, dict[str, Series]]  # validation, tasks: set or task -> metric -> values
    tasks: dict[str, dict[str, Series]]
    abandoned: list[Series]  # training losses that a later start replaced, a series per rollback
    events: list[Record]  # lines of the ledger, without batch hashes
    samples: list[Record]
    described: Described | None  # its configuration with origins. None without config.yml.

    @classmethod
    def read(cls, folder: Path, name: str) -> RunHistory:
        """Read a run's directory.

        Raises:
            UserError: it has no metrics, or a file of it cannot be read.
        """
        try:
            records = list(read_lines(folder / "metrics.jsonl", sound_metrics))
            if not records and (folder / "metrics.jsonl").stat().st_size:
                raise ValueError("every line of metrics.jsonl is damaged")
            return cls(
                name=name,
                folder=folder,
                training=[record for record in records if "loss" in record],
                validation=_measured(records, "validation"),
                tasks=_measured(records, "tasks"),
                abandoned=[
                    Series([int(step) for step, _ in points], [loss for _, loss in points])
                    for points in branches(_lines(folder / "metrics.superseded.jsonl", sound_metrics))
                ],
                events=[
                    each for each in _lines(folder / "ledger.jsonl", sound_event) if each.get("event") != "batches"
                ],
                samples=_lines(folder / "samples.jsonl", sound_sample),
                described=described(str(folder)) if (folder / "config.yml").is_file() else None,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} has no metrics that can be read: {error}") from error

    @cached_property
    def _numbers(self) -> list[dict[str, float]]:
        return [numbers(record) for record in self.training]

    def metric(self, key: str) -> Series:
        """A number of the training records by its path, where it exists and is finite."""
        found = Series()
        for record, flat in zip(self.training, self._numbers):
            value = flat.get(key)
            if value is not None:
                found.add(record["step"], value)
        return found

    def metrics(self) -> list[str]:
        """Paths of all numbers of the training records, in the order in which they first appear."""
        found: dict[str, None] = {}
        for flat in self._numbers:
            found.update(dict.fromkeys(key for key in flat if key not in NOT_DRAWN))
        return list(found)

    def clock(self) -> StepAxis:
        return StepAxis.of(self.training)


@dataclass(frozen=True)
class StepAxis:
    """Tokens read and hours of training after given steps. Linear between them and beyond the ends."""

    steps: list[int]
    tokens: list[float]
    hours: list[float]

    @classmethod
    def of(cls, training: list[Record]) -> StepAxis:
        steps = [record["step"] + 1 for record in training]
        made = [step - before for step, before in zip(steps, [0, *steps])]
        seconds = [(record.get("step_seconds") or 0.0) * number for record, number in zip(training, made)]
        return cls(
            steps=[0, *steps],
            tokens=[0.0, *(float(record.get("tokens", 0)) for record in training)],
            hours=[0.0, *(total / 3600 for total in accumulate(seconds))],
        )

    def at(self, step: int) -> tuple[float, float]:
        """(tokens, hours) after `step` updates."""
        right = min(max(bisect_left(self.steps, step), 1), len(self.steps) - 1)
        if right < 1:
            return 0.0, 0.0
        left = right - 1
        part = (step - self.steps[left]) / max(self.steps[right] - self.steps[left], 1)
        return (
            self.tokens[left] + part * (self.tokens[right] - self.tokens[left]),
            self.hours[left] + part * (self.hours[right] - self.hours[left]),
        )


def named_runs(folders: list[str]) -> list[RunHistory]:
    """The runs of some directories, named by the shortest unique ends of their paths."""
    paths = [Path(each).absolute() for each in folders]
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [RunHistory.read(Path(each), "/".join(path.parts[-depth:])) for each, path in zip(folders, paths)]


def numbers(record: Record) -> dict[str, float]:
    """The finite numbers of a record by their paths (`moe/1/dead`)."""
    return {key: float(value) for key, value in flatten(record).items() if is_number(value)}


def _lines(path: Path, sound: Sound) -> list[Record]:
    return list(read_lines(path, sound)) if path.is_file() else []


def _measured(records: Sequence[Record], kind: str) -> dict[str, dict[str, Series]]:
    found: dict[str, dict[str, Series]] = {}
    for record in records:
        for name, metrics in record.get(kind, {}).items():
            for metric, value in numbers(metrics).items():
                found.setdefault(name, {}).setdefault(metric, Series()).add(record["step"], value)
    return found


MANY_EVENTS = 500
LONG_VALUE = 300


@dataclass(frozen=True)
class PageTable:
    """Rows of text under a title.

    Args:
        folded: whether the reader has to open it.
        text: numbers of the columns that keep line breaks.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    text: tuple[int, ...] = ()


def event_table(run: RunHistory) -> PageTable:
    """The ledger of a run. Of many events, the first and the last."""
    events = run.events
    title = f"{run.name}: ledger"
    if len(events) > MANY_EVENTS:
        title += f" (the first and last of {len(events):,} events)"
        events = [*events[: MANY_EVENTS // 2], *events[-MANY_EVENTS // 2 :]]
    rows = []
    for event in events:
        time = str(event.get("time", ""))[:19].replace("T", " ")
        facts = {key: value for key, value in event.items() if key not in ("event", "time", "step")}
        shown = "; ".join(f"{key}: {_plain(value)}" for key, value in facts.items() if value is not None)
        rows.append([time, str(event.get("event", "")), str(event.get("step", "")), shown])
    return PageTable(title, ["time (UTC)", "event", "step", "what it says"], rows, folded=len(rows) > 20)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        text = ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    elif isinstance(value, list):
        text = ", ".join(_plain(each) for each in value) or "none"
    else:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return _short(text)


def _short(text: str) -> str:
    return text if len(text) <= LONG_VALUE else text[:LONG_VALUE] + " ..."


def sample_tables(runs: list[RunHistory]) -> list[PageTable]:
    """The newest samples of every run, and the earlier ones folded."""
    found = []
    for run in runs:
        steps = sorted({each.get("step", 0) for each in run.samples}, reverse=True)
        for title, chosen, folded in (("", steps[:1], False), ("earlier", steps[1:], True)):
            rows = [
                [f"{step:,}", str(each.get("prompt", "")), str(each.get("text", ""))]
                for step in chosen
                for each in run.samples
                if each.get("step", 0) == step
            ]
            name = f"{run.name}: {title}".rstrip(": ")
            found.append(PageTable(name, ["after step", "prompt", "continuation"], rows, folded=folded, text=(1, 2)))
    return found


def configuration_tables(runs: list[RunHistory]) -> Iterator[PageTable]:
    """Differences of the other runs from the first, and each run's values that are not defaults."""
    known = [run for run in runs if run.described is not None]
    for run in known[1:]:
        assert known[0].described is not None and run.described is not None
        rows = [
            [each.key, *(_value(value) for value in each.values), *each.origins]
            for each in differences(known[0].described, run.described)
        ]
        names = [known[0].name, run.name]
        origins = [f"from ({name})" for name in names]
        yield PageTable(f"{names[1]} differs from {names[0]} in", ["key", *names, *origins], rows)
    for run in known:
        assert run.described is not None
        values = {dotted(path): value for path, value in leaves(thaw(run.described.config.model_dump()))}
        rows = [[key, _value(values[key]), origin] for key, origin in run.described.origins.items() if key in values]
        given = [row for row in rows if row[2] != "default"]
        yield PageTable(f"{run.name}: non-default values", ["key", "value", "from"], given, folded=len(runs) > 1)
        yield PageTable(f"{run.name}: all {len(rows)} values", ["key", "value", "from"], rows, folded=True)


def _value(value: Any) -> str:
    return _short("(not there)" if value is ABSENT else shown_value(value))
