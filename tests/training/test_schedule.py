"""Schedules against transformers, torch, the papers' formulas at their corners, and GPT-NeoX 1.0's own rates."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.problems import UserError
from megatron.training.schedule import Schedule, curve
from tests.training.settings import settings


def schedule(steps: int = 100, lr: float = 2e-3, **options) -> Schedule:
    return Schedule(settings(steps, optimizer={"lr": lr}, schedule=options))


def rates_of(scheduler_of, steps: int, lr: float = 2e-3) -> list[float]:
    """Rates that a torch scheduler gives to the updates 0 ... steps-1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, rates = scheduler_of(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def assert_same(ours: Schedule, theirs: list[float]) -> None:
    assert [ours.lr(step) for step in range(len(theirs))] == pytest.approx(theirs, rel=1e-12, abs=1e-18)


def test_cosine_is_that_of_transformers():
    ours = schedule(type="cosine", warmup_steps=10, min_lr_ratio=0.1)
    assert_same(
        ours,
        rates_of(
            lambda o: transformers.get_cosine_with_min_lr_schedule_with_warmup(
                o, num_warmup_steps=10, num_training_steps=100, min_lr_rate=0.1
            ),
            100,
        ),
    )


def test_linear_is_that_of_transformers():
    ours = schedule(type="linear", warmup_steps=7, min_lr_ratio=0.0)
    assert_same(ours, rates_of(lambda o: transformers.get_linear_schedule_with_warmup(o, 7, 100), 130))


def test_constant_is_that_of_transformers():
    ours = schedule(type="constant", warmup_steps=13)
    assert_same(ours, rates_of(lambda o: transformers.get_constant_schedule_with_warmup(o, 13), 100))


def test_inverse_sqrt_is_that_of_transformers():
    ours = schedule(type="inverse_sqrt", warmup_steps=9, min_lr_ratio=0.0)
    assert_same(ours, rates_of(lambda o: transformers.get_inverse_sqrt_schedule(o, 9), 100))


def test_cosine_without_warmup_is_that_of_torch():
    ours = schedule(type="cosine", min_lr_ratio=0.25)
    theirs = rates_of(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 100, eta_min=0.25 * 2e-3), 100)
    assert [ours.lr(step) for step in range(100)] == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_wsd_is_that_of_transformers(shape):
    ours = schedule(
        type="wsd", warmup_steps=10, decay_steps=20, decay_shape=shape, min_lr_ratio=0.1, initial_lr_ratio=0.1
    )
    assert_same(
        ours,
        rates_of(
            lambda o: transformers.get_wsd_schedule(
                o, num_decay_steps=20, num_warmup_steps=10, num_stable_steps=70, min_lr_ratio=0.1, decay_type=shape
            ),
            100,
        ),
    )


@pytest.mark.parametrize(
    "shape, halfway",
    [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5), ("exponential", 2 * math.sqrt(0.5) - 1)],
)
def test_wsd_corners(shape, halfway):
    ours = schedule(lr=1.0, type="wsd", warmup_steps=10, decay_steps=20, decay_shape=shape, min_lr_ratio=0.0)
    assert [ours.lr(step) for step in (0, 5, 10, 80)] == [0.0, 0.5, 1.0, 1.0]
    assert ours.lr(90) == pytest.approx(halfway, rel=1e-12)
    assert ours.lr(100) == pytest.approx(0.0, abs=1e-15) and ours.lr(1000) == ours.lr(100)


@pytest.mark.parametrize("shape, halfway", [("cosine", 0.65), ("inverse_sqrt", 1 / math.sqrt((1 + 1 / 0.3**2) / 2))])
def test_infinite_corners(shape, halfway):
    ours = schedule(
        lr=1.0,
        type="infinite",
        warmup_steps=10,
        cooldown_steps=20,
        cooldown_shape=shape,
        decay_steps=40,
        constant_lr_ratio=0.3,
        min_lr_ratio=0.03,
    )
    assert [ours.lr(step) for step in (0, 5, 10)] == [0.0, 0.5, 1.0]
    assert ours.lr(20) == pytest.approx(halfway, rel=1e-12)
    assert ours.lr(30) == ours.lr(60) == 0.3
    assert ours.lr(80) == pytest.approx(math.sqrt(0.3 * 0.03), rel=1e-12)  # the geometric mean, halfway
    assert ours.lr(100) == ours.lr(500) == pytest.approx(0.03, rel=1e-12)


