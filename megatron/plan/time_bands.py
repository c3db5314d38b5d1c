"""Use of a run's wall time, from the device's peak down to wall-clock MFU, in bands that sum to all of it.

A run's own records come first: its ledger (starts, evaluation, checkpoints, restarts, phases of steps), the times of
its messages and its traces. Everything else is computed as in `step` and marked as derived.

On a CPU the phases of a step measure the work itself. A GPU works asynchronously, so the shares within a step come from
a trace or from the formulas."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.config import Config, ConfigError, read_resolved
from megatron.config.arithmetic.pipeline_costs import bubble_factor
from megatron.config.problems import UserError
from megatron.model.costs.describe import training_operations
from megatron.parallel.layout.layout import Layout
from megatron.parallel.messages.traffic import Durations
from megatron.report.communication import FOLDER as ACCOUNTS
from megatron.report.communication import read_accounts, table
from megatron.report.console import duration
from megatron.report.figures import new_figure, write_figure
from megatron.report.ledger import Goodput, goodput, read_ledger
from megatron.report.peaks import device_peak
from megatron.report.trace import PASSES, TraceTimes, read_traces

from .devices import Device, known_devices
from .prediction import choice_of, planned_on
from .shapes import Shapes
from .step import StepEstimator, StepTime

TITLES = {  # of the bands, in their order
    "matrix": "matrix products, at the peak",
    "below": "matrix products, below the peak",
    "attention": "attention and scans",
    "memory": "memory-bound operations",
    "recompute": "recomputation",
    "optimizer": "optimizer",
    "bubble": "pipeline bubble",
    "communication": "exposed communication",
    "data": "waiting for data",
    "hooks": "logging and other hooks",
    "host": "between operations",
    "start": "first start",
    "evaluation": "evaluation",
    "save": "checkpoints",
    "restarts": "restarts",
    "end": "after the last step",
}
WITHIN = ("matrix", "below", "attention", "memory", "recompute", "optimizer", "bubble", "communication", "data",
          "hooks", "host")  # fmt: skip
COMPUTED = ("matrix", "below", "attention", "memory", "recompute", "host")  # of a step's passes on a CPU
LEDGER, TRACE, FORMULAS = "ledger", "trace", "formulas"


@dataclass(frozen=True)
class Band:
    """A part of the wall time."""

    name: str  # a key of `TITLES`
    seconds: float  # of one device
    measured: bool  # by the run itself, otherwise derived
    source: str  # what it is known from


def _bands(seconds: Mapping[str, float], measured: bool, source: str) -> dict[str, Band]:
    return {name: Band(name, taken, measured, source) for name, taken in seconds.items()}


@dataclass(frozen=True)
class TimeProfile:
    """A run's time."""

    run: str  # its directory
    device: str  # device, ranks, compute: what it ran on
    ranks: int
    compute: str
    completed: int  # updates that were kept
    wall: float  # seconds of all its starts
    bands: tuple[Band, ...]  # their seconds sum to `wall`
    peak: float | None  # TFLOP/s of one device (from `peak_source`), None if unknown
    peak_source: str
    flops: float  # of the model per device in all kept steps (`Totals.training_flops`)
    matrix_rate: float | None  # TFLOP/s of matrix products, None if unknown

    def seconds(self, *names: str) -> float:
        return sum(each.seconds for each in self.bands if each.name in names)

    def utilisation(self, seconds: float) -> float | None:
        """The model's FLOPs in `seconds` as a share of the peak."""
        return self.flops / seconds / (self.peak * 1e12) if self.peak and seconds > 0 else None

    @property
    def mfu(self) -> float | None:
        """Of the wall time."""
        return self.utilisation(self.wall)

    def to_json(self) -> dict[str, Any]:
        bands = [{**asdict(each), "title": TITLES[each.name], "share": each.seconds / self.wall} for each in self.bands]
        return {**asdict(self), "mfu": self.mfu, "steps_mfu": self.utilisation(self.seconds(*WITHIN)), "bands": bands}


