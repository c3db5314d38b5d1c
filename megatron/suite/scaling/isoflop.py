"""IsoFLOP profiles: at a fixed compute, the loss over the model's size, and the size at its lowest point.

Hoffmann et al. 2022 (arXiv 2203.15556), approach 2: of each budget a parabola through the losses over log N. Its
minimum is the best N of that budget, and a power law goes through the minima. Runs need not end at the budgets. Where a
run has several points, its loss at a budget is taken between the two around it, on a line of log L over log tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .points import Points

BUDGETS = 8
LEAST = 4  # runs of a profile: one more than a parabola has numbers


@dataclass(frozen=True)
class IsoFlopProfile:
    """The losses of several sizes with one budget.

    Attributes:
        parameters, tokens, loss: float64 [n].
    """

    flops: float  # the budget
    runs: tuple[str, ...]  # names of the runs that have it
    parameters: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray
    parabola: tuple[float, float, float]  # L = parabola[0] * log(N)^2 + parabola[1] * log(N) + parabola[2]
    best: tuple[float, float] | None  # (N, D) at its lowest point. None where it has none within the range of sizes


@dataclass(frozen=True)
class IsoFlop:
    """Best N = exp(log_n) * C^a and best D = exp(log_d) * C^b through the minima. None with fewer than two of them."""

    profiles: tuple[IsoFlopProfile, ...]
    a: float | None
    b: float | None
    log_n: float | None
    log_d: float | None


def fit_isoflop(points: Points, budgets: Iterable[float] | None = None) -> IsoFlop:
    """Fit parabolas and the power laws through their minima.

    Args:
        budgets: in FLOPs. By default `BUDGETS` of equal ratios, within the range that enough runs reach.
    """
    curves = _curves(points)
    chosen = list(budgets) if budgets is not None else _budgets(curves)
    found = (_profile(curves, flops) for flops in chosen)
    profiles = tuple(each for each in found if each is not None)
    minima = [(each.flops, *each.best) for each in profiles if each.best is not None]
    if len({flops for flops, _, _ in minima}) < 2:
        return IsoFlop(profiles, None, None, None, None)
    flops, sizes, tokens = np.log(np.array(minima)).T
    (a, log_n), (b, log_d) = np.polyfit(flops, sizes, 1), np.polyfit(flops, tokens, 1)
    return IsoFlop(profiles, float(a), float(b), float(log_n), float(log_d))


@dataclass(frozen=True)
class _Curve:
    run: str
    parameters: float
    flops: np.ndarray  # ascending
    tokens: np.ndarray
    loss: np.ndarray


def _curves(points: Points) -> list[_Curve]:
    curves = []
    for run, places in points.places().items():
        each = points.take(sorted(places, key=lambda place: points.flops[place]))
        curves.append(_Curve(run, float(each.parameters[0]), each.flops, each.tokens, each.loss))
    return curves


def _budgets(curves: list[_Curve]) -> list[float]:
    """Equal ratios over the budgets at which at least `LEAST` sizes have losses."""
    edges = sorted({float(each) for curve in curves for each in (curve.flops[0], curve.flops[-1])})
    inside = [
        flops
        for flops in itertools.chain(edges, (np.sqrt(x * y) for x, y in itertools.pairwise(edges)))
        if len({curve.parameters for curve in curves if curve.flops[0] <= flops <= curve.flops[-1]}) >= LEAST
    ]
    return [float(each) for each in np.geomspace(min(inside), max(inside), BUDGETS)] if inside else []


def _profile(curves: list[_Curve], flops: float) -> IsoFlopProfile | None:
    """The profile of a budget. None if too few sizes reach it."""
    reach = [each for each in curves if each.flops[0] * (1 - 1e-9) <= flops <= each.flops[-1] * (1 + 1e-9)]
    if len({each.parameters for each in reach}) < LEAST:
        return None
    at = np.log(flops)
    sizes = np.array([each.parameters for each in reach])
    tokens = np.exp([np.interp(at, np.log(each.flops), np.log(each.tokens)) for each in reach])
    loss = np.exp([np.interp(at, np.log(each.flops), np.log(each.loss)) for each in reach])
    x = np.log(sizes)
    middle = x.mean()
    bend, slope, level = np.polyfit(x - middle, loss, 2)
    best = None
    if bend > 0 and x.min() <= middle - slope / (2 * bend) <= x.max():
        lowest = middle - slope / (2 * bend)
        order = np.argsort(x)
        # Of this budget D falls with N along the runs themselves, whose FLOPs of a token are counted, not 6 N.
        best = float(np.exp(lowest)), float(np.exp(np.interp(lowest, x[order], np.log(tokens)[order])))
    parabola = (float(bend), float(slope - 2 * bend * middle), float(level - slope * middle + bend * middle**2))
    return IsoFlopProfile(flops, tuple(each.run for each in reach), sizes, tokens, loss, parabola, best)
