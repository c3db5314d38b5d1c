"""Pictures and the closing summary of a run, from its metrics.jsonl: losses, also in a terminal, and experts."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from megatron.config.problems import counted

from .console import duration, short_number
from .figures import HeatMap, save_heat_maps, save_lines
from .jsonl import read_lines, sound_metrics

Points = Sequence[tuple[float, float]]
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a braille character


def draw(series: Mapping[str, Points], *, width: int = 72, height: int = 14, title: str = "") -> str:
    """A picture of curves as text.

    Args:
        series: curves by name, each a sequence of (x, y). Points that are not finite are skipped. The first curve is
            drawn as a line, the others as marks (o, x, +, ...) on top of it.
        width, height: size of the field in characters, without the axes.

    Returns:
        Lines of text, or one line if there is nothing to draw.
    """
    finite = {}
    for name, points in series.items():
        kept = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        if kept:
            finite[name] = kept
    if not finite:
        return f"{title}: nothing to draw".lstrip(": ")
    everything = [point for points in finite.values() for point in points]
    left, right = _limits([x for x, _ in everything])
    low, high = _limits([y for _, y in everything])
    columns, rows = 2 * width - 1, 4 * height - 1

    def place(x: float, y: float) -> tuple[int, int]:
        return round((x - left) / (right - left) * columns), round((high - y) / (high - low) * rows)

    field = [[0] * width for _ in range(height)]
    marks: dict[tuple[int, int], str] = {}
    legend = []
    for number, (name, points) in enumerate(finite.items()):
        spots = [place(x, y) for x, y in sorted(points)]
        if number == 0:
            for spot, after in zip(spots, [*spots[1:], spots[-1]]):
                _line(field, spot, after)
        else:
            mark = "ox+*#"[(number - 1) % 5]
            marks.update({(column // 2, row // 4): mark for column, row in spots})
            legend.append(f"{mark} {name}")
    return "\n".join(_framed(field, marks, (left, right), (low, high), title, legend))


def _limits(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        pad = abs(low) / 2 or 0.5
        return low - pad, high + pad
    return low, high


def _line(field: list[list[int]], start: tuple[int, int], end: tuple[int, int]) -> None:
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for step in range(steps + 1):
        column = start[0] + round((end[0] - start[0]) * step / steps)
        row = start[1] + round((end[1] - start[1]) * step / steps)
        field[row // 4][column // 2] |= _DOTS[row % 4][column % 2]


def _framed(
    field: list[list[int]],
    marks: dict[tuple[int, int], str],
    across: tuple[float, float],
    upright: tuple[float, float],
    title: str,
    legend: list[str],
) -> list[str]:
    height, width = len(field), len(field[0])
    labels = {0: f"{upright[1]:.4g}", height - 1: f"{upright[0]:.4g}", height // 2: f"{sum(upright) / 2:.4g}"}
    margin = max(map(len, labels.values()))
    lines = [" " * (margin + 2) + title] if title else []
    for row in range(height):
        cells = (marks.get((column, row)) or chr(0x2800 + dots) for column, dots in enumerate(field[row]))
        lines.append(f"{labels.get(row, ''):>{margin}} ┤{''.join(cells)}".rstrip("\u2800 "))
    lines.append(" " * (margin + 1) + "└" + "─" * width)
    first, last = f"{across[0]:g}", f"{across[1]:g}"
    lines.append(" " * (margin + 2) + first + last.rjust(width - len(first)))
    if legend:
        lines.append(" " * (margin + 2) + "   ".join(legend))
    return lines


FEW = 25  # a running mean extends over 1/25 of a curve to each side


@dataclass
class History:
    """The records of a run: training lines, and the (step, loss) points of each validation set. `abandoned` has the
    training losses of steps that the run repeated later, a list for each rollback."""

    training: list[dict[str, Any]] = field(default_factory=list)
    validation: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    abandoned: list[Points] = field(default_factory=list)

    @classmethod
    def read(cls, path: str | Path) -> "History":
        """Read a metrics.jsonl.

        Raises:
            FileNotFoundError: there is none.
        """
        history = cls()
        for record in read_lines(path, sound_metrics):
            if "loss" in record:
                history.training.append(record)
            for name, values in record.get("validation", {}).items():
                if values["loss"] is not None:
                    history.validation.setdefault(name, []).append((record["step"], values["loss"]))
        superseded = Path(path).with_suffix(".superseded.jsonl")
        history.abandoned = list(branches(read_lines(superseded, sound_metrics))) if superseded.exists() else []
        return history

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """The training loss and the validation losses by name, as points."""
        training = [(record["step"], record["loss"]) for record in self.training if record["loss"] is not None]
        named = {"validation" if n == "validation" else f"validation: {n}": p for n, p in self.validation.items()}
        return {"training": training, **named}


def branches(records: Iterable[Mapping[str, Any]]) -> Iterator[Points]:
    """Losses of repeated steps, as (step, loss). Another branch begins where the steps start again."""
    branch: list[tuple[float, float]] = []
    for record in records:
        loss = record.get("loss")
        if loss is None:
            continue
        if branch and record["step"] <= branch[-1][0]:
            yield branch
            branch = []
        branch.append((record["step"], loss))
    if branch:
        yield branch


def save_loss_curve(history: History, path: str | Path, title: str) -> None:
    """Draw loss.png. Abandoned steps are grey."""
    curves = history.curves()
    marked = [name for name in curves if name != "training"]
    faint, named = smoothed({"training": curves.pop("training")})
    save_lines(
        path,
        {**named, **curves},
        title=title,
        x="step",
        y="loss (nats per token)",
        marked=marked,
        faint=faint,
        grey=history.abandoned,
    )


def smoothed(curves: dict[str, Points]) -> tuple[dict[str, Points], dict[str, Points]]:
    """(curves as they are, curves to draw over them: running means with the number of points in their names).

    A mean takes the same number of points before and after, fewer towards the ends, so that a straight line stays
    unchanged. A curve of few points has no mean and is returned as it is in the second dictionary."""
    raw, means = {}, {}
    for name, points in curves.items():
        half = len(points) // FEW
        if half == 0:
            means[name] = points
            continue
        raw[name] = points
        sums = [0.0, *accumulate(y for _, y in points)]
        reach = [min(half, index, len(points) - 1 - index) for index in range(len(points))]
        means[f"{name} (mean of {2 * half + 1})"] = [
            (x, (sums[index + each + 1] - sums[index - each]) / (2 * each + 1))
            for index, ((x, _), each) in enumerate(zip(points, reach))
        ]
    return raw, means


def terminal_loss_curve(history: History, *, width: int = 72, height: int = 14) -> str:
    return draw(history.curves(), width=width, height=height, title="loss (nats per token) by step")


def summary(history: History, *, seconds: float, reason: str) -> str:
    """The closing summary: losses and speed.

    Args:
        seconds: wall time of this process's loop.
    """
    if not history.training:
        return f"{reason} after {duration(seconds)}: no step was logged"
    first, last = history.training[0], history.training[-1]
    done = f"{counted(last['step'] + 1, 'step')}, {short_number(last['tokens'])} tokens"
    lines = [f"{reason} after {duration(seconds)}: {done}"]
    if first["loss"] is not None and last["loss"] is not None:
        lines.append(
            f"training loss    {first['loss']:.4f} (step {first['step']}) -> {last['loss']:.4f} (step {last['step']})"
        )
    for name, points in history.validation.items():
        best, which = min(points, key=lambda point: point[1]), "" if name == "validation" else f"{name}, "
        lines.append(
            f"validation loss  {points[-1][1]:.4f} ({which}after {counted(points[-1][0], 'step')}, "
            f"best {best[1]:.4f} after {best[0]})"
        )
    rates = sorted(record["tokens_per_second"] for record in history.training if record.get("tokens_per_second"))
    if rates:
        lines.append(f"median speed     {short_number(rates[len(rates) // 2])} tokens/s")
    return "\n".join(lines)


COLUMNS = 400  # steps that are drawn. More would be thinner than a pixel
Item = TypeVar("Item")


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` items, evenly spaced, with the first and the last one."""
    count = min(len(items), most)
    return [items[index * (len(items) - 1) // max(count - 1, 1)] for index in range(count)]


def loads_over_even_share(moe: Mapping[str, Mapping[str, Any]]) -> list[list[float]]:
    """Rows of equal length, one per layer: each expert's load over an even share, padded with nan."""
    rows = [[share * len(each["load"]) for share in each["load"]] for each in moe.values()]
    widest = max(map(len, rows))
    return [[*row, *[float("nan")] * (widest - len(row))] for row in rows]


def save_expert_load(metrics: Path, picture: Path, title: str) -> bool:
    """Draw experts.png of a metrics.jsonl: each expert's load over an even share at the last record, and the largest of
    each layer over the steps.

    Returns:
        False, without a picture, if the run has no experts.
    """
    records = [(record["step"], record["moe"]) for record in read_lines(metrics, sound_metrics) if "moe" in record]
    if not records:
        return False
    layers, now = list(records[-1][1]), loads_over_even_share(records[-1][1])
    shown = evenly(records, COLUMNS)
    over = [[moe[layer]["max_over_mean"] for _, moe in shown] for layer in layers]
    most = max(2.0, *(value for row in over for value in row[len(row) // 2 :]))
    last = HeatMap(
        f"load of each expert over an even share, step {records[-1][0]}", now, "expert", "layer", None, layers
    )
    span = (shown[0][0], shown[-1][0])
    largest = HeatMap("largest load of a layer over an even share", over, "step", "layer", span, layers)
    save_heat_maps(picture, [last, largest], title=title, most=most)
    return True
