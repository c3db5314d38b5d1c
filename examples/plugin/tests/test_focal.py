"""The objective against its formulas, on layouts, and in a run."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from my_lab.focal import Focal

from megatron.config.problems import UserError
from megatron.testing import check_layouts, train_on_ranks

VALUES = yaml.safe_load((Path(__file__).parents[1] / "retention.yml").read_text())
FOCAL = {**VALUES, "objective": {"type": "focal", "options": {"gamma": 2, "context": 2}}}


def test_layouts():
    """Gradients of the logits that are never kept against autograd through all of them."""
    check_layouts(
        {**FOCAL, "training": {**VALUES["training"], "z_loss": 0.01, "loss_chunk": 5}},
        [{"parallel": {each: 2}} for each in ("tensor", "pipeline", "context")] + [{"zero": {"stage": 2}}],
    )


@pytest.mark.parametrize("gamma", [0, 1, 2.5])
def test_cost(gamma):
    p = torch.tensor([0.99, 0.5, 0.01], dtype=torch.float64)
    wanted = [-((1 - each) ** gamma) * math.log(each) for each in p.tolist()]
    assert Focal(gamma, 0).cost(-p.log(), torch.zeros(3)).tolist() == pytest.approx(wanted, rel=1e-12)


def test_weights_follow_documents():
    """Label i is token i + 1: of documents of 4 and 3 tokens, those with two tokens before them in theirs."""
    begins = np.array([1, 0, 0, 0, 1, 0, 0], bool)
    assert Focal(1, 2).weights(np.arange(7), begins).tolist() == [0, 1, 1, 0, 0, 1]
    assert Focal(1, 2).weights(np.arange(7), None).tolist() == [0, 1, 1, 1, 1, 1]


def test_in_a_run(tmp_path):
    """Two steps on one rank and two on two are four on one. With neither option it is the cross-entropy to the bit."""
    short = {
        **FOCAL,
        "training": {**VALUES["training"], "steps": 4},
        "checkpoint": {"every": 2},
        "logging": {"console": "quiet", "curve": False},
    }

    def losses(name, ranks, *overrides, **sections):
        records = train_on_ranks(ranks, {**short, "run": {"dir": str(tmp_path / name)}, **sections}, overrides)
        return [(each["step"], each["loss"], each["grad_norm"]) for each in records if "loss" in each]

    straight = losses("straight", 1)
    losses("parts", 1, "training.stop_at_step=2")
    parts = losses("parts", 2, "parallel.tensor=2")
    assert [each[0] for each in parts] == [each[0] for each in straight]
    for one, two in zip(straight, parts, strict=True):
        assert two[1:] == pytest.approx(one[1:], rel=1e-5)
    plain = losses("plain", 1, objective={})
    neither = losses("neither", 1, objective={"type": "my_lab.focal:Focal", "options": {"gamma": 0}})
    assert neither == plain and plain[0][1:] != straight[0][1:]


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"alpha": 1}, "must not have alpha: use gamma, context"),
        ({"gamma": 0.5}, "gamma must be 0 or a number of at least 1"),
        ({"context": -1}, "context must be a whole number"),
    ],
)
def test_options(options, rule):
    with pytest.raises(UserError, match=rule):
        Focal.build(SimpleNamespace(objective=SimpleNamespace(options=options)))