def profile(run: str | Path, device: str | None = None, machine: str | None = None) -> TimeProfile:
    """The account of a run.

    Args:
        run: its directory.
        device: a name in the table of devices, for runs that have not written theirs, or one of `machine`.
        machine: a file with further devices.

    Raises:
        UserError: its files are missing, damaged, or have no times.
    """
    folder = Path(run)
    try:
        config = read_resolved(folder / "config.yml")
        entries = read_ledger(folder / "ledger.jsonl")
        trace = read_traces(folder)
        accounts = read_accounts(folder) if (folder / ACCOUNTS).is_dir() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{run} cannot be read as a run: {error}") from error
    account = goodput(entries)
    began = [each for each in entries if each.get("event") in ("start", "resume")]
    if not began or "ranks" not in began[-1] or account.wall <= 0:
        raise UserError(f"{run} has no account of its time: its ledger.jsonl has no start")
    messages = [each.times for each in accounts.values() if each.times]
    told = _Told(config, int(began[-1]["ranks"]), account, trace, messages)
    return _profile(str(run), told, *_device(began[-1].get("device"), device, machine))


def _device(written: str | None, asked: str | None, machine: str | None) -> tuple[str, Device | None]:
    """The device's own name, and its entry in the table."""
    table = known_devices(machine)[0]
    if asked is not None:
        if asked not in table:
            raise UserError(f"--device {asked}: must be one of {', '.join(table)}")
        return written or table[asked].name, table[asked]
    name = written or "cpu"
    return name, next((each for each in table.values() if each.name == name), None)


@dataclass(frozen=True)
class _Told:
    config: Config
    ranks: int
    account: Goodput
    trace: TraceTimes | None
    messages: list[dict[int, Durations]]  # of each rank that has timed some, durations by step

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.config, self.ranks)

    @cached_property
    def shapes(self) -> Shapes:
        return Shapes(self.config, self.ranks)

    def predicted(self, device: Device | None) -> StepTime | None:
        """A step by formulas. None if they do not cover it."""
        if device is None or self.ranks % (per_host := min(device.per_host, self.ranks)):
            return None
        if (at := planned_on(self.config, self.ranks, device, per_host)) is None:
            return None
        try:
            return StepEstimator(self.config, self.shapes, at).step(self.config, choice_of(self.config))
        except ConfigError:  # its peak is unknown
            return None

    def products(self) -> float:
        """FLOPs of products with weights, forward and backward, of one device in a step, over all stages."""
        choice, training = choice_of(self.config), self.config.training
        one = sum(
            2.0 * each.rows * each.columns * each.count * each.share
            for place in range(self.shapes.places)
            for each in self.shapes.layer(place, choice).matrices
        )
        ranks = self.layout.data * choice.context * self.layout.columns  # each has a part of a row of the grid
        tokens = (training.global_batch_size or 0) * training.sequence_length / ranks
        return 3.0 * one * tokens / choice.pipeline

    def exposed(self) -> float | None:
        """Seconds per step of messages that computation did not hide, mean over ranks and timed steps."""
        own = [each.exposed for rank in self.messages for step in rank.values() for _, each in step]
        steps = sum(len(rank) for rank in self.messages)
        return sum(own) / steps if steps else None


