"""The rules for spikes: against the published ones written out in torch."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest
import torch

from megatron.engine.protocol import LOSS, NORM, Spike
from megatron.features.spikes.options import SpikesSection
from megatron.features.spikes.rule import RunningWindow, SpikeRule


def draw(count: int, seed: int = 0) -> list[float]:
    values = np.random.default_rng(seed).lognormal(0.0, 0.3, count)
    values[[40, 41, 77]] *= 30
    return values.tolist()


def olmo(values: list[float], window: int, sigma: float) -> list[bool]:
    """OLMo-core's rule for one number: the last value against mean and unbiased deviation of the `window` before it."""
    found = []
    for index, value in enumerate(values):
        past = torch.tensor(values[max(0, index - window) : index], dtype=torch.float64)
        if len(past) < max(2, window // 2):
            found.append(False)
            continue
        std, mean = torch.std_mean(past)
        found.append(bool(value - mean > sigma * std))
    return found


@pytest.mark.parametrize("window, sigma", [(128, 6.0), (16, 3.0), (5, 2.0), (16, 0.5), (128, 0.3)])
def test_the_window_is_that_of_olmo_core(window: int, sigma: float) -> None:
    losses, norms = draw(150), draw(150, 1)
    rule = SpikeRule(SpikesSection(action="skip", window=window, sigma=sigma))
    found = [rule.judge(loss, norm)[0] for loss, norm in zip(losses, norms)]
    one, other = olmo(losses, window, sigma), olmo(norms, window, sigma)
    assert [each is not None for each in found] == [a or b for a, b in zip(one, other)]
    assert any(one) and any(each and each.name == LOSS for each in found)
    for watch, expected in (("loss", one), ("grad_norm", other)):
        rule = SpikeRule(SpikesSection(action="skip", window=window, sigma=sigma, watch=watch))
        assert [rule.judge(a, b)[0] is not None for a, b in zip(losses, norms)] == expected


def test_sums_that_go_with_the_window_do_not_drift() -> None:
    """Values of all sizes come and go. Then the window is as if it had only seen the last ones."""
    generator = np.random.default_rng(3)
    values = (generator.normal(0, 1, 3000) * 10.0 ** generator.integers(-30, 60, 3000)).tolist()
    window, fresh = RunningWindow(7, 2.0), RunningWindow(7, 2.0)
    last = draw(100)[-7:]
    for value in [*values, *last]:
        window.add(value)
    for value in last:
        fresh.add(value)
    assert window.values == fresh.values == last
    limit = window.exceeded(1e3)
    assert limit == fresh.exceeded(1e3)
    assert limit == pytest.approx(statistics.fmean(last) + 2.0 * statistics.stdev(last), rel=1e-14)


@pytest.mark.parametrize("value", [0.1, 0.0, 1e-40, 3e38, -2.0])
def test_a_value_that_stays_what_it_was_is_no_spike(value: float) -> None:
    window = RunningWindow(5, 0.5)
    for _ in range(9):
        assert window.exceeded(value) is None
        window.add(value)
    assert window.exceeded(value + abs(value) / 1e6 + 1e-44) is not None


def test_zclip() -> None:
    """The published update, written with tensors: the mean first, then the variance about the new mean."""
    norms = draw(150)
    rule = SpikeRule(SpikesSection(action="clip"))
    first = torch.tensor(norms[:25], dtype=torch.float64)
    mean, variance = first.mean(), first.var(unbiased=False)
    assert all(rule.judge(1.0, norm) == (None, None) for norm in norms[:25])
    clipped = 0
    for norm in norms[25:]:
        z = (norm - mean) / (variance.sqrt() + 1e-6)
        bound = mean + 2.5 * variance.sqrt() / (z / 2.5) if z > 2.5 else torch.tensor(norm, dtype=torch.float64)
        spike, found = rule.judge(1.0, norm)
        assert (spike is not None) == bool(z > 2.5)
        if spike is not None:
            clipped += 1
            assert found == pytest.approx(float(bound), rel=1e-12) and spike.limit == found < norm
        mean = 0.97 * mean + 0.03 * bound
        variance = 0.97 * variance + 0.03 * (bound - mean) ** 2
    assert clipped >= 3


def test_numbers_that_are_none_do_not_reach_the_statistics() -> None:
    """In OLMo-core a nan in the window makes every later comparison false, and so skips all steps of a window."""
    for action in ("skip", "clip"):
        rule, other = (SpikeRule(SpikesSection(action=action, window=8, non_finite="skip")) for _ in range(2))
        for index, value in enumerate(draw(100)):
            if index in (3, 30, 60):
                spike, bound = rule.judge(math.nan if index != 30 else 1.0, math.inf)
                assert isinstance(spike, Spike) and spike.action == "skip" and spike.leaves_out and bound is None
            assert rule.judge(value, value) == other.judge(value, value)
    assert SpikeRule(SpikesSection()).judge(math.nan, 1.0)[0].action == "stop"
    assert all(SpikeRule(SpikesSection()).judge(value, value)[0] is None for value in draw(100))


@pytest.mark.parametrize("action", ["skip", "clip"])
def test_the_state_is_all_there_is(action: str) -> None:
    options = SpikesSection(action=action, window=20, sigma=3.0)
    for cut in (0, 10, 25, 60):
        whole, part = SpikeRule(options), SpikeRule(options)
        for value in draw(100)[:cut]:
            assert whole.judge(value, 2 * value) == part.judge(value, 2 * value)
        state, part = json.loads(json.dumps(part.state())), SpikeRule(options)
        part.restore(state)
        for value in draw(100)[cut:]:
            assert whole.judge(value, 2 * value) == part.judge(value, 2 * value)
    assert whole.windows[NORM].values == part.windows[NORM].values
