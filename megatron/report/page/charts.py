"""Charts of the report: curves over steps, tokens or hours that share one x axis, and heat maps. Drawn by Bokeh."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bokeh.models import (
    BasicTicker,
    ColorBar,
    ColumnDataSource,
    CustomJS,
    DataRange1d,
    HoverTool,
    LinearAxis,
    LinearColorMapper,
    NumeralTickFormatter,
    RadioButtonGroup,
)
from bokeh.palettes import Category10_10, Category20_20, RdBu11
from bokeh.plotting import figure

from ..curve import smoothed
from .history import Series, StepAxis

WIDTH, HEIGHT = 900, 300
GREY = "#9a9a9a"
DASHES = ("solid", "dashed", "dotted", "dotdash")
AXES = {"step": "step", "tokens": "tokens", "hours": "hours of training"}


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart.

    Args:
        clock: of its run: tokens and hours at each step.
        run: number of its run, which chooses the colour. -1 is grey.
        style: number of the kind of line within the run, where a chart has several.
        raw: draw it pale, with its running mean over it if it has many points.
    """

    label: str
    series: Series
    clock: StepAxis
    run: int = 0
    style: int = 0
    marked: bool = False
    raw: bool = False


@dataclass
class Charts:
    """All charts of a page. They share one x axis, which the page's switch sets to steps, tokens or hours.

    Args:
        points: most points of a curve. Of more, the least and the greatest of each stretch are drawn, so that no
            spike is lost.
    """

    points: int = 1500
    sources: list[ColumnDataSource] = field(default_factory=list)
    axes: list[LinearAxis] = field(default_factory=list)
    x_range: DataRange1d = field(default_factory=DataRange1d)

    def lines(
        self, title: str, unit: str, curves: Iterable[ChartLine], *, log: bool = False, percent: bool = False
    ) -> Any:
        """A chart of curves, or None if none has a point."""
        curves = [curve for curve in curves if curve.series.steps]
        if log:
            curves = [curve for curve in curves if min(curve.series.values) > 0]
        if not curves:
            return None
        chart = _figure(
            title,
            x_range=self.x_range,
            x_axis_label=AXES["step"],
            y_axis_label=unit,
            y_axis_type="log" if log else "linear",
            tools="xpan,xwheel_zoom,box_zoom,reset,save",
            active_scroll=None,
        )
        chart.xaxis.formatter = NumeralTickFormatter(format="0.[00]a")
        if percent:
            chart.yaxis.formatter = NumeralTickFormatter(format="0%")
        self.axes.append(chart.xaxis[0])
        for curve in curves:
            self._draw(chart, curve)
        shown = [("", "@label"), ("step", "@step"), ("tokens", "@tokens{0.[00]a}"), (unit, "@y{0.0000}")]
        chart.add_tools(HoverTool(tooltips=shown))
        chart.legend.click_policy = "hide"
        chart.legend.label_text_font_size = "9pt"
        chart.legend.spacing = 0
        if len(curves) > 1 or curves[0].raw:
            chart.add_layout(chart.legend[0], "right")
        else:
            chart.legend.visible = False
        return chart

    def _draw(self, chart: Any, curve: ChartLine) -> None:
        colour = GREY if curve.run < 0 else Category10_10[curve.run % 10]
        steps, values = curve.series.steps, curve.series.values
        label = curve.label
        dash = DASHES[curve.style % len(DASHES)]
        if curve.raw and curve.run >= 0:
            pale, means = smoothed({curve.label: list(zip(steps, values))})
            if pale:
                source = self._source(curve, thinned(steps, values, self.points), label)
                chart.line("x", "y", source=source, color=colour, alpha=0.3, line_width=1)
                ((label, points),) = means.items()
                steps, values = [int(x) for x, _ in points], [y for _, y in points]
        source = self._source(curve, thinned(steps, values, self.points), label)
        options = {"source": source, "color": colour, "legend_label": label}
        chart.line("x", "y", line_width=1.6, line_dash=dash, **options)
        if curve.marked or len(steps) == 1:
            chart.scatter("x", "y", size=6, **options)

    def _source(self, curve: ChartLine, points: Sequence[tuple[int, float]], label: str) -> ColumnDataSource:
        times = [curve.clock.at(step) for step, _ in points]
        steps = [step for step, _ in points]
        data = {
            "x": steps,
            "y": [float(f"{value:.7g}") for _, value in points],
            "step": steps,
            "tokens": [round(tokens) for tokens, _ in times],
            "hours": [float(f"{hours:.6g}") for _, hours in times],
            "label": [label] * len(points),
        }
        self.sources.append(ColumnDataSource(data))
        return self.sources[-1]

    def switch(self) -> Any:
        """Buttons that choose the unit of every chart's x axis."""
        buttons = RadioButtonGroup(labels=list(AXES.values()), active=0)
        code = """
            const column = columns[buttons.active]
            for (const source of sources) {
                source.data.x = source.data[column]
                source.change.emit()
            }
            for (const axis of axes) axis.axis_label = labels[buttons.active]
        """
        names = {"columns": list(AXES), "labels": list(AXES.values()), "buttons": buttons}
        buttons.js_on_change("active", CustomJS(args={**names, "sources": self.sources, "axes": self.axes}, code=code))
        return buttons


