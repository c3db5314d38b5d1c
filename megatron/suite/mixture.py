"""Weights of a blend: by temperature, with fixed budgets and caps on epochs, and as tiny runs predict them.

The suite of tiny runs is RegMix's (Liu et al., 2024). It has random weights, a regression from weights to the loss, and
the mean of the weights with the best predictions. It assumes that mixtures keep their order from small models to large.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.data.errors import DataError
from megatron.data.plan import SamplePlan
from megatron.data.skipped_batches import LeftOut

STRENGTHS = np.geomspace(0.1, 5, 15)  # of Dirichlet distributions around the prior
STEP = 2e-4  # multiples of it are weights
BEST = 128  # predicted mixtures whose mean is taken
RIDGE = 1e-3


def shares(
    sizes: Mapping[str, float],
    tokens: float,
    temperature: float = 1.0,
    cap: float | None = None,
    budgets: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """The share of a run's tokens of each source.

    Args:
        sizes: tokens of each source.
        tokens: that the run reads.
        temperature: T of n^(1/T). 1: in proportion to the sizes. Infinite: equal shares, which with a cap are UniMax's
            (Chung et al., 2023).
        cap: largest number of epochs of a source. The rest is shared by the others, in their proportion.
        budgets: tokens of sources with a fixed number of them.

    Raises:
        DataError: the budgets exceed the tokens, or the sources have too few for the cap.
    """
    fixed = {name: value / tokens for name, value in (budgets or {}).items()}
    free = [name for name in sizes if name not in fixed]
    rest = 1 - sum(fixed.values())
    if rest < -1e-9 or (not free and abs(rest) > 1e-9):
        raise DataError("--budget", f"the budgets are {1 - rest:.4f} of the run's tokens", "change them, or --tokens")
    if over := [name for name, value in (budgets or {}).items() if cap is not None and value > cap * sizes[name]]:
        raise DataError(
            "--budget", f"{over[0]} would be read more than {cap:g} times", "lower its budget, or raise --cap"
        )
    free_sizes = np.array([sizes[name] for name in free], np.float64)
    limits = free_sizes * (cap if cap is not None else np.inf) / tokens
    if limits.sum() < rest - 1e-12:
        most = limits.sum() * tokens
        raise DataError(
            "--cap", f"the sources have {most:,.0f} tokens at {cap:g} epochs", "raise it, or lower --tokens"
        )
    return fixed | dict(zip(free, _fill(np.log(free_sizes) / temperature, limits, max(rest, 0.0)).tolist()))


def _fill(logs: np.ndarray, limits: np.ndarray, total: float) -> np.ndarray:
    """Numbers in proportion to exp(logs) that add up to `total`, none above its limit."""
    found, open_ = np.zeros(len(logs)), np.ones(len(logs), bool)
    while open_.any():
        left = total - found[~open_].sum()
        wanted = np.exp(logs[open_] - logs[open_].max())  # at a low temperature, most are 0 next to the largest of all
        found[open_] = wanted * (left / wanted.sum())
        full = open_ & (found > limits)
        if not full.any():
            break
        found[full] = limits[full]
        open_ &= ~full
    return found


def proposals(prior: Sequence[float], count: int, seed: int, most: float = 15.0) -> np.ndarray:
    """Different random mixtures around a prior, as RegMix draws them: float64 [count, sources], rows that sum to 1.

    Args:
        prior: shares of the sources, which sum to 1.
        most: a weight is at most this many times the prior's.

    Raises:
        DataError: there are fewer different mixtures.
    """
    draw = np.random.Generator(np.random.PCG64(seed))
    given = np.asarray(prior, np.float64)
    smooth = np.sqrt(given) / np.sqrt(given).sum()
    found: dict[bytes, np.ndarray] = {}
    for _ in range(1000 * count):
        row = draw.dirichlet(smooth * draw.choice(STRENGTHS))
        row = np.where(row < STEP, 0, row)
        if not row.sum() > 0 or (row > np.minimum(most * given, 1)).any():
            continue
        units = np.floor(row / row.sum() / STEP + 1e-9)
        units[row.argmax()] += round(1 / STEP) - units.sum()
        found.setdefault(units.tobytes(), units * STEP)
        if len(found) == count:
            return np.array(list(found.values()))
    raise DataError("--count", f"{len(found)} different mixtures were found", "ask for fewer")


@dataclass(frozen=True)
class Regression:
    """A loss as a linear function of the square roots of weights."""

    factors: np.ndarray
    held_out: float  # rank correlation of predicted and measured losses of the runs that the fit did not see, float

    @classmethod
    def of(cls, weights: np.ndarray, losses: np.ndarray, seed: int = 0, held: float = 0.25) -> "Regression":
        """Fit to measured runs. The held-out check is a fit to the others, and the result is a fit to all.

        Args:
            weights: [runs, sources].
            losses: [runs].

        Raises:
            DataError: there are fewer than 8 runs.
        """
        if len(weights) < 8:
            raise DataError("runs", f"{len(weights)} finished runs have a loss, and 8 are needed", "train more of them")
        order = np.random.Generator(np.random.PCG64(seed)).permutation(len(weights))
        test, train = np.split(order, [max(round(held * len(order)), 3)])
        trial = cls(_ridge(weights[train], losses[train]), 0.0)
        return cls(_ridge(weights, losses), rank_correlation(trial.predict(weights[test]), losses[test]))

    def predict(self, weights: np.ndarray) -> np.ndarray:
        return np.sqrt(weights) @ self.factors[:-1] + self.factors[-1]

    def best(self, prior: Sequence[float], seed: int = 0, candidates: int = 100_000) -> np.ndarray:
        """The mean of the mixtures that are predicted to be best, of many random ones around the prior."""
        draw = np.random.Generator(np.random.PCG64(seed))
        given = draw.dirichlet(np.asarray(prior), candidates)
        chosen = given[np.argsort(self.predict(given), kind="stable")[:BEST]].mean(axis=0)
        return chosen / chosen.sum()


def _ridge(weights: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Factors of the square roots, and last the constant, which is not penalised."""
    features = np.c_[np.sqrt(weights), np.ones(len(weights))]
    penalty = RIDGE * np.eye(features.shape[1])
    penalty[-1, -1] = 0
    return np.linalg.solve(features.T @ features + penalty, features.T @ losses)


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's, with mean ranks of equal values."""
    ranks = []
    for values in (one, other):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    first, second = (each - each.mean() for each in ranks)
    scale = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / scale) if scale else 0.0


