"""Durations of a run's messages, and their share hidden behind computation in two runs."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatron.parallel.messages.curve import CostCurve, choose_curve
from megatron.parallel.messages.traffic import Duration, Durations, MessageKind, Tally, bus_bandwidth

from .communication import TIMES, RankAccount, milliseconds, regular_calls, table
from .figures import new_figure, write_figure

FIELDS = ("phase", "group", "operation", "dtype")
PHASES = ("forward", "recompute", "backward", "update", "exchange")  # in the order of a step


@dataclass(frozen=True)
class Slowest:
    """The slowest link and rank."""

    link: str = ""  # ranks of the group with the least bus bandwidth, as text. Empty if no transfer is known.
    bandwidth: float = 0.0  # bytes per second of the link
    rank: int = -1  # the rank that the others waited for most often, -1 if none
    last: int = 0  # last, of: it came last in `last` of its `of` collectives
    of: int = 0


def slowest(times: Mapping[int, Durations]) -> Slowest:
    """From durations by rank. A link is compared by the operation with the most bytes on it. Messages of less than 4
    KiB are skipped: they measure latency rather than bandwidth."""
    together = sum(times.values(), Durations())
    links: dict[str, tuple[int, float]] = {}
    for kind, each in Durations((kind._replace(phase="", dtype=""), each) for kind, each in together):
        rate = bus_bandwidth(kind, each)
        if rate is not None and each.bytes >= 4096 * each.messages:
            links[kind.members] = max(links.get(kind.members, (0, 0.0)), (each.bytes, rate))
    link = min(links, key=lambda members: links[members][1], default="")
    counts = {}
    for rank, durations in times.items():
        own = [each for kind, each in durations if kind.operation not in ("send", "recv")]
        counts[rank] = (sum(each.last for each in own), sum(each.split for each in own))
    rank = max(counts, key=lambda each: counts[each], default=-1)
    last, of = counts.get(rank, (0, 0))
    return Slowest(link, links[link][1] if link else 0.0, rank if last else -1, last, of)


class StepRow(NamedTuple):
    """Messages of a kind, with sums over ranks."""

    key: tuple[str, ...]
    duration: Duration
    bus: float | None  # bytes per second on the bus, None if unknown
    curve: float | None  # seconds of their transfer by the machine's curve, None without one


@dataclass(frozen=True)
class StepTimes:
    """Times of one step, summed over ranks."""

    step: int
    ranks: int  # number of ranks
    durations: Durations
    slowest: Slowest
    hosts: Mapping[int, str] = field(default_factory=dict)
    curves: tuple[CostCurve, ...] = ()  # measured durations of collectives on this machine

    @classmethod
    def of(
        cls, accounts: Mapping[int, RankAccount], step: int | None, curves: tuple[CostCurve, ...] = ()
    ) -> "StepTimes | None":
        """Of a step, or of the last step that all these ranks have timed. None if there is none."""
        both = set.intersection(*(set(each.times) for each in accounts.values()))
        if not both or (step is not None and step not in both):
            return None
        at = max(both) if step is None else step
        times = {rank: each.times[at] for rank, each in accounts.items()}
        hosts = {rank: str(each.facts["host"]) for rank, each in accounts.items() if "host" in each.facts}
        return cls(at, len(times), sum(times.values(), Durations()), slowest(times), hosts, curves)

    def expected(self, kind: MessageKind, duration: Duration) -> float | None:
        """Seconds of these messages by the machine's curve. None if it has none for their kind."""
        members = [int(each) for each in kind.members.split()]
        hosts = {self.hosts.get(each, "") for each in members}
        curve = choose_curve(self.curves, kind.operation, len(members), len(hosts), kind.group)
        if curve is None or not duration.bytes:
            return None
        return duration.messages * curve.seconds(duration.bytes / duration.messages)

    def rows(self) -> list[StepRow]:
        found = {key: StepRow(key, each, None, None) for key, each in self.durations.by(*FIELDS).items()}
        for key, row in found.items():
            own = [(k, each) for k, each in self.durations if (k.phase, k.group, k.operation, k.dtype) == key]
            rates = [(each.transfer, rate) for kind, each in own if (rate := bus_bandwidth(kind, each)) is not None]
            if rates:
                mean = sum(seconds * rate for seconds, rate in rates) / sum(seconds for seconds, _ in rates)
                row = row._replace(bus=mean)
            expected = [self.expected(kind, each) for kind, each in own]
            if all(each is not None for each in expected):
                row = row._replace(curve=sum(each or 0.0 for each in expected))
            found[key] = row
        return list(found.values())

    def text(self) -> str:
        """A table of means per rank, and the slowest link and rank."""
        lines = []
        for key, each, rate, curve in self.rows():
            mean = each._replace(seconds=each.seconds / self.ranks, exposed=each.exposed / self.ranks,
                                 waiting=each.waiting / self.ranks)  # fmt: skip
            line = [*(name or "-" for name in key), *milliseconds(mean), "-" if rate is None else f"{rate / 1e9:.3g}"]
            if self.curves:
                line.append("-" if curve is None else f"{1e3 * curve / self.ranks:.3f}")
            lines.append(line)
        headers = ["phase", "group", "operation", "type", *TIMES, "bus GB/s", *(["by curve"] if self.curves else [])]
        whose = "one rank" if self.ranks == 1 else f"mean of {self.ranks} ranks"
        text = f"times of step {self.step}, {whose}:\n{table(headers, lines)}"
        found = self.slowest
        if found.link:
            text += f"\nslowest link: ranks {found.link}, {found.bandwidth / 1e9:.3g} GB/s on the bus"
        if found.rank >= 0 and self.ranks > 1:
            text += f"\nslowest rank: {found.rank}, which came last to {found.last} of {found.of} collectives"
        return text

    def facts(self) -> dict[str, Any]:
        """For JSON. Seconds and bytes are sums over ranks."""
        calls = [
            {**dict(zip(FIELDS, key)), **each._asdict(), "bus_bytes_per_second": rate, "curve_seconds": curve}
            for key, each, rate, curve in self.rows()
        ]
        return {"step": self.step, "ranks": self.ranks, "slowest": asdict(self.slowest), "calls": calls}


