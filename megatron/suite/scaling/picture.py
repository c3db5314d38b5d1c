"""The picture of a study: the losses with the law's curves, and the IsoFLOP profiles with their lowest points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron.report.console import short_number
from megatron.report.figures import new_figure, write_figure

from .study import Study


def save_study(found: Study, path: Path, title: str) -> None:
    """Draw it into a PNG file, which appears whole or not at all."""
    figure = new_figure(12, 4.8, 110)
    figure.suptitle(title)
    curves, profiles = figure.subplots(1, 2)
    _draw_curves(found, curves)
    _draw_profiles(found, profiles)
    write_figure(figure, path)


def _draw_curves(found: Study, axes: Any) -> None:
    from matplotlib import colormaps

    points, colours = found.points, colormaps["viridis"]
    sizes = np.unique(points.parameters)
    for place, size in enumerate(sizes):
        colour = colours(0.9 * place / max(len(sizes) - 1, 1))
        own = np.flatnonzero(points.parameters == size)
        own = own[np.argsort(points.tokens[own])]
        axes.plot(
            points.tokens[own], points.loss[own], "o", markersize=3.5, color=colour, label=f"N = {short_number(size)}"
        )
        across = np.geomspace(points.tokens[own].min(), points.tokens[own].max(), 50)
        axes.plot(across, found.law.loss(size, across), linewidth=1, color=colour)
    law = found.law
    axes.set(xscale="log", xlabel="tokens D", ylabel="loss (nats per token)")
    a, b = np.exp(law.log_a), np.exp(law.log_b)
    formula = f"L = {law.floor:.2f} + {a:.3g} / N^{law.alpha:.2f} + {b:.3g} / D^{law.beta:.2f}"
    axes.set_title(formula, fontsize=10)
    if len(sizes) <= 24:
        axes.legend(fontsize=6, ncols=2)
    axes.grid(alpha=0.3)


def _draw_profiles(found: Study, axes: Any) -> None:
    from matplotlib import colormaps

    colours = colormaps["plasma"]
    count = max(len(found.isoflop.profiles) - 1, 1)
    for place, each in enumerate(found.isoflop.profiles):
        colour = colours(0.85 * place / count)
        axes.plot(each.parameters, each.loss, "o", markersize=3.5, color=colour, label=f"C = {each.flops:.1e}")
        across = np.geomspace(each.parameters.min(), each.parameters.max(), 50)
        axes.plot(across, np.polyval(each.parabola, np.log(across)), linewidth=1, color=colour)
        if each.best is not None:
            lowest = np.polyval(each.parabola, np.log(each.best[0]))
            axes.plot([each.best[0]], [lowest], "*", markersize=11, color=colour)
    exponent = found.isoflop.a
    said = "no power law: fewer than two lowest points" if exponent is None else f"best N grows with C^{exponent:.2f}"
    axes.set_title(f"IsoFLOP profiles; {said}", fontsize=10)
    axes.set(xscale="log", xlabel="parameters N", ylabel="loss (nats per token)")
    if found.isoflop.profiles:
        axes.legend(fontsize=6)
    axes.grid(alpha=0.3)
