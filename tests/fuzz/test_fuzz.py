"""Random configurations on random layouts give the numbers of one process. Random mistakes are refused or train.

The seed of each pair is its number, so a miss can be run again: `pytest -m ""
"tests/fuzz/test_fuzz.py::test_pair[17]"`. How far a layout may be off follows from what rounding does to one process.
Some models turn half a last digit of a weight into a thousandth of a gradient norm two steps later. So a miss is
followed by runs of one process with such weights. A layout that is off by at most ten times their difference, in each
step, is not to blame. A miss that is reported then still has a control: the same configuration in one process with
other micro-batches.
"""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fuzz.draw import STEPS, configuration, folded_layout, layout, mutation, refused, sequence_layout
from tests.margins import Measured
from tests.model.kernels.test_compiled_parts import trace, traced
from tests.selection import toured
from tests.training import runs
from tests.training.layouts.test_resume_layouts import identical, together
from tests.training.matrix import merged
from tests.workers import run

QUICK, ALL = 8, 200
FOLDED = 40  # pairs that begin or end on ranks that share the rows of matrices
SHARED = 40  # pairs on ranks that share sequences
COMPILED = 40  # whose layers, or parts of them, are compiled
Cut = tuple[dict[str, Any], int]  # a layout, and how many ranks it has
SHAKEN = 6  # runs of one process with weights that differ in their last digit
LOSS = NORM = 1e-5  # next to ten times what rounding does to one process


def pairs() -> list:
    return [pytest.param(seed, marks=[] if seed < QUICK else [pytest.mark.slow]) for seed in range(ALL)]


def worst(found, expected) -> Measured:
    return Measured(np.max(np.abs(np.array(found) / np.array(expected) - 1.0)))


def within_the_spread(values: dict[str, Any], one, exact, losses, norms) -> bool:
    """Whether each step is off by at most ten times what it is off in one process with weights that are shaken."""
    others = [exact, *(runs.plainly(values, shaken=seed) for seed in range(SHAKEN))]

    def near(found, expected: list[float], of_others: list[list[float]], bound: float) -> bool:
        spread = np.max(np.abs(np.array(of_others) / np.array(expected) - 1.0), axis=0)
        return bool(np.all(np.abs(np.array(found) / np.array(expected) - 1.0) < bound + 10 * spread))

    return near(losses, one.losses, [each.losses for each in others], LOSS) and near(
        norms, one.norms, [each.norms for each in others], NORM
    )


@pytest.mark.parametrize("seed", toured(pairs(), "layouts"))
def test_pair(seed: int, tmp_path: Path):
    """Begun on one layout, ended on another from a random step on. The start and what is handed over bit for bit."""
    draw, values = random.Random(seed), configuration(seed)
    first, second = (layout(draw, values) for _ in range(2))
    check(values, first, second, draw.randint(1, STEPS - 1), tmp_path)


@pytest.mark.parametrize("seed", [pytest.param(each, marks=[pytest.mark.slow] * (each > 0)) for each in range(SHARED)])
def test_pair_with_shared_sequences(seed: int, tmp_path: Path):
    """Begun and ended where ranks share sequences, by other methods, cuts and chunks. Half of the stacks have no layer
    that needs the token before, so that cuts may be zigzag."""
    values = configuration(4000 + seed, without=("mamba", "rwkv", "delta", "cca") if seed % 2 else ())
    values, draw = merged(values, {"training": {"sequence_length": 24}}), random.Random(4000 + seed)
    first, second = (sequence_layout(draw, values) for _ in range(2))
    check(values, first, second, draw.randint(1, STEPS - 1), tmp_path)


@pytest.mark.parametrize(
    "seed", toured([pytest.param(each, marks=[pytest.mark.slow] * (each > 1)) for each in range(FOLDED)], "layouts")
)
def test_pair_with_shared_rows(seed: int, tmp_path: Path):
    """Begun (or ended) where ranks share rows, and ended (or begun) on any layout."""
    values, draw = configuration(2000 + seed), random.Random(2000 + seed)
    first, second = folded_layout(draw, values), layout(draw, values)
    if seed % 2:
        first, second = second, first
    check(values, first, second, draw.randint(1, STEPS - 1), tmp_path)


