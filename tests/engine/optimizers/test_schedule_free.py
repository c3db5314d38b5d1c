"""Schedule-free AdamW on one process: against the authors' package."""

from __future__ import annotations

import pytest
import schedulefree
import torch

from megatron.engine.optimizers.groups import build_optimizer, set_learning_rate
from tests.engine.optimizers.test_optimizers import gradients, model
from tests.training.settings import settings

WARMUP, STEPS, PEAK = 3, 7, 0.02


@pytest.mark.parametrize("options", [{}, {"power": 1.5, "rate_power": 1.0}])
def test_it_is_the_authors(options):
    """In float64: y while training, and x for evaluation. Their weight decay is that of the whole group. One group has
    half the rate."""
    groups = {"hidden": {"lr_scale": 0.5}, "norm": {}, "bias": {}}
    chosen = {"betas": (0.8, 0.9), "epsilon": 1e-6, "weight_decay": 0.2, "groups": groups, "options": options}
    config = settings(optimizer={"type": "schedule_free_adamw", **chosen})
    ours, theirs = model(torch.float64), model(torch.float64)
    hidden = [p for p in theirs if p.logical.role.value == "hidden"]
    rest = [p for p in theirs if p.logical.role.value != "hidden"]
    reference = schedulefree.AdamWScheduleFreeReference(
        [{"params": hidden, "lr": PEAK / 2}, {"params": rest, "lr": PEAK}],
        betas=(0.8, 0.9),
        eps=1e-6,
        weight_decay=0.2,
        warmup_steps=WARMUP,
        r=options.get("power", 0.0),
        weight_lr_power=options.get("rate_power", 2.0),
    )
    reference.train()
    optimizer = build_optimizer(config, ours)
    for step in range(STEPS):
        gradients(ours, step)
        gradients(theirs, step)
        set_learning_rate(optimizer, PEAK * min(1.0, (step + 1) / WARMUP))
        optimizer.step()
        reference.step()
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    reference.eval()
    found = {
        p: optimizer.evaluation_weights(group, p, optimizer.state[p])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(found[a], b.detach(), rtol=1e-12, atol=1e-13)
        assert not torch.allclose(a, b, rtol=1e-3)


def test_before_the_first_step_the_weights_are_evaluated_as_they_are():
    ours = model()
    optimizer = build_optimizer(settings(optimizer={"type": "schedule_free_adamw"}), ours)
    set_learning_rate(optimizer, 0.0)
    gradients(ours, 0)
    before = [p.detach().clone() for p in ours]
    optimizer.step()  # the first step of a warmup from 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            x = optimizer.evaluation_weights(group, p, optimizer.state[p])
            assert torch.equal(x, p.detach())
    assert all(torch.equal(a, b) for a, b in zip(before, ours))
