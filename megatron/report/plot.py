"""Curves in a terminal, drawn with braille characters: 2 x 4 points in each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
