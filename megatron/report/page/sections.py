"""The sections of the report. Each is made from all runs, and omitted if no run has data for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.data.errors import DataError
from megatron.data.plan import SamplePlan
from megatron.data.plan_builder import build_plan

from ..console import duration, short_number
from ..curve import evenly, loads_over_even_share
from ..ledger import PARTS, goodput
from .charts import ChartLine, Charts, heat_map, shares
from .history import PageTable, RunHistory, Series, configuration_tables, event_table, sample_tables

NOISE = "noise_scale"
RECENT = 100  # estimates of the moving mean


def noise_scales(run: RunHistory, count: int | None) -> Series:
    """The gradient noise scale: mean noise over mean signal of the last `count` estimates, or of all so far, if both
    are above 0. A single step's estimate is not reliable."""
    noise, signal = run.metric(f"{NOISE}/noise"), run.metric(f"{NOISE}/signal")
    known, sums, found = dict(zip(signal.steps, signal.values)), [(0.0, 0.0)], Series()
    for step, value in zip(noise.steps, noise.values):
        if step not in known:
            continue
        above, below = sums[-1]
        sums.append((above + value, below + known[step]))
        first = sums[0 if count is None else max(len(sums) - 1 - count, 0)]
        above, below = sums[-1][0] - first[0], sums[-1][1] - first[1]
        if above > 0 and below > 0:
            found.add(step, above / below)
    return found


HEAT_MAP_COLUMNS = 300
OTHER_CHARTS = 60
NORMS = "statistics"
LAYERS_DRAWN = 8
DRAWN = tuple("loss lr grad_norm tokens_per_second tflops mfu step_seconds data_seconds memory_bytes".split())


@dataclass(frozen=True)
class PageSection:
    """A part of the page: charts and tables, in that order."""

    name: str
    title: str
    charts: Sequence[Any] = ()
    tables: Sequence[PageTable] = ()
    note: str = ""


def sections(runs: list[RunHistory], charts: Charts) -> list[PageSection]:
    """All sections that have something to show, in the order of the page."""
    rate = charts.lines("Learning rate", "learning rate", _curves(runs, "lr"))
    norm = charts.lines("Gradient norm before clipping", "norm", _curves(runs, "grad_norm", raw=True), log=True)
    makers = (_norms, _noise, _speed, _memory, _communication, _data, _experts, _other)
    made = [
        _overview(runs),
        _loss(runs, charts),
        _validation(runs, charts),
        _tasks(runs, charts),
        PageSection("recipe", "Learning rate and gradient norm", [rate, norm]),
        *(maker(runs, charts) for maker in makers),
        PageSection("samples", "Generated samples", tables=sample_tables(runs)),
        _goodput(runs),
        PageSection("events", "What happened", tables=[event_table(run) for run in runs]),
        PageSection("configuration", "Configuration", tables=list(configuration_tables(runs))),
    ]
    cleaned = [
        replace(each, charts=[chart for chart in each.charts if chart], tables=[one for one in each.tables if one.rows])
        for each in made
    ]
    return [each for each in cleaned if each.charts or each.tables or each.note]


def _curves(runs: list[RunHistory], key: str, *, raw: bool = False, scale: float = 1.0) -> list[ChartLine]:
    found = []
    for number, run in enumerate(runs):
        series = run.metric(key)
        scaled = Series(series.steps, [value * scale for value in series.values])
        found.append(ChartLine(run.name, scaled, run.clock(), run=number, raw=raw))
    return found


