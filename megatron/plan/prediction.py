"""Predicted needs of a run, in one line before it starts, corrected by earlier runs on this machine.

Closed formulas do not include a machine's clocks, library versions and other load. Each run that ends appends its
predicted and measured needs to a file of the user (`history_file`). With enough runs of one device, later predictions
are multiplied by the median ratio of measured to predicted."""

import json
import math
import os
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.config.arithmetic.batches import batches_of

from .candidate import PARALLEL, Candidate
from .devices import Cluster, Device, known_devices
from .memory import TIGHT, Memory, memory
from .shapes import Shapes
from .step import StepEstimator

ENOUGH = 3  # runs of one device before their errors correct a prediction
NEAR = 8.0  # times longer or shorter a step may be predicted: what a kernel's start costs is all of a small step
RECENT = 50  # runs whose errors count: drivers and libraries change
READ = 4 << 20  # bytes at the end of the file that are read
TOO_LARGE = "warning: that is more than a device has: `deepy plan` shows layouts that fit"
YEAR = 365.25 * 86400
LONG = "warning: longer than a year. Use more devices, fewer steps or a smaller model"
CLOSE = "      near the limit: `deepy train --rehearse` counts what formulas estimate"


@dataclass(frozen=True)
class Need:
    """Needs of a run, predicted or measured."""

    seconds: float  # of a step
    memory: float  # bytes on the rank that needs most (predicted), or of rank 0 (measured)


@dataclass(frozen=True)
class HistoryEntry:
    """One run in the history."""

    device: str  # its name, as torch gives it
    compute: str  # fp32, bf16 or fp16
    kinds: tuple[str, ...]  # of layers, sorted
    ranks: int  # ranks, layout: what it ran on
    layout: str
    predicted: Need  # by the formulas, without correction
    measured: Need  # median of its steps, and peak memory of rank 0


@dataclass(frozen=True)
class Prediction:
    """The formulas' prediction of a run, and its correction."""

    entry: HistoryEntry  # the run, with nothing measured
    corrected: Need  # the formulas' numbers, corrected by `runs` runs (none: 0)
    runs: int
    capacity: float  # bytes of a device, 0 if unknown

    @property
    def fits(self) -> bool:
        return not self.capacity or self.corrected.memory <= self.capacity

    def text(self, steps: int, full: float | None = None) -> str:
        """Two lines of at most 80 columns at the start of a run with `steps` remaining. Further ones if the memory is
        near or above the device's, or the run is absurdly long.

        Args:
            full: the remaining samples, as steps of `training.global_batch_size`. None: `steps`.
        """
        need = self.corrected
        share = f" of {self.capacity / 2**30:,.0f}" if self.capacity else ""
        basis = f"corrected by {self.runs} runs on this device" if self.runs else "by formulas alone"
        close = self.capacity and need.memory > TIGHT * self.capacity
        step = span(need.seconds) if need.seconds >= 1000 else f"{need.seconds:.3g} s"
        seconds = need.seconds * (steps if full is None else full)
        time, last = f", {step} a step,\n      {span(seconds)} for {steps:,} steps", ""
        if seconds > YEAR:
            last = f"\n{LONG}"
        if self.entry.device == "cpu" and not self.runs:  # its rates are another machine's
            time, last = f"\n      time unknown until {ENOUGH} runs on this CPU have ended", ""
        if close:
            last += f"\n{CLOSE if self.fits else TOO_LARGE}"
        return f"plan: {need.memory / 2**30:,.1f}{share} GiB on the fullest device{time} ({basis}){last}"


def steps_after(config: Config, done: int) -> tuple[int, float]:
    """Steps from update `done` to the end of the run, or to the step where it stops. Then their samples as steps of
    `training.global_batch_size`."""
    batches, end = batches_of(config), max(config.training.stop_at_step or config.training.steps, done)
    return end - done, (batches.before(end) - batches.before(done)) / batches.sizes[-1]


