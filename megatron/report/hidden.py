"""The share of messages hidden behind computation in two runs, before and after a change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from megatron.parallel.messages.durations import Duration, Durations

from .communication import RankAccount, table

FIELDS = ("phase", "group", "operation", "dtype")
HEADERS = ("messages", "ms", "exposed", "hidden")


class Shares(NamedTuple):
    """Messages of a kind in a step, as the mean of ranks.

    Attributes:
        messages: mean over steps.
        seconds: from each call to its end, as the median of the steps with such messages, since a machine may delay a
            single step.
        exposed: part of these without other work.
    """

    messages: float
    seconds: float
    exposed: float

    @property
    def hidden(self) -> float:
        """The share of `seconds` hidden behind computation, from 0 to 1."""
        return 1.0 - self.exposed / self.seconds if self.seconds else 0.0

    def cells(self) -> list[str]:
        """For `HEADERS`, with times in milliseconds."""
        return [f"{self.messages:g}", f"{1e3 * self.seconds:.2f}", f"{1e3 * self.exposed:.2f}", f"{self.hidden:.0%}"]


@dataclass(frozen=True)
class TimedSteps:
    """The timed steps of a run, without the first one, which also starts things for later ones.

    Attributes:
        ranks: number of ranks.
        shares: by phase, group, operation and type.
    """

    steps: tuple[int, ...]
    ranks: int
    shares: Mapping[tuple[str, ...], Shares]

    @classmethod
    def of(cls, run: str, accounts: Mapping[int, RankAccount]) -> TimedSteps:
        """From the accounts of a run.

        Raises:
            ValueError: fewer than two steps have times.
        """
        steps = sorted(set.intersection(*(set(each.times) for each in accounts.values())))[1:]
        if not steps:
            raise ValueError(
                f"{run} has no times of two steps: train with logging.communication=times and logging.every below the "
                "number of steps"
            )
        found: dict[tuple[str, ...], list[Duration]] = {}
        for step in steps:
            every = Durations(entry for each in accounts.values() for entry in each.times[step])
            for key, duration in every.by(*FIELDS).items():
                found.setdefault(key, []).append(duration)
        ranks = len(accounts)
        return cls(tuple(steps), ranks, {key: _middle(each, ranks, len(steps)) for key, each in sorted(found.items())})

    @property
    def total(self) -> Shares:
        return Shares(*map(sum, zip(*self.shares.values(), strict=True))) if self.shares else Shares(0, 0.0, 0.0)

    def facts(self) -> dict[str, Any]:
        calls = [
            {**dict(zip(FIELDS, key)), **each._asdict(), "hidden": each.hidden} for key, each in self.shares.items()
        ]
        return {"steps": list(self.steps), "ranks": self.ranks, "calls": calls}


def _middle(durations: list[Duration], ranks: int, steps: int) -> Shares:
    return Shares(
        sum(each.messages for each in durations) / ranks / steps,
        median(each.seconds for each in durations) / ranks,
        median(each.exposed for each in durations) / ranks,
    )


def side_by_side(before: TimedSteps, after: TimedSteps) -> str:
    """A table of both runs. Kinds of messages that one of them lacks have dashes there."""
    both = (before, after)
    lines = [
        [*(name or "-" for name in key), *(cell for each in both for cell in _cells(each.shares.get(key)))]
        for key in sorted({*before.shares, *after.shares})
    ]
    lines.append(["all", "", "", "", *(cell for each in both for cell in each.total.cells())])
    headers = ["phase", "group", "operation", "type", *(f"{when}: {HEADERS[0]}" if at == 0 else name
               for when in ("before", "after") for at, name in enumerate(HEADERS))]  # fmt: skip
    counted = " and ".join(f"{len(each.steps)} steps of {each.ranks} ranks" for each in both)
    return f"before and after, median of {counted}:\n{table(headers, lines)}"


def _cells(shares: Shares | None) -> list[str]:
    return ["-"] * len(HEADERS) if shares is None else shares.cells()
