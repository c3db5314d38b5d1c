"""Pictures in files. matplotlib is only imported to draw, without its global state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.file_access import replacing

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class HeatMap:
    """One of several pictures side by side: values [rows][columns], with labels of the axes."""

    title: str
    values: Sequence[Sequence[float]]
    x: str
    y: str
    columns: Sequence[float] | None = None  # labels of the first and the last column
    rows: Sequence[str] = ()
    names: Sequence[str] = ()  # of the columns, instead of numbers


def new_figure(width: float, height: float, dpi: int = 100) -> Any:
    """An empty matplotlib figure of this size in inches, without matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Any, path: str | Path) -> None:
    """Write a matplotlib figure as a PNG file, which appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, format="png")


def save_heat_maps(path: str | Path, maps: Sequence[HeatMap], *, title: str, most: float, middle: float = 1.0) -> None:
    """Draw heat maps side by side into a PNG file.

    Args:
        most: the value of the strongest colour. `middle` is in the middle, 0 at the other end.
    """
    from matplotlib.colors import TwoSlopeNorm

    height = max(2.5, min(9.0, 1.5 + 0.25 * max(len(each.values) for each in maps)))
    figure = new_figure(5.5 * len(maps), height, 120)
    figure.suptitle(title)
    norm = TwoSlopeNorm(vmin=0.0, vcenter=middle, vmax=max(most, 1.01 * middle))
    for axes, each in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps):
        first, last = each.columns or (0, len(each.values[0]) - 1)
        half = (last - first) / max(len(each.values[0]) - 1, 1) / 2 or 0.5
        extent = (first - half, last + half, len(each.values) - 0.5, -0.5)
        image = axes.imshow(
            each.values, aspect="auto", cmap="coolwarm", norm=norm, extent=extent, interpolation="nearest"
        )
        axes.set(title=each.title, xlabel=each.x, ylabel=each.y)
        if each.names:
            axes.set_xticks(range(len(each.names)), each.names, fontsize=7)
        axes.set_yticks(range(len(each.rows)), each.rows, fontsize=7)
    figure.colorbar(image, ax=figure.axes)
    write_figure(figure, path)


def save_lines(
    path: str | Path,
    series: Mapping[str, Points],
    *,
    title: str,
    x: str,
    y: str,
    marked: Sequence[str] = (),
    faint: Mapping[str, Points] | None = None,
    grey: Sequence[Points] = (),
) -> None:
    """Draw curves into a PNG file.

    Args:
        series: curves by name, each a sequence of (x, y).
        marked: names of curves with a mark at each point, drawn on top of the others.
        faint: pale curves below all others, the n-th in the colour of the n-th of `series`, without a name.
        grey: grey curves below all others. The first has the name "abandoned".
    """
    figure = new_figure(8, 4.5, 120)
    axes = figure.add_subplot()
    for number, points in enumerate(grey):
        label = "_abandoned" if number else "abandoned"  # no legend for names that begin with an underscore
        axes.plot([px for px, _ in points], [py for _, py in points], linewidth=0.8, color="0.7", label=label, zorder=1)
    for number, points in enumerate((faint or {}).values()):
        axes.plot([px for px, _ in points], [py for _, py in points], linewidth=0.8, alpha=0.3, color=f"C{number}")
    for number, (name, points) in enumerate(series.items()):
        xs, ys = [px for px, _ in points], [py for _, py in points]
        if name in marked:
            axes.plot(xs, ys, marker="o", markersize=4, linewidth=1.2, label=name, zorder=3, color=f"C{number}")
        else:
            axes.plot(xs, ys, linewidth=1.2, label=name, color=f"C{number}")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if len(series) > 1 or grey:
        axes.legend()
    write_figure(figure, path)