# From both versions' own code, Pythia 160M: lr 6e-4, min_lr 6e-5, 143,000 steps, warmup 0.01.
PYTHIA = dict(steps=143_000, lr=6e-4, type="cosine", warmup_fraction=0.01, min_lr_ratio=0.1)


def test_neox_v1_gives_pythias_rates():
    old = schedule(**PYTHIA, compat="neox-v1")
    assert old.lr(0) == 0.0
    assert old.lr(1) == pytest.approx(6e-4 / 1430, rel=1e-12)
    assert old.lr(1430) == pytest.approx(6e-4, rel=1e-12)
    assert f"{old.lr(71_500):.4e}" == "3.0942e-04"
    assert f"{schedule(**PYTHIA).lr(71_500):.4e}" == "3.3428e-04"
    floor = 0.1 * 6e-4
    first = next(step for step in range(110_000, 143_000) if old.lr(step) <= floor * (1 + 1e-12))
    assert abs(first - 115_140) < 5
    assert all(old.lr(step) == pytest.approx(floor, rel=1e-12) for step in (first, 130_000, 142_999, 200_000))


def neox_v1(n: int, lr: float, low: float, warmup: float, end: int, style: str) -> float:
    """The rule as a table of cases, from the description of GPT-NeoX 1.0."""
    if n > end - warmup:
        return neox_v1(math.floor(end - warmup), lr, low, warmup, end, style)
    if warmup and n <= warmup:
        return lr * n / warmup
    gone = (n - warmup) / end
    return max({"cosine": lr * math.cos(math.pi * gone / 2) ** 2, "linear": lr - lr * gone, "constant": lr}[style], low)


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 25])
def test_neox_v1_is_the_described_rule(style, warmup):
    ours = schedule(steps=400, lr=3e-4, type=style, warmup_steps=warmup, min_lr_ratio=0.2, compat="neox-v1")
    expected = [neox_v1(n, 3e-4, 6e-5, warmup, 400, style) for n in range(450)]
    assert [ours.lr(step) for step in range(450)] == pytest.approx(expected, rel=1e-9)


def neox_today(n: int, lr: float, low: float, warmup: float, end: int, style: str) -> float:
    """The rule as a table of cases, from the description of GPT-NeoX's current version."""
    if warmup and n <= warmup:
        return lr * (n or 1) / warmup
    left = (end - n) / (end - warmup)
    return max(
        {"cosine": low + (lr - low) * math.sin(math.pi * left / 2) ** 2, "linear": lr * left, "constant": lr}[style],
        low,
    )


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 25, 0.5])
def test_neox_is_the_rule_of_today(style, warmup):
    """At every update, the first too. After the end the last rate stays."""
    share = {"warmup_fraction": warmup / 400} if warmup == 0.5 else {"warmup_steps": warmup}
    ours = schedule(steps=400, lr=3e-4, type=style, min_lr_ratio=0.2, compat="neox", **share)
    expected = [neox_today(min(n, 400), 3e-4, 6e-5, warmup, 400, style) for n in range(450)]
    assert [ours.lr(step) for step in range(450)] == pytest.approx(expected, rel=1e-12)
    assert schedule(**PYTHIA, compat="neox").lr(0) == pytest.approx(6e-4 / 1430, rel=1e-12)
    assert schedule(**PYTHIA).lr(0) == 0.0  # what native configurations always had


def test_warmup_in_tokens_fraction_and_steps_agree():
    tokens = schedule(type="cosine", warmup_tokens=20 * 4 * 8)  # 4 samples of 8 tokens per step
    share, steps = schedule(type="cosine", warmup_fraction=0.2), schedule(type="cosine", warmup_steps=20)
    for step in range(101):
        assert tokens.lr(step) == steps.lr(step) == pytest.approx(share.lr(step), rel=1e-12)