def span(seconds: float) -> str:
    """A time in the unit that a person would use."""
    for size, unit in ((YEAR, "years"), (86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}"
    return "1 second" if round(seconds) == 1 else f"{seconds:,.0f} seconds"


def predict(config: Config, ranks: int, device: str, per_host: int, capacity: float = 0.0) -> Prediction | None:
    """Needs of a run. None if its device is not known, or formulas do not cover it.

    Args:
        config: resolved for the run's own ranks.
        device: as torch names it, or "cpu".
        per_host: ranks of a host.
        capacity: bytes of a device, 0 for the table's.
    """
    found = next((each for each in known_devices()[0].values() if each.name == device), None)
    at = None if found is None or ranks % per_host else planned_on(config, ranks, found, per_host)
    if found is None or at is None:
        return None
    choice = choice_of(config)
    shapes = Shapes(config, ranks)
    need = Need(
        StepEstimator(config, shapes, at).step(config, choice).seconds, memory(config, shapes, choice, at).total
    )
    alike = (device, config.precision.compute, kinds_of_layers(config), ranks)
    entry = HistoryEntry(*alike, str(choice), need, Need(0.0, 0.0))
    factor, runs = correction(read_history(), entry)
    corrected = Need(need.seconds * factor.seconds, need.memory * factor.memory)
    return Prediction(entry, corrected, runs, capacity or found.bytes)


def planned_memory(config: Config, ranks: int, device: Device) -> Memory | None:
    """Memory of the rank that needs most, by the formulas. None if they do not cover the configuration."""
    at = planned_on(config, ranks, device, min(device.per_host, ranks))
    return None if at is None else memory(config, Shapes(config, ranks), choice_of(config), at)


def planned_on(config: Config, ranks: int, device: Device, per_host: int) -> Cluster | None:
    """The machine that the formulas assume. None if experts and the layers around them are sharded differently: these
    have no formula."""
    if config.parallel.expert_tensor not in (None, config.parallel.tensor):
        return None
    return Cluster(device, known_devices()[1]["ib400"], ranks, per_host)


def kinds_of_layers(config: Config) -> tuple[str, ...]:
    """Sorted."""
    return tuple(sorted({word for block in config.model.blocks for word in re.findall(r"[a-z]\w*", str(block))}))


def choice_of(config: Config) -> Candidate:
    """The layout of a configuration as a candidate."""
    parallel = config.parallel
    return Candidate(
        zero=config.zero.stage,
        micro_batch=config.training.micro_batch_size or 1,
        recompute=config.training.activation_checkpointing.mode,
        **{name: getattr(parallel, name) for name in PARALLEL},
    )


def correction(history: Iterable[HistoryEntry], entry: HistoryEntry) -> tuple[Need, int]:
    """Factors for the formulas, and the number of runs behind them: runs of the same device and type with steps of
    about the same length. If there are enough runs with the same kinds of layers, only these count, and of these only
    runs on the same layout if there are enough. The overhead of a small step depends on both."""
    alike = [
        each
        for each in history
        if (each.device, each.compute) == (entry.device, entry.compute)
        and 1 / NEAR <= each.predicted.seconds / entry.predicted.seconds <= NEAR
    ]
    same = [each for each in alike if each.kinds == entry.kinds]
    there = [each for each in same if (each.ranks, each.layout) == (entry.ranks, entry.layout)]
    taken = next((each[-RECENT:] for each in (there, same, alike) if len(each) >= ENOUGH), None)
    if taken is None:
        return Need(1.0, 1.0), 0
    return Need(*(math.exp(statistics.median(each)) for each in zip(*map(_errors, taken)))), len(taken)


def _errors(entry: HistoryEntry) -> tuple[float, float]:
    """Logarithms of measured over predicted: time, memory."""
    predicted, measured = entry.predicted, entry.measured
    return math.log(measured.seconds / predicted.seconds), math.log(measured.memory / predicted.memory)


def history_file() -> Path:
    """$XDG_STATE_HOME/deepy/predictions.jsonl, by default below ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "deepy" / "predictions.jsonl"


def remember(entry: HistoryEntry, measured: Need, path: Path | None = None) -> None:
    """Append a run to the history.

    Raises:
        OSError: it cannot be written.
    """
    path = path or history_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"time": round(time.time()), **asdict(entry), "measured": asdict(measured)}
    line = json.dumps(values) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, line.encode())  # one write: lines of runs that end at once do not mix
    finally:
        os.close(handle)


def read_history(path: Path | None = None) -> list[HistoryEntry]:
    """The runs in the history, oldest first. Damaged lines are skipped."""
    path = path or history_file()
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ))
            lines = file.read(READ).splitlines()
    except OSError:
        return []
    return [entry for line in lines if (entry := _entry(line)) is not None]


def _entry(line: bytes) -> HistoryEntry | None:
    try:
        values = json.loads(line)
        needs = [Need(*(float(values[name][k]) for k in ("seconds", "memory"))) for name in ("predicted", "measured")]
        if not all(0 < value < 1e18 for need in needs for value in (need.seconds, need.memory)):
            return None
        kinds = tuple(map(str, values["kinds"]))
        device, compute, layout = (str(values[name]) for name in ("device", "compute", "layout"))
        return HistoryEntry(device, compute, kinds, int(values["ranks"]), layout, *needs)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class Error:
    """Errors of predictions: medians of |measured / predicted - 1|."""

    runs: int  # how many
    alone: Need  # without correction, over all runs
    corrected: Need | None  # over runs that had earlier runs for a correction, None without any
    corrections: int  # how many had


def errors(history: Sequence[HistoryEntry]) -> dict[tuple[str, str], Error]:
    """By device and compute type."""
    alone: dict[tuple[str, str], list[Need]] = {}
    corrected: dict[tuple[str, str], list[Need]] = {}
    for place, entry in enumerate(history):
        factor, runs = correction(history[:place], entry)
        seconds, size = (math.exp(each) for each in _errors(entry))
        key = (entry.device, entry.compute)
        alone.setdefault(key, []).append(Need(abs(seconds - 1), abs(size - 1)))
        if runs:
            after = Need(abs(seconds / factor.seconds - 1), abs(size / factor.memory - 1))
            corrected.setdefault(key, []).append(after)
    found = {}
    for key, needs in alone.items():
        others = corrected.get(key, [])
        found[key] = Error(len(needs), _median(needs), _median(others) if others else None, len(others))
    return found


def _median(needs: Sequence[Need]) -> Need:
    return Need(statistics.median(each.seconds for each in needs), statistics.median(each.memory for each in needs))


def document(history: Sequence[HistoryEntry]) -> dict[str, Any]:
    """The history and its errors as one JSON document."""
    found = [{"device": key[0], "compute": key[1], **asdict(each)} for key, each in errors(history).items()]
    return {"file": str(history_file()), "errors": found, "runs": [asdict(each) for each in history]}
