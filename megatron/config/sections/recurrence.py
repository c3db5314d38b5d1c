"""How often a recurrent core is repeated (Geiping et al. 2025, arXiv 2502.05171)."""

from __future__ import annotations

import math
from typing import Any, Literal

from ..section import Derivable, Derived, Section, key


def _repeats(at: Any) -> bool:
    return any(block.recurrent for block in at.blocks)


def _state_std(own: dict[str, Any], at: Any) -> float | None:
    if not _repeats(at):
        return None
    width = at["model.parametrization.base_width"] or at["model.hidden_size"]
    return at["model.embedding.multiplier"] * math.sqrt(2.0 / (5.0 * width))


class RecurrenceOptions(Section):
    sampling: Literal["lognormal_poisson", "fixed"] = key(
        "lognormal_poisson",
        "Passes through the core in a training step. lognormal_poisson: a log-normal rate with mean `mean` is "
        "drawn, then Poisson(rate) + 1 passes, once per step. fixed: `mean` passes in every step.",
    )
    mean: int = key(32, "Mean of the rate at which passes are drawn.", unit="passes", gt=0, le=1024)
    spread: float = key(0.5, "Standard deviation of the rate's logarithm.", ge=0, le=2)
    backward: int = key(8, "Backpropagate through the last n passes only. They bound the activation memory.", gt=0)
    evaluation: Derivable[int] = key(
        None,
        "Passes in evaluation and generation.",
        unit="passes",
        derived=Derived("model.recurrence.mean", lambda own, at: own["mean"] if _repeats(at) else None, (".mean",)),
        gt=0,
        le=100_000,
    )
    state_std: Derivable[float] = key(
        None,
        "Standard deviation of the random state that the core starts from: normal, cut off at three of them.",
        derived=Derived(
            "model.embedding.multiplier * sqrt(2 / (5 * hidden_size)), with the width of the base model under a "
            "parametrization",
            _state_std,
            ("model.embedding.multiplier", "model.hidden_size", "model.parametrization.base_width"),
        ),
        ge=0,
    )
    norm: Literal["head", "none"] = key(
        "head", "head: the state after the last pass is normalised with the weights of the norm before the head."
    )