def over_time(plan: SamplePlan, read: int, left_out: LeftOut, points: int) -> list[dict[str, Any]]:
    """Tokens of each source that the plan has before some steps, and that the run has read before its last one.

    Args:
        read: steps that the run has made.
        left_out: batches that it skipped.

    Returns:
        For each point the step, whether the run has reached it, and by source the tokens.
    """
    steps = {plan.steps * number // points for number in range(1, points + 1)}
    steps |= {plan.batches.step(phase.start) for phase in plan.phases} | {read}
    found = []
    for step in sorted(steps - {0}):
        counts = [_samples(plan, source.index, step, left_out) for source in plan.sources]
        tokens = {source.name: count * plan.options.new_tokens for source, count in zip(plan.sources, counts)}
        found.append({"step": step, "read": step <= read, "tokens": tokens})
    return found


def _samples(plan: SamplePlan, source: int, steps: int, left_out: LeftOut) -> int:
    """Samples of a source in the batches that the first steps read."""
    skipped, last, total, first = left_out.in_samples(plan.batches), plan.batches.before(steps), 0, 0
    # where each pair begins to act, seen through the pairs that were added after it
    jumps = {LeftOut(skipped.pairs[number:]).step(at) for number, (at, _) in enumerate(skipped.pairs, 1)}
    for end in [*sorted(jump for jump in jumps if jump is not None and jump < last), last]:
        begin = skipped.batch(first)
        total += plan.drawn(source, begin + end - first) - plan.drawn(source, begin)
        first = end
    return total