def _profile(run: str, told: _Told, name: str, device: Device | None) -> TimeProfile:
    account, compute = told.account, told.config.precision.compute
    peak = device_peak(name, compute, told.config.logging.peak_tflops)
    tflops, source = peak.tflops, peak.source
    if tflops is None and device is not None and compute in (device.tflops or {}):
        tflops, source = (device.tflops or {})[compute], f"{device.name} in the table of devices, {compute}"
    predicted = told.predicted(device)
    of_steps = _on_host(told, predicted) if name == "cpu" else _on_device(told, predicted)
    products = told.products() * account.completed
    bands, rate = _split_matrix(of_steps, products, tflops)
    seconds = account.seconds
    restarts = seconds["lost"] + seconds["detection"] + seconds["wait"] + account.again
    outside = {
        "start": seconds["start"] - account.again,
        "evaluation": seconds["evaluation"],
        "save": seconds["save"],
        "restarts": restarts,
        "end": seconds["end"],
    }
    bands |= _bands(outside, True, LEDGER)
    return TimeProfile(
        run=run,
        device=name,
        ranks=told.ranks,
        compute=compute,
        completed=account.completed,
        wall=account.wall,
        bands=tuple(bands[each] for each in TITLES if each in bands),
        peak=tflops,
        peak_source=source,
        flops=training_operations(told.config, account.completed) / told.ranks,
        matrix_rate=rate,
    )


def _on_host(told: _Told, predicted: StepTime | None) -> dict[str, Band]:
    """The bands of kept steps if phases measure the work itself."""
    account, within = told.account, told.account.within
    passes = sum(within.get(phase, 0.0) for phase in PASSES)
    bubble = _bubble(told.config, told.layout, passes, within.get("waiting", 0.0))
    waiting, hooks = within.get("waiting", 0.0) - bubble, within.get("hooks", 0.0) + within.get("exchange", 0.0)
    own = {"optimizer": within.get("optimizer", 0.0), "communication": waiting}
    own |= {"data": within.get("data", 0.0), "hooks": hooks}
    bands = _bands(own, True, LEDGER)
    if told.layout.pipeline > 1:
        bands["bubble"] = Band("bubble", bubble, False, FORMULAS)
    if told.trace is not None:
        own = dict(told.trace.seconds)
        # Time without an operation and without waiting for others is Python's.
        own["host"] = max(0.0, own["host"] + own["communication"] - told.trace.waiting)
        own = {each: own[each] for each in COMPUTED if each in own}
        scale, source, measured = passes / max(sum(own.values()), 1e-12), TRACE, True
        own = {each: seconds * scale for each, seconds in own.items()}
    else:
        own, source, measured = _formulas(predicted, account.completed), FORMULAS, False
    bands |= _bands({each: seconds for each, seconds in own.items() if each in COMPUTED}, measured, source)
    return _fitted(bands, account.seconds["kept"], passes)


def _on_device(told: _Told, predicted: StepTime | None) -> dict[str, Band]:
    """The bands of kept steps if the device works asynchronously."""
    account = told.account
    kept, data = account.seconds["kept"], account.within.get("data", 0.0)
    bands: dict[str, Band] = {}
    if told.trace is not None:
        scale = kept / max(told.trace.window, 1e-12)
        own = {each: seconds * scale for each, seconds in told.trace.seconds.items()}
        data = min(data, own["host"])  # the loader may work while the device does
        own["host"] -= data
        work = kept - data - own["communication"] - own["host"]
        bubble = _bubble(told.config, told.layout, work, own["communication"])
        own["communication"] -= bubble
        bands = _bands(own, True, TRACE)
        if told.layout.pipeline > 1:
            bands["bubble"] = Band("bubble", bubble, False, FORMULAS)
    elif predicted is not None:
        own = _formulas(predicted, account.completed)
        bands = _bands(own, False, FORMULAS)
        exposed = told.exposed()
        if exposed is not None:
            bubble = own.get("bubble", 0.0)
            seconds = max(0.0, exposed * account.completed - bubble)
            bands["communication"] = Band("communication", seconds, True, "times of messages")
    bands["data"] = Band("data", data, True, LEDGER)
    return _fitted(bands, kept, kept - data)


def _bubble(config: Config, layout: Layout, work: float, waiting: float) -> float:
    """The part of a stage's waiting time due to the schedule: 1F1B leaves (p - 1) of m + p - 1 slots empty."""
    count = config.training.accumulation or 1
    ideal = work * (layout.pipeline - 1) * bubble_factor(config.parallel, count) / count
    return min(ideal, waiting)


