"""Every schedule that the rules let pass can be drawn, from its first step to after its last."""

from __future__ import annotations

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import ConfigError, resolve
from megatron.config.resolution import combine
from megatron.config.source.layers import ConfigSource
from megatron.training.schedule import Schedule
from tests.config.test_merge import BASE

sections = st.fixed_dictionaries(
    {"type": st.sampled_from(["constant", "linear", "cosine", "wsd", "inverse_sqrt", "infinite"])},
    optional={
        "warmup_steps": st.integers(0, 12),
        "warmup_tokens": st.integers(0, 400),
        "warmup_fraction": st.floats(0, 1),
        "steps": st.integers(1, 20),
        "start": st.integers(0, 12),
        "min_lr_ratio": st.sampled_from([0.0, 0.1, 0.7]),
        "initial_lr_ratio": st.sampled_from([0.0, 0.5]),
        "decay_steps": st.integers(1, 12),
        "cooldown_steps": st.integers(0, 12),
        "constant_lr_ratio": st.sampled_from([0.2, 0.5]),
        "compat": st.sampled_from(["none", "neox", "neox-v1"]),
    },
)


@settings(max_examples=300, deadline=None)
@given(sections)
def test_what_the_rules_accept_can_be_drawn(section):
    try:
        resolved = combine([ConfigSource({**copy.deepcopy(BASE), "schedule": section})], ranks=1)
    except ConfigError as error:
        assert all(each.key.startswith("schedule.") for each in error.problems)
        return
    config = resolved.config
    schedule, peak = Schedule(config), config.optimizer.lr
    rates = [schedule.lr(step) for step in range(config.schedule.start, config.schedule.steps + 5)]
    warned = any("the peak" in warning.rule for warning in resolved.warnings)
    assert all(rate >= 0 and (rate <= peak * (1 + 1e-12) or warned) for rate in rates), rates
    assert len(set(rates[-4:])) == 1, "after the end the rate stays"


def test_some_of_them_are_accepted():
    """The property above is not empty: each type has a section that passes."""
    more = {"inverse_sqrt": {"warmup_steps": 2}, "infinite": {"cooldown_steps": 2}}
    for kind in ("constant", "linear", "cosine", "wsd", "inverse_sqrt", "infinite"):
        resolve({**copy.deepcopy(BASE), "schedule": {"type": kind, **more.get(kind, {})}})
