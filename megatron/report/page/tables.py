"""Tables of the report, with plain text in cells. The page escapes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.problems import ABSENT, shown_value
from megatron.config.show.difference import differences

from .history import Record, RunHistory

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
    rows = [[_time(event), str(event.get("event", "")), str(event.get("step", "")), _facts(event)] for event in events]
    return PageTable(title, ["time (UTC)", "event", "step", "what it says"], rows, folded=len(rows) > 20)


def _time(event: Record) -> str:
    return str(event.get("time", ""))[:19].replace("T", " ")


def _facts(event: Record) -> str:
    facts = {key: value for key, value in event.items() if key not in ("event", "time", "step")}
    return "; ".join(f"{key}: {_plain(value)}" for key, value in facts.items() if value is not None)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        text = ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    elif isinstance(value, list):
        text = ", ".join(_plain(each) for each in value) or "none"
    else:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
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
        values = _values(run)
        rows = [[key, _value(values[key]), origin] for key, origin in run.described.origins.items() if key in values]
        given = [row for row in rows if row[2] != "default"]
        yield PageTable(
            f"{run.name}: values that are not defaults", ["key", "value", "from"], given, folded=len(runs) > 1
        )
        yield PageTable(f"{run.name}: all {len(rows)} values", ["key", "value", "from"], rows, folded=True)


def _values(run: RunHistory) -> dict[str, Any]:
    from megatron.config.catalog import dotted
    from megatron.config.tree import leaves, thaw

    assert run.described is not None
    return {dotted(path): value for path, value in leaves(thaw(run.described.config.model_dump()))}


def _value(value: Any) -> str:
    text = "(not there)" if value is ABSENT else shown_value(value)
    return text if len(text) <= LONG_VALUE else text[:LONG_VALUE] + " ..."
