"""Both fits of a set of points, with intervals from resampled runs, predictions that can be checked, and a picture."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.problems import UserError
from megatron.report.console import short_number
from megatron.report.figures import new_figure, write_figure

from .law import DELTA, IsoFlop, Law, fit_isoflop, fit_law
from .points import Points

COVERED = 0.95  # of the resampled fits are within an interval
MOST_FAILED = 0.5  # resamples without a fit, above which there is no interval

Interval = tuple[float, float] | None


@dataclass(frozen=True)
class HeldOut:
    """The last loss of the run with the most FLOPs, and the loss that a law of all smaller models predicts for it."""

    run: str
    loss: float
    predicted: float


@dataclass(frozen=True)
class Study:
    """Scaling of a suite's loss."""

    points: Points
    law: Law
    isoflop: IsoFlop
    intervals: Mapping[str, Interval]  # by the name of a number, see `numbers`. None where too few resamples had it
    resamples: int  # how many
    held_out: HeldOut | None  # None where the other runs are too few for a law

    @property
    def residual(self) -> float:
        """Root mean square of log L less the law's."""
        found = np.log(self.law.loss(self.points.parameters, self.points.tokens))
        return float(np.sqrt(np.mean((np.log(self.points.loss) - found) ** 2)))

    def document(self) -> dict[str, Any]:
        """As JSON."""
        held = self.held_out
        return {
            "runs": len(self.points.names),
            "points": len(self.points),
            "resamples": self.resamples,
            "numbers": {
                name: {"value": value, "interval": self.intervals[name]}
                for name, value in numbers(self.law, self.isoflop).items()
            },
            "objective": self.law.objective,
            "residual": self.residual,
            "held_out": held and {"run": held.run, "loss": held.loss, "predicted": held.predicted},
            "profiles": [
                {"flops": each.flops, "runs": list(each.runs), "best": each.best} for each in self.isoflop.profiles
            ],
        }


def numbers(law: Law, isoflop: IsoFlop) -> dict[str, float | None]:
    """Numbers to report, by name: of L = E + A / N^alpha + B / D^beta, and the exponents of C for the best N and D."""
    a, b = law.exponents
    return {
        "E": law.floor,
        "log A": law.log_a,
        "log B": law.log_b,
        "alpha": law.alpha,
        "beta": law.beta,
        "law: N ~ C^": a,
        "law: D ~ C^": b,
        "IsoFLOP: N ~ C^": isoflop.a,
        "IsoFLOP: D ~ C^": isoflop.b,
    }


def study(
    points: Points,
    *,
    resamples: int = 1000,
    seed: int = 0,
    delta: float = DELTA,
    tell: Callable[[int], None] = lambda done: None,
) -> Study:
    """Fit the law and the profiles, and the same to resampled runs.

    Raises:
        UserError: there are too few points, or all have the same size or number of tokens.
    """
    law, isoflop = fit_law(points, delta=delta), fit_isoflop(points)
    budgets = [each.flops for each in isoflop.profiles]
    draw = np.random.default_rng(seed)
    found: list[dict[str, float | None]] = []
    for number in range(resamples):
        drawn = points.resampled(draw)
        try:
            # From the fit of all points and from two others, since a few runs may lie in another valley.
            found.append(numbers(fit_law(drawn, delta=delta, starts=_around(law)), fit_isoflop(drawn, budgets)))
        except UserError:
            continue  # all runs that were drawn have one size
        tell(number + 1)
    intervals = {name: _interval([each[name] for each in found], resamples) for name in numbers(law, isoflop)}
    return Study(points, law, isoflop, intervals, resamples, _held_out(points, delta))


def _around(law: Law) -> list[Law]:
    """The law, and two with other floors and exponents that have about its losses."""
    lower = Law(law.floor * 0.7, law.log_a, law.log_b, law.alpha * 0.8, law.beta * 0.8)
    higher = Law(law.floor * 1.1, law.log_a, law.log_b, law.alpha * 1.25, law.beta * 1.25)
    return [law, lower, higher]


def _interval(values: list[float | None], resamples: int) -> Interval:
    known = [value for value in values if value is not None]
    if not resamples or len(known) < (1 - MOST_FAILED) * resamples:
        return None
    low, high = np.quantile(known, [(1 - COVERED) / 2, (1 + COVERED) / 2])
    return float(low), float(high)


def _held_out(points: Points, delta: float) -> HeldOut | None:
    """Predict the last loss of the run with the most FLOPs from the smaller models."""
    last = int(np.argmax(points.flops))
    rest = np.flatnonzero(points.parameters < points.parameters[last])
    try:
        law = fit_law(points.take(rest), delta=delta)
    except UserError:
        return None
    predicted = float(law.loss(points.parameters[last], points.tokens[last]))
    return HeldOut(points.runs[last], float(points.loss[last]), predicted) if math.isfinite(predicted) else None


def study_lines(found: Study) -> list[str]:
    """The study in words and numbers."""
    lines = [
        f"{len(found.points)} losses of {len(found.points.names)} runs",
        "L = E + A / N^alpha + B / D^beta, with N parameters, D tokens, C FLOPs",
        "",
    ]
    for name, value in numbers(found.law, found.isoflop).items():
        interval = found.intervals[name]
        around = f"   {interval[0]:.3f} to {interval[1]:.3f}" if interval else "   no interval"
        lines.append(f"{name:16}  {'-' if value is None else f'{value:.4f}':>8}{around if value is not None else ''}")
    minima = sum(each.best is not None for each in found.isoflop.profiles)
    lines += [
        "",
        f"intervals: {100 * COVERED:g} % of {found.resamples:,} fits to resampled runs, drawn with replacement",
        f"the law is off by {100 * found.residual:.2f} % of the loss (root mean square)",
        f"{minima} of {len(found.isoflop.profiles)} IsoFLOP profiles have their lowest point within the sizes trained",
    ]
    if held := found.held_out:
        off = 100 * (held.predicted / held.loss - 1)
        lines.append(f"{held.run}: {held.loss:.4f}, and {held.predicted:.4f} ({off:+.2f} %) by a law of smaller models")
    return lines


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
