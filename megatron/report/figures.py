"""Pictures in files. matplotlib is imported where a picture is drawn, without its global state."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]


def save_lines(
    path: str | Path, series: dict[str, Points], *, title: str, x: str, y: str, marked: Sequence[str] = ()
) -> None:
    """Draw curves into a PNG file, which appears whole or not at all.

    Args:
        series: curves by name, each a sequence of (x, y).
        x, y: labels of the axes.
        marked: names of the curves that are drawn with a mark at each point, on top of the others.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in series.items():
        xs, ys = [px for px, _ in points], [py for _, py in points]
        if name in marked:
            axes.plot(xs, ys, marker="o", markersize=4, linewidth=1.2, label=name, zorder=3)
        else:
            axes.plot(xs, ys, linewidth=0.9, label=name)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if len(series) > 1:
        axes.legend()
    beside = path.with_name(path.name + ".new")
    figure.savefig(beside, format="png")
    os.replace(beside, path)