def _formulas(predicted: StepTime | None, steps: int) -> dict[str, float]:
    if predicted is None:
        return {}
    parts = predicted.parts
    one = {
        "matrix": parts["matrix"],
        "attention": parts["attention"],
        "memory": parts["memory"] + parts["accumulate"],
        "recompute": parts["recompute"],
        "optimizer": parts["optimizer"],
        "bubble": parts["bubble"],
        "communication": parts["tensor"] + parts["expert"] + parts["context"] + parts["pipeline"] + parts["data"],
    }
    return {name: seconds * steps for name, seconds in one.items()}


def _fitted(bands: Mapping[str, Band], kept: float, room: float) -> dict[str, Band]:
    """The bands of kept steps, scaled so that they sum to them. The rest is `host`. Derived bands that are too long are
    reduced by one factor."""
    derived = {name: each for name, each in bands.items() if not each.measured and name != "bubble"}
    taken = sum(each.seconds for each in derived.values())
    factor = min(1.0, room / taken) if taken > 0 else 1.0
    found = {name: replace(x, seconds=x.seconds * (factor if name in derived else 1.0)) for name, x in bands.items()}
    host = found.pop("host", Band("host", 0.0, False, FORMULAS))
    rest = kept - sum(each.seconds for each in found.values())
    if rest < 0:  # rounding, and traces of other steps
        found = {name: replace(each, seconds=each.seconds * kept / (kept - rest)) for name, each in found.items()}
        rest = 0.0
    found["host"] = replace(host, seconds=rest)
    return found


def _split_matrix(bands: dict[str, Band], products: float, peak: float | None) -> tuple[dict[str, Band], float | None]:
    """Matrix products at the peak and the rest of their time, and their TFLOP/s."""
    whole = bands.get("matrix")
    if whole is None or whole.seconds <= 0:
        return bands, None
    rate = products / whole.seconds / 1e12
    if peak is None:
        return bands, rate
    at_peak = min(whole.seconds, products / (peak * 1e12))
    return bands | {
        "matrix": Band("matrix", at_peak, False, f"shapes, and the peak, {whole.source}"),
        "below": Band("below", whole.seconds - at_peak, whole.measured, whole.source),
    }, rate


WORTH = 0.03  # of the wall time: from here on a band is worth a word
ADVICE = {
    "below": "products reach {rate}: try a larger training.micro_batch_size, and the sizes of deepy plan lint",
    "attention": "try the kernels that model.kernels and docs/performance.md name, or a shorter "
    "training.sequence_length",
    "memory": "norms, activations and residual sums: try training.compile",
    "recompute": "where memory allows, take training.activation_checkpointing.mode selective or none "
    "(deepy train --rehearse shows whether it fits)",
    "optimizer": "share it over data parallel ranks with zero.stage, or update less often with a larger "
    "training.global_batch_size",
    "bubble": "more micro-batches (a smaller training.micro_batch_size, a larger training.global_batch_size) or fewer "
    "stages (parallel.pipeline)",
    "communication": "logging.communication=times shows which messages, and which rank is last. Fewer tensor parallel "
    "ranks, zero.overlap and larger micro-batches send less often",
    "data": "more data.workers and data.prefetch, or a faster disk",
    "hooks": "log less often (logging.every), and check hooks of your own. Writing a trace is one too",
    "start": "a longer run makes it small, a checkpoint that is read from a slow disk does not",
    "evaluation": "evaluate less often (evaluation.every) or on less (evaluation.batches)",
    "save": "save less often (checkpoint.auto finds how often), or in the background (checkpoint.asynchronous)",
    "restarts": "ledger.jsonl says why the run failed, and checkpoint.auto loses least",
    "end": "evaluation.at_end, checkpoint.at_end and logging.curve are what happens there",
}
HOST = {
    True: "operations are too small for what it takes to start them: try a larger training.micro_batch_size, or "
    "training.compile",
    False: "the cause of this time is unknown: profile a few steps (logging.profile.start) and compare again",
}