def test_a_warmup_in_tokens_is_linear_in_the_tokens_read():
    """Batches of 1, 2 and 4 samples of 8 tokens: the rate of a step follows the samples before it."""
    stages = [{"until": 3, "global_batch_size": 1}, {"until": 7, "global_batch_size": 2}]
    sizes = [1] * 3 + [2] * 4 + [4] * 30
    for start in (0, 2):
        options = {"type": "constant", "warmup_tokens": 25 * 8, "start": start}
        found = Schedule(settings(100, optimizer={"lr": 2e-3}, schedule=options, training={"batch_schedule": stages}))
        for step in range(start, 30):
            read = sum(sizes[start:step])
            assert found.lr(step) == pytest.approx(2e-3 * min(read / 25, 1), rel=1e-12)


def test_rewarming_is_a_shifted_schedule():
    options = dict(type="cosine", warmup_steps=5, initial_lr_ratio=0.1, min_lr_ratio=0.1)
    fresh, again = schedule(steps=60, **options), schedule(steps=100, start=40, **options)
    assert [again.lr(step + 40) for step in range(61)] == [fresh.lr(step) for step in range(61)]
    assert again.lr(40) == pytest.approx(0.1 * 2e-3)
    with pytest.raises(ValueError, match="schedule.start.*begins at step 40.*step 39"):
        again.lr(39)


TYPES = st.sampled_from(["linear", "cosine", "wsd", "inverse_sqrt", "infinite"])


@given(
    kind=TYPES,
    decay=st.sampled_from(["linear", "sqrt", "cosine", "exponential"]),
    warmup=st.integers(1, 500),
    cooldown=st.integers(1, 3000),
    cool=st.sampled_from(["cosine", "inverse_sqrt"]),
    low=st.floats(0.01, 0.4),
)
def test_no_jumps_and_bounds(kind, decay, warmup, cooldown, cool, low):
    """Neighbouring rates differ little except where the warmup climbs, and stay between the floor and the peak."""
    steps, tail = 10_000, 1000
    ours = schedule(
        steps,
        lr=1.0,
        type=kind,
        warmup_steps=warmup,
        decay_steps=tail,
        decay_shape=decay,
        cooldown_steps=cooldown,
        cooldown_shape=cool,
        min_lr_ratio=low,
        constant_lr_ratio=0.5,
    )
    rates = [ours.lr(step) for step in range(warmup, steps + 5)]
    assert rates[0] == 1.0 and all(low * (1 - 1e-9) <= rate <= 1.0 for rate in rates)
    assert all(later <= earlier + 1e-15 for earlier, later in zip(rates, rates[1:]))
    # The steepest falls: the square root's first step, and the end of a short cooldown or warmup-scaled decay.
    steepest = max(1.01 * math.sqrt(1 / tail), 2 / cooldown if kind == "infinite" else 0, 0.51 / warmup)
    assert max(a - b for a, b in zip(rates, rates[1:])) <= steepest


def test_multiplier_is_a_share_of_the_peak():
    ours = schedule(type="cosine", warmup_steps=10)
    assert all(ours.multiplier(s) * 2e-3 == pytest.approx(ours.lr(s), rel=1e-12) for s in range(100))


def test_an_unresolved_configuration_is_refused():
    with pytest.raises(ValueError, match="schedule.steps has no value"):
        Schedule(settings(10, schedule={"steps": None}))
    with pytest.raises(ValueError, match="schedule.decay_steps has no value"):
        schedule(type="wsd", decay_steps=None)


def warmup_alone(n, peak, span, options):
    """A schedule of one's own whose options are wrong: without them it has no rate after the warmup."""
    return options.options.get("rate", math.nan) * peak


def test_a_schedule_of_ones_own_is_tried_before_the_first_step():
    own = {"type": f"{__name__}:warmup_alone", "warmup_steps": 5}
    assert schedule(**own, options={"rate": 0.25}).lr(7) == 0.25 * 2e-3
    with pytest.raises(UserError, match="must give rates of at least 0, not nan"):
        schedule(**own)
    with pytest.raises(UserError, match="must give rates of at least 0, not -1.0"):
        schedule(**own, options={"rate": -1.0})


def test_curve_shows_every_corner():
    config = settings(50_000, schedule=dict(type="wsd", warmup_steps=333, decay_steps=4444))
    points = curve(config, points=100)
    steps = [step for step, _ in points]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == 49_999
    assert {333, 50_000 - 4444} <= set(steps) and len(steps) < 120
    assert dict(points)[333] == config.optimizer.lr