def _figure(title: str, **options: Any) -> Any:
    common = {"width": WIDTH, "height": HEIGHT, "sizing_mode": "stretch_width", "tools": "save"}
    return figure(title=title, output_backend="canvas", **{**common, **options})


def heat_map(title: str, values: Sequence[Sequence[float]], *, x: str, y: str, rows: Sequence[str], span: Any) -> Any:
    """Values [rows][columns] around 1, from blue (0) over white (1) to red (2 or more).

    Args:
        span: (first, last) value of x of the columns.
    """
    first, last = span
    half = (last - first) / max(len(values[0]) - 1, 1) / 2 or 0.5
    chart = _figure(
        title,
        height=max(180, 90 + 22 * len(values)),
        x_axis_label=x,
        y_axis_label=y,
        x_range=(first - half, last + half),
        y_range=(len(values) - 0.5, -0.5),
    )
    most = max(2.0, *(value for row in values for value in row if math.isfinite(value)))
    colours = LinearColorMapper(palette=RdBu11, low=0.0, high=min(most, 4.0), nan_color="#ffffff")
    chart.image(
        [np.asarray(values, dtype=np.float32)],
        x=first - half,
        y=-0.5,
        dw=last - first + 2 * half,
        dh=len(values),
        color_mapper=colours,
        origin="top_left",
        anchor="top_left",
    )
    chart.yaxis.ticker = list(range(len(rows)))
    chart.yaxis.major_label_overrides = dict(enumerate(rows))
    chart.add_layout(ColorBar(color_mapper=colours, ticker=BasicTicker(desired_num_ticks=5)), "right")
    return chart


def shares(title: str, steps: Sequence[int], parts: dict[str, list[float]]) -> Any:
    """Shares of a whole over steps, one above the other."""
    colours = [Category20_20[number % 20] for number in range(len(parts))]
    chart = _figure(title, x_axis_label="step", y_axis_label="share", y_range=(0, 1))
    columns = {f"part{number}": values for number, values in enumerate(parts.values())}
    source = ColumnDataSource({"step": list(steps), **columns})
    chart.varea_stack(list(columns), x="step", color=colours, legend_label=list(parts), source=source)
    chart.yaxis.formatter = NumeralTickFormatter(format="0%")
    chart.add_layout(chart.legend[0], "right")
    return chart


def thinned(steps: Sequence[int], values: Sequence[float], most: int) -> list[tuple[int, float]]:
    """At most about `most` points of a curve: first, least, greatest and last of equal stretches, in order."""
    if len(steps) <= most:
        return list(zip(steps, values))
    stretches = max(most // 4, 1)
    bounds = [number * len(steps) // stretches for number in range(stretches + 1)]
    chosen: list[int] = []
    for begin, end in zip(bounds, bounds[1:]):
        inside = range(begin, end)
        chosen += sorted({begin, min(inside, key=values.__getitem__), max(inside, key=values.__getitem__), end - 1})
    return [(steps[index], values[index]) for index in chosen]