def text(found: TimeProfile) -> str:
    """The whole account."""
    rows = [
        [
            TITLES[each.name],
            duration(each.seconds) if each.seconds >= 60 else f"{each.seconds:.2f} s",
            f"{each.seconds / found.wall:.1%}",
            "measured" if each.measured else "derived",
            each.source,
        ]
        for each in found.bands
        if each.seconds > 0
    ]
    rows.append(["wall time", duration(found.wall), "100.0%", "", ""])
    head = f"{found.run}: {found.completed:,} steps on {found.ranks} x {found.device} in {found.compute}"
    lines = [head, table(["band", "time", "share", "", "from"], rows), "", *_cascade(found)]
    first = advice(found)
    return "\n".join([*lines, *(["", "what to change first:", *(f"  {each}" for each in first)] if first else [])])


def _cascade(found: TimeProfile) -> list[str]:
    """From the peak down to wall-clock MFU."""
    if found.peak is None:
        return [f"MFU is not known: {found.peak_source}"]
    lines = [f"peak             {found.peak:,.4g} TFLOP/s ({found.peak_source})"]
    if found.matrix_rate is not None:
        lines.append(f"matrix products  {found.matrix_rate / found.peak:.1%} of it")
        if found.matrix_rate > found.peak:
            lines.append("                 the peak is too low for this device: give its own (logging.peak_tflops)")
    steps = found.seconds(*WITHIN)
    busy = steps - found.seconds("data", "hooks", "communication", "bubble")
    for name, seconds in (("computation", busy), ("steps", steps), ("wall time", found.wall)):
        share = found.utilisation(seconds)
        if share is not None:
            lines.append(f"{name:<15}  {share:.1%} MFU")
    return lines


def advice(found: TimeProfile) -> list[str]:
    """How to reduce the largest bands: up to three sentences."""
    able = sorted(
        (x for x in found.bands if x.name != "matrix" and x.seconds >= WORTH * found.wall), key=lambda x: -x.seconds
    )
    rate = "little of the peak"
    if found.peak and found.matrix_rate is not None:
        rate = f"{found.matrix_rate / found.peak:.0%} of the peak"
    said = []
    for each in able[:3]:
        words = HOST[each.measured] if each.name == "host" else ADVICE[each.name].format(rate=rate)
        said.append(f"{TITLES[each.name]} ({each.seconds / found.wall:.1%}): {words}")
    return said


def picture(found: TimeProfile, path: str | Path) -> None:
    """Draw the bands as a PNG, each from the end of the one before. Derived bands are hatched."""
    bands = [each for each in found.bands if each.seconds > 0]
    figure = new_figure(9, 0.9 + 0.34 * len(bands), 120)
    axes = figure.add_subplot()
    begin = 0.0
    for place, each in enumerate(bands):
        share = 100 * each.seconds / found.wall
        colour = "C2" if each.name == "matrix" else "C0" if each.name in WITHIN else "C1"
        hatch = "" if each.measured else "////"
        axes.barh(place, share, left=begin, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        axes.text(begin + share + 0.8, place, f"{share:.1f}%", va="center", fontsize=8)
        begin += share
    axes.set_yticks(range(len(bands)), [TITLES[each.name] for each in bands], fontsize=8)
    axes.invert_yaxis()
    mfu = "" if found.mfu is None else f", MFU {found.mfu:.1%}"
    axes.set(xlim=(0, 109), xlabel=f"% of {duration(found.wall)} wall time (hatched: derived)")
    axes.set_title(f"{Path(found.run).name}: {found.ranks} x {found.device}, {found.compute}{mfu}", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    write_figure(figure, path)