@pytest.mark.layouts
@pytest.mark.parametrize(
    "seed", [pytest.param(each, marks=[pytest.mark.slow] * (each > 0)) for each in range(COMPILED)]
)
def test_pair_compiled(seed: int):
    """Compiled parts of layers compute the same as plain ones, on layouts of all sorts."""
    draw, values = random.Random(6000 + seed), configuration(6000 + seed)
    cut, ranks = draw.choice([layout, folded_layout, sequence_layout])(draw, values)
    own = merged(merged(values, cut), {"training": {"compile": "layer"}})
    losses, norms = run(ranks, compiled_steps, own, ranks)[0]
    like_one_process(values, losses, norms, f"\n{own}\non {ranks} ranks")


def compiled_steps(values: dict[str, Any], ranks: int) -> tuple[list[float], list[float]]:
    """The steps of a rank, compiled to torch's own operations."""
    trace()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="torch.compile failed")
            config, engine = runs.start(values, ranks)
            return runs.steps(config, engine, 0, STEPS)
    finally:
        traced()


def check(values: dict[str, Any], first_layout: Cut, second_layout: Cut, between: int, tmp_path: Path) -> None:
    """Train some steps on one layout and the rest on the other, and compare with one process."""
    (first_cut, first_ranks), (second_cut, second_ranks) = first_layout, second_layout
    told = f"\n{values}\n{between} steps on {first_ranks}: {first_cut}\nthen on {second_ranks}: {second_cut}"

    first = together(merged(values, first_cut), first_ranks, between, None, tmp_path)
    masters = {name: each for (name, state), each in first.begin.items() if state == "master"}
    for name, wanted in runs.initial(values).items():
        assert np.array_equal(masters[name].view(np.uint8), wanted.view(np.uint8)), f"{name} starts otherwise{told}"
    checkpoint = next(tmp_path.glob("step_*"))
    second = together(merged(values, second_cut), second_ranks, STEPS - between, checkpoint, None)
    identical(second.begin, first.end)

    losses, norms = first.losses + second.losses, first.norms + second.norms
    like_one_process(values, losses, norms, told)


def like_one_process(values: dict[str, Any], losses: list[float], norms: list[float], told: str) -> None:
    """Losses and gradient norms of a run's first steps equal one process, but for rounding."""
    one, exact = runs.plainly(values), runs.plainly(values, exact=True)
    near = worst(losses, one.losses) < LOSS + 10 * worst(one.losses, exact.losses)
    near &= worst(norms, one.norms) < NORM + 10 * worst(one.norms, exact.norms)
    if not near and not within_the_spread(values, one, exact, losses, norms):
        other = runs.plainly(merged(values, {"training": {"micro_batch_size": 1}}))
        pytest.fail(
            f"losses off by {worst(losses, one.losses):.1e}, norms by {worst(norms, one.norms):.1e}; the control by "
            f"{worst(other.losses, one.losses):.1e} and {worst(other.norms, one.norms):.1e}{told}"
        )


def short_run(values: dict[str, Any]) -> list[float]:
    config, engine = runs.start(values, 1)
    return runs.steps(config, engine, 0, 1)[0]


@pytest.mark.parametrize("seed", pairs()[:20])
def test_mistakes_are_refused_or_train(seed: int):
    """Five mistakes in each configuration: a sentence with the key, or a step with a loss. Never another exception."""
    draw, values = random.Random(1000 + seed), configuration(seed)
    for _ in range(5):
        changed = mutation(draw, values)
        told = refused(changed, 1)
        if told is not None:
            assert len(told.splitlines()) >= 1 and " " in told, changed
            continue
        (losses,) = run(1, short_run, merged(changed, {"zero": {"stage": 1}}))
        assert np.isfinite(losses).all() or not losses, changed
