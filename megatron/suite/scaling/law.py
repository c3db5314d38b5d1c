"""The parametric law L(N, D) = E + A / N^alpha + B / D^beta, fitted to losses of runs, and their IsoFLOP profiles.

Hoffmann et al. 2022 (arXiv 2203.15556), approach 3: the sum of Huber losses of log L is minimised by L-BFGS from a grid
of starts. Besiroglu et al. 2024 (arXiv 2404.10102) show that their published numbers came of an optimizer that stopped
early, because the objective was so small that its changes fell below the tolerance. Here the objective is divided by
the square of Huber's delta, logarithms are taken from their means, and gradients are exact."""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from megatron.config.problems import UserError

from .points import Points

DELTA = 1e-3  # of log L, as in Hoffmann et al.
LEAST = 6  # points: one more than the law has numbers
_EXPONENTS = (0.1, 0.25, 0.45, 0.7, 1.1)
_FLOORS = (0.2, 0.5, 0.75, 0.95)  # E as a share of the lowest loss
_SHARES = (0.05, 0.3, 0.7, 0.95)  # of what is above E, how much is due to N
_TRIED = 40  # starts of the grid: those with the lowest objectives


@dataclass(frozen=True)
class Law:
    """L(N, D) = floor + exp(log_a) / N^alpha + exp(log_b) / D^beta, in nats per token."""

    floor: float
    log_a: float
    log_b: float
    alpha: float
    beta: float
    objective: float = math.nan  # sum of the Huber losses of log L at the fit
    points: int = 0  # how many it was fitted to

    def loss(self, parameters: np.ndarray | float, tokens: np.ndarray | float) -> np.ndarray:
        """The law's loss of N parameters after D tokens."""
        n, d = np.log(parameters), np.log(tokens)
        return np.asarray(self.floor + np.exp(self.log_a - self.alpha * n) + np.exp(self.log_b - self.beta * d))

    @property
    def exponents(self) -> tuple[float, float]:
        """(a, b): of compute C the best N grows with C^a and the best D with C^b, where C = 6 N D."""
        total = self.alpha + self.beta
        return self.beta / total, self.alpha / total


def fit_law(points: Points, *, delta: float = DELTA, starts: Iterable[Law] = ()) -> Law:
    """Fit the law.

    Args:
        points: at least `LEAST`, with more than one N and more than one D.
        delta: Huber's. Residuals of log L beyond it count linearly.
        starts: where to begin instead of the grid, such as a fit of nearly the same points.

    Raises:
        UserError: there are too few points, or all have the same N or the same D.
    """
    if len(points) < LEAST:
        raise UserError(f"a law of five numbers needs at least {LEAST} points, and there are {len(points)}")
    for name, values in (("parameters", points.parameters), ("tokens", points.tokens)):
        if len(np.unique(values)) < 2:
            raise UserError(f"a law needs runs with different {name}, and all have {values[0]:.4g}")
    problem = _Problem.of(points, delta)
    given = [problem.numbers(start) for start in starts]
    found = [
        minimize(
            problem.value,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=[(None, None)] * 3 + [(1e-3, 10.0)] * 2,
            options={"maxiter": 1000, "maxfun": 2000, "ftol": 1e-12, "gtol": 1e-6},
        )
        for start in given or sorted(problem.grid(), key=lambda start: problem.value(start)[0])[:_TRIED]
    ]
    best = min(found, key=lambda each: each.fun)
    return problem.law(best.x, float(best.fun) * delta**2)


@dataclass(frozen=True)
class _Problem:
    """The objective as a function of five numbers (e, a, b, alpha, beta).

    They are the logarithms of the law's three terms at the mean log N and log D, and the exponents."""

    x: np.ndarray  # x, y: log N and log D [n], less their means
    y: np.ndarray
    z: np.ndarray  # log L [n]
    means: tuple[float, float]
    delta: float

    @classmethod
    def of(cls, points: Points, delta: float) -> "_Problem":
        n, d = np.log(points.parameters), np.log(points.tokens)
        means = float(n.mean()), float(d.mean())
        return cls(n - means[0], d - means[1], np.log(points.loss), means, delta)

    def value(self, numbers: np.ndarray) -> tuple[float, np.ndarray]:
        """The objective over delta squared, and its gradient."""
        e, a, b, alpha, beta = numbers
        terms = np.stack([np.full_like(self.x, e), a - alpha * self.x, b - beta * self.y])
        most = terms.max(0)
        shares = np.exp(terms - most)
        total = shares.sum(0)
        shares /= total
        rest = self.z - most - np.log(total)
        small = np.clip(rest, -self.delta, self.delta)
        # Huber's loss is small * (rest - small / 2): r^2 / 2 within delta, delta * (|r| - delta / 2) beyond it.
        value = float((small * (rest - small / 2)).sum()) / self.delta**2
        by = -small / self.delta**2 * shares  # [3, n]
        gradient = [*by.sum(1), -(by[1] * self.x).sum(), -(by[2] * self.y).sum()]
        return value, np.array(gradient)

    def grid(self) -> Iterator[np.ndarray]:
        lowest, middle = float(np.exp(self.z.min())), float(np.exp(np.median(self.z)))
        for alpha, beta, floor, share in itertools.product(_EXPONENTS, _EXPONENTS, _FLOORS, _SHARES):
            above = middle - floor * lowest
            yield np.log([floor * lowest, share * above, (1 - share) * above, 1, 1]) + [0, 0, 0, alpha, beta]

    def numbers(self, law: Law) -> np.ndarray:
        n, d = self.means
        e = math.log(max(law.floor, 1e-300))
        return np.array([e, law.log_a - law.alpha * n, law.log_b - law.beta * d, law.alpha, law.beta])

    def law(self, numbers: np.ndarray, objective: float) -> Law:
        e, a, b, alpha, beta = map(float, numbers)
        n, d = self.means
        return Law(math.exp(e), a + alpha * n, b + beta * d, alpha, beta, objective, len(self.x))


BUDGETS = 8
LEAST_SIZES = 4  # runs of a profile: one more than a parabola has numbers


@dataclass(frozen=True)
class IsoFlopProfile:
    """The losses of several sizes with one budget."""

    flops: float  # the budget
    runs: tuple[str, ...]  # names of the runs that have it
    parameters: np.ndarray  # parameters, tokens, loss: float64 [n]
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
    """Fit parabolas and the power laws through their minima (Hoffmann et al. 2022, approach 2).

    Of each budget a parabola goes through the losses over log N, and its minimum is the best N of that budget. Runs
    need not end at the budgets. Where a run has several points, its loss at a budget is taken between the two around
    it, on a line of log L over log tokens.

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
        if len({curve.parameters for curve in curves if curve.flops[0] <= flops <= curve.flops[-1]}) >= LEAST_SIZES
    ]
    return [float(each) for each in np.geomspace(min(inside), max(inside), BUDGETS)] if inside else []


def _profile(curves: list[_Curve], flops: float) -> IsoFlopProfile | None:
    """The profile of a budget. None if too few sizes reach it."""
    reach = [each for each in curves if each.flops[0] * (1 - 1e-9) <= flops <= each.flops[-1] * (1 + 1e-9)]
    if len({each.parameters for each in reach}) < LEAST_SIZES:
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