def save_account(
    path: str | Path, counted: Tally, predicted: Tally | None, times: StepTimes | None, title: str
) -> None:
    """Draw a step as a PNG: bytes by phase, the predicted ones pale next to the counted. Also times, if any, as
    means of ranks."""
    panels = 1 if times is None else 2
    figure = new_figure(9 if panels == 1 else 14, 4.5, 120)
    figure.suptitle(title)
    drawn = figure.subplots(1, panels, squeeze=False)[0]
    colours = {kind: f"C{place}" for place, kind in enumerate(counted.by("group", "operation"))}
    _draw_bytes(drawn[0], counted, predicted, colours)
    if times is not None:
        _draw_times(drawn[1], times, colours)
    write_figure(figure, path)


def _draw_times(axes: Any, times: StepTimes, colours: Mapping[tuple, str]) -> None:
    """Two bars for each phase: waiting for the last rank (hatched) and transfer, by operation, and the exposed time."""
    found = times.durations.by("phase", "group", "operation")
    phases, scale = _in_order(phase for phase, *_ in found), 1e3 / times.ranks
    for place, phase in enumerate(phases):
        floor, exposed = 0.0, 0.0
        for kind, colour in colours.items():
            each = found.get((phase, *kind))
            if each is None:
                continue
            for height, hatch, opacity in ((each.transfer, "", 1.0), (each.waiting, "////", 0.35)):
                axes.bar(place - 0.2, height * scale, 0.36, floor, color=colour, hatch=hatch, alpha=opacity)
                floor += height * scale
            axes.bar(place + 0.2, each.exposed * scale, 0.36, exposed, color=colour)
            exposed += each.exposed * scale
    axes.set_xticks(range(len(phases)), [phase or "-" for phase in phases])
    axes.set(title="left: transfer, and waiting for the last rank (hatched), right: exposed")
    axes.set_ylabel(f"milliseconds of step {times.step}, mean of {times.ranks} ranks")
    axes.grid(axis="y", alpha=0.3)


def _in_order(phases: Iterable[str]) -> list[str]:
    known = {phase: place for place, phase in enumerate(PHASES)}
    return sorted(set(phases), key=lambda each: (known.get(each, len(known)), each))