def _overview(runs: list[RunHistory]) -> PageSection:
    head = ["run", "steps", "tokens", "training loss", "validation loss", "median tokens/s", "state"]
    rows = []
    for run in runs:
        losses = run.metric("loss").values
        tail = losses[-max(len(losses) // 20, 1) :]
        rates = sorted(run.metric("tokens_per_second").values)
        last = run.training[-1] if run.training else {}
        sets = [each["loss"].values[-1] for each in run.validation.values() if "loss" in each]
        rows.append([
            run.name,
            f"{last['step'] + 1:,}" if last else "0",
            short_number(last["tokens"]) if "tokens" in last else "",
            f"{sum(tail) / len(tail):.4f} (mean of {len(tail)})" if tail else "",
            ", ".join(f"{loss:.4f}" for loss in sets),
            short_number(rates[len(rates) // 2]) if rates else "",
            _state(run),
        ])
    return PageSection("overview", "Overview", tables=[PageTable("", head, rows)])


def _state(run: RunHistory) -> str:
    ended = {"end": "finished", "stop": "stopped", "error": "failed"}
    for event in reversed(run.events):
        if event.get("event") in ended:
            reason = event.get("reason") or event.get("message") or event.get("error")
            return f"{ended[event['event']]} after {event.get('step', '?')} steps" + (f": {reason}" if reason else "")
        if event.get("event") in ("start", "resume"):
            return "running, or ended without a report"
    return ""


def _loss(runs: list[RunHistory], charts: Charts) -> PageSection:
    branches = [
        ChartLine(f"{run.name}: abandoned", branch, run.clock(), run=-1) for run in runs for branch in run.abandoned
    ]
    curves = branches + _curves(runs, "loss", raw=True)
    title = "Training loss, with its running mean" + (" and abandoned steps in grey" if branches else "")
    return PageSection("loss", "Loss", [charts.lines(title, "nats per token", curves)])


def _validation(runs: list[RunHistory], charts: Charts) -> PageSection:
    def metric(name: str, unit: str) -> Any:
        return charts.lines(f"Validation {name}", unit, _measured(runs, "validation", name))

    charts_of = [metric("loss", "nats per token"), metric("perplexity", "perplexity")]
    if any("bits_per_byte" in metrics for run in runs for metrics in run.validation.values()):
        charts_of.append(metric("bits_per_byte", "bits per byte"))
    return PageSection("validation", "Validation", charts_of)


def _measured(runs: list[RunHistory], kind: str, metric: str, only: str | None = None) -> list[ChartLine]:
    """A metric of the validation sets or tasks of every run."""
    found = []
    for number, run in enumerate(runs):
        sets: dict[str, dict[str, Series]] = getattr(run, kind)
        for style, (name, metrics) in enumerate(sets.items()):
            if metric in metrics and only in (None, name):
                label = run.name if name in ("validation", only) else f"{run.name}: {name}"
                found.append(
                    ChartLine(
                        label, metrics[metric], run.clock(), run=number, style=style if only is None else 0, marked=True
                    )
                )
    return found


def _tasks(runs: list[RunHistory], charts: Charts) -> PageSection:
    names = dict.fromkeys((task, metric) for run in runs for task, metrics in run.tasks.items() for metric in metrics)
    drawn = [
        charts.lines(f"{task}: {metric}", metric, _measured(runs, "tasks", metric, task))
        for task, metric in names
        if not metric.endswith("_stderr")
    ]
    return PageSection("tasks", "Benchmarks", drawn)


def _norms(runs: list[RunHistory], charts: Charts) -> PageSection:
    """Norms by layer (`logging.statistics`), of some layers if there are many."""
    titles = {
        "weight": "Norm of the weights",
        "gradient": "Norm of the gradient before clipping",
        "update": "Norm of the update",
        "activation": "Root mean square of the layer's output",
        "attention_entropy": "Entropy of attention",
    }
    drawn = []
    for kind, title in titles.items():
        curves = []
        for number, run in enumerate(runs):
            keys = [key for key in run.metrics() if key.startswith(f"{NORMS}/") and key.endswith(f"/{kind}")]
            for style, key in enumerate(dict.fromkeys(evenly(keys, LAYERS_DRAWN))):
                label = f"{run.name}: {key.split('/')[1]}"
                curves.append(ChartLine(label, run.metric(key), run.clock(), run=number, style=style))
        entropy = kind == "attention_entropy"
        drawn.append(charts.lines(title, "nats" if entropy else "norm", curves, log=not entropy))
    return PageSection("norms", "Norms by layer", drawn)


def _noise(runs: list[RunHistory], charts: Charts) -> PageSection:
    """The gradient noise scale (`logging.noise_scale`), and its two parts."""
    scales = [
        ChartLine(f"{run.name}: {label}", noise_scales(run, count), run.clock(), run=number, style=style)
        for number, run in enumerate(runs)
        for style, (label, count) in enumerate((("all so far", None), (f"last {RECENT} estimates", RECENT)))
    ]
    drawn = [charts.lines("Gradient noise scale: mean noise over mean signal", "tokens", scales, log=True)]
    for part, about in (("signal", "squared norm of the gradient"), ("noise", "variance of a token's gradient")):
        title = f"{part.capitalize()} ({about}), estimates of single steps"
        drawn.append(charts.lines(title, part, _curves(runs, f"{NOISE}/{part}", raw=True)))
    return PageSection("noise", "Gradient noise scale", drawn)


def _speed(runs: list[RunHistory], charts: Charts) -> PageSection:
    rates = charts.lines("Tokens per second", "tokens/s", _curves(runs, "tokens_per_second", raw=True))
    flops = charts.lines("Model FLOPs per device", "TFLOP/s", _curves(runs, "tflops", raw=True))
    peaks = sorted({value for run in runs for value in run.metric("peak_tflops").values})
    share = charts.lines(
        f"Model FLOPs utilisation (share of {', '.join(f'{peak:g}' for peak in peaks)} TFLOP/s)",
        "MFU",
        _curves(runs, "mfu", raw=True),
        percent=True,
    )
    parts = []
    for number, run in enumerate(runs):
        whole, data = run.metric("step_seconds"), run.metric("data_seconds")
        parts.append(ChartLine(f"{run.name}: whole step", whole, run.clock(), run=number))
        parts.append(ChartLine(f"{run.name}: waiting for data", data, run.clock(), run=number, style=1))
    seconds = charts.lines("Time of a step", "seconds", parts)
    hours = ", ".join(
        f"{run.name} {duration(run.clock().hours[-1] * 3600)}" for run in runs if run.training and run.clock().hours[-1]
    )
    note = f"Time in training steps: {hours}, without evaluation, checkpoints and starts." if hours else ""
    return PageSection("speed", "Speed", [rates, flops, share, seconds], note=note)


def _memory(runs: list[RunHistory], charts: Charts) -> PageSection:
    curves = _curves(runs, "memory_bytes", scale=2**-30)
    return PageSection("memory", "Memory", [charts.lines("Greatest memory of the first rank so far", "GiB", curves)])


def _communication(runs: list[RunHistory], charts: Charts) -> PageSection:
    """Bytes, messages and time of the first rank's steps (`logging.communication`), a line per group and operation."""
    drawn = []
    for kind, scale, unit in (("bytes", 2**-20, "MiB"), ("messages", 1.0, "messages"), ("seconds", 1e3, "ms")):
        curves = []
        for number, run in enumerate(runs):
            paths = [key for key in run.metrics() if key.startswith("communication/") and key.endswith(f"/{kind}")]
            for style, key in enumerate(paths):
                series = run.metric(key)
                what = " ".join(key.split("/")[1:-1])
                scaled = Series(series.steps, [value * scale for value in series.values])
                curves.append(ChartLine(f"{run.name}: {what}", scaled, run.clock(), run=number, style=style))
        if curves or kind != "seconds":
            shown = "time" if kind == "seconds" else kind
            drawn.append(charts.lines(f"Communication of the first rank: {shown} of a step", unit, curves))
    return PageSection("communication", "Communication", drawn)


def _data(runs: list[RunHistory], charts: Charts) -> PageSection:
    drawn, notes = [], []
    for run in runs:
        found = composition(run)
        if isinstance(found, str):
            notes.append(f"{run.name}: {found}")
        elif len(found.parts) > 1:
            drawn.append(shares(f"{run.name}: share of the samples of each source", found.steps, found.parts))
    return PageSection("data", "Data", drawn, note="; ".join(notes))


def _experts(runs: list[RunHistory], charts: Charts) -> PageSection:
    drawn = []
    for run in runs:
        records = [record for record in run.training if record.get("moe")]
        if not records:
            continue
        layers = list(records[-1]["moe"])
        chosen = evenly(records, HEAT_MAP_COLUMNS)
        found = [[record["moe"].get(layer, {}).get("max_over_mean") for record in chosen] for layer in layers]
        over = [[float("nan") if value is None else value for value in row] for row in found]
        span = (chosen[0]["step"], chosen[-1]["step"])
        title = f"{run.name}: greatest load of an expert over an even share"
        drawn.append(heat_map(title, over, x="step", y="layer", rows=layers, span=span))
        loads = loads_over_even_share(records[-1]["moe"])
        title = f"{run.name}: load of each expert over an even share at step {records[-1]['step']}"
        drawn.append(heat_map(title, loads, x="expert", y="layer", rows=layers, span=(0, len(loads[0]) - 1)))
    return PageSection("experts", "Experts", drawn)


def _other(runs: list[RunHistory], charts: Charts) -> PageSection:
    keys = dict.fromkeys(key for run in runs for key in run.metrics())
    rest = [
        k for k in keys if k not in DRAWN and not k.startswith(("moe/", "communication/", f"{NORMS}/", f"{NOISE}/"))
    ]
    drawn = [charts.lines(key, key, _curves(runs, key, raw=True)) for key in rest[:OTHER_CHARTS]]
    left = len(rest) - OTHER_CHARTS
    note = f"{left} more metrics are in metrics.jsonl: {', '.join(rest[OTHER_CHARTS:][:10])}, ..." if left > 0 else ""
    return PageSection("other", "Other metrics", drawn, note=note)


def _goodput(runs: list[RunHistory]) -> PageSection:
    accounts = [(run.name, goodput(run.events)) for run in runs]
    head = ["part", "what it is", *[name for name, each in accounts if each.wall]]
    rows = []
    for part, about in PARTS.items():
        seconds = [(each.seconds[part], each.wall) for _, each in accounts if each.wall]
        rows.append([part, about, *[f"{duration(own)} ({own / wall:.1%})" for own, wall in seconds]])
    if len(head) == 2:
        return PageSection("goodput", "Wall time")
    rows.append(["all", "", *[f"{duration(each.wall)} in {each.starts}" for _, each in accounts if each.wall]])
    rows[-1][1] = "since the first launch, without the time before starts by a user, and the number of starts"
    return PageSection("goodput", "Wall time", tables=[PageTable("", head, rows)])


WINDOWS = 100


@dataclass(frozen=True)
class Composition:
    """Shares of the samples by source in windows of steps, each given by its end."""

    steps: list[int]
    parts: dict[str, list[float]]  # source -> its share in each window. The shares of a window sum to 1.


def composition(run: RunHistory) -> Composition | str:
    """Composition of the data up to the run's last step, or the reason why it is unknown."""
    if run.described is None or not run.training:
        return "there is no configuration or no step"
    config = run.described.config
    if not config.data.train and not config.data.phases:
        return "the data are made up as the run needs them"
    try:
        plan = build_plan(config)
    except (DataError, OSError, ValueError) as error:
        return f"the data cannot be opened from here ({str(error).splitlines()[0]})"
    assert isinstance(plan, SamplePlan)
    last = int(run.training[-1]["step"]) + 1
    windows = min(WINDOWS, last)
    steps = [number * last // windows for number in range(1, windows + 1)]
    parts = {}
    for source in plan.sources:
        read = [plan.batches.before(step) for step in [0, *steps]]
        drawn = [plan.drawn(source.index, samples) for samples in read]
        sizes = [end - begin for begin, end in zip(read, read[1:])]
        parts[source.name] = [(end - begin) / size for begin, end, size in zip(drawn, drawn[1:], sizes)]
    return Composition(steps, parts)
