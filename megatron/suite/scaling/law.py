"""The parametric law L(N, D) = E + A / N^alpha + B / D^beta, fitted to losses of runs.

Hoffmann et al. 2022 (arXiv 2203.15556), approach 3: the sum of Huber losses of log L is minimised by L-BFGS from a grid
of starts. Besiroglu et al. 2024 (arXiv 2404.10102) show that their published numbers came of an optimizer that stopped
early, because the objective was so small that its changes fell below the tolerance. Here the objective is divided by
the square of Huber's delta, logarithms are taken from their means, and gradients are exact.
"""

from __future__ import annotations

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

    They are the logarithms of the law's three terms at the mean log N and log D, and the exponents.

    Attributes:
        x, y: log N and log D [n], less their means.
    """

    x: np.ndarray
    y: np.ndarray
    z: np.ndarray  # log L [n]
    means: tuple[float, float]
    delta: float

    @classmethod
    def of(cls, points: Points, delta: float) -> _Problem:
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