def _draw_bytes(axes: Any, counted: Tally, predicted: Tally | None, colours: Mapping[tuple, str]) -> None:
    tallies = [("counted", counted, 1.0), *([("predicted", predicted, 0.45)] if predicted is not None else [])]
    phases = _in_order(phase for (phase,) in regular_calls(counted).by("phase"))
    width = 0.8 / len(tallies)
    for number, (_, tally, opacity) in enumerate(tallies):
        sizes, floor = tally.by("phase", "group", "operation"), [0.0] * len(phases)
        at = [place + (number - (len(tallies) - 1) / 2) * width for place in range(len(phases))]
        for kind, colour in colours.items():
            heights = [sizes.get((phase, *kind), (0, 0))[1] / 2**20 for phase in phases]
            label = " ".join(kind) if number == 0 else None
            axes.bar(at, heights, 0.95 * width, floor, color=colour, alpha=opacity, label=label)
            floor = [low + height for low, height in zip(floor, heights)]
    axes.set_xticks(range(len(phases)), [phase or "-" for phase in phases])
    axes.set(title="bytes of these ranks", ylabel="MiB per step")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, title="left: counted, right (pale): predicted" if predicted is not None else None)


HEADERS = ("messages", "ms", "exposed", "hidden")


class Shares(NamedTuple):
    """Messages of a kind in a step, as the mean of ranks."""

    messages: float  # mean over steps.
    # From each call to its end, as the median of the steps with such messages, since a machine may delay a single step
    seconds: float
    exposed: float  # part of these without other work

    @property
    def hidden(self) -> float:
        """The share of `seconds` hidden behind computation, from 0 to 1."""
        return 1.0 - self.exposed / self.seconds if self.seconds else 0.0

    def cells(self) -> list[str]:
        """For `HEADERS`, with times in milliseconds."""
        return [f"{self.messages:g}", f"{1e3 * self.seconds:.2f}", f"{1e3 * self.exposed:.2f}", f"{self.hidden:.0%}"]


@dataclass(frozen=True)
class TimedSteps:
    """The timed steps of a run, without the first one, which also starts things for later ones."""

    steps: tuple[int, ...]
    ranks: int  # number of ranks
    shares: Mapping[tuple[str, ...], Shares]  # by phase, group, operation and type

    @classmethod
    def of(cls, run: str, accounts: Mapping[int, RankAccount]) -> "TimedSteps":
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
        shares = {
            key: Shares(
                sum(each.messages for each in durations) / ranks / len(steps),
                median(each.seconds for each in durations) / ranks,
                median(each.exposed for each in durations) / ranks,
            )
            for key, durations in sorted(found.items())
        }
        return cls(tuple(steps), ranks, shares)

    @property
    def total(self) -> Shares:
        return Shares(*map(sum, zip(*self.shares.values(), strict=True))) if self.shares else Shares(0, 0.0, 0.0)

    def facts(self) -> dict[str, Any]:
        calls = [{**dict(zip(FIELDS, key)), **one._asdict(), "hidden": one.hidden} for key, one in self.shares.items()]
        return {"steps": list(self.steps), "ranks": self.ranks, "calls": calls}


def side_by_side(before: TimedSteps, after: TimedSteps) -> str:
    """A table of both runs. Kinds of messages that one of them lacks have dashes there."""
    both, dashes = (before, after), ["-"] * len(HEADERS)
    lines = []
    for key in sorted({*before.shares, *after.shares}):
        sides = [each.shares[key].cells() if key in each.shares else dashes for each in both]
        lines.append([*(name or "-" for name in key), *sides[0], *sides[1]])
    lines.append(["all", "", "", "", *(cell for each in both for cell in each.total.cells())])
    headers = ["phase", "group", "operation", "type", *(f"{when}: {HEADERS[0]}" if at == 0 else name
               for when in ("before", "after") for at, name in enumerate(HEADERS))]  # fmt: skip
    counted = " and ".join(f"{len(each.steps)} steps of {each.ranks} ranks" for each in both)
    return f"before and after, median of {counted}:\n{table(headers, lines)}"
