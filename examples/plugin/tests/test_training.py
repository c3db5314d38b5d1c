"""The optimizer against its formula, and resumed on other ranks; the hook's records, and that it changes nothing."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from my_lab.ademamix import AdEMAMix
from my_lab.weights import Weights

from megatron.config.problems import UserError
from megatron.testing import train_on_ranks

VALUES = yaml.safe_load((Path(__file__).parents[1] / "retention.yml").read_text())
SHORT = {
    **VALUES,
    "training": {**VALUES["training"], "steps": 4},
    "optimizer": {"type": "ademamix", "lr": 1e-2, "options": {"slow_beta": 0.99, "alpha": 3.0, "warmup_steps": 3}},
    "checkpoint": {"every": 2},
    "logging": {"console": "quiet", "curve": False},
}
HOOK = {"type": "weights", "options": {"parameters": ["*norm*", "*embedding*"], "every": 2}}


def train(folder, ranks, *overrides, **sections):
    return train_on_ranks(ranks, {**SHORT, "run": {"dir": str(folder)}, **sections}, overrides)


def steps(records):
    return [(each["step"], each["batch_hash"], each["loss"], each["grad_norm"]) for each in records if "loss" in each]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """One run of four steps in one process, with the hook."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, train(folder, 1, hooks=[HOOK])


def formula(p, gradients, lr, decay, b1, b2, b3, alpha, epsilon, warmup):
    """The paper's update, one number at a time."""
    m = s = v = 0.0
    for t, g in enumerate(gradients, start=1):
        share = min(t / warmup, 1.0) if warmup else 1.0
        slow = math.exp(math.log(b1) * math.log(b3) / ((1 - share) * math.log(b3) + share * math.log(b1)))
        slow = min(slow, b3)
        m, s, v = b1 * m + (1 - b1) * g, slow * s + (1 - slow) * g, b2 * v + (1 - b2) * g * g
        quotient = (m / (1 - b1**t) + share * alpha * s) / (math.sqrt(v / (1 - b2**t)) + epsilon)
        p -= lr * (quotient + decay * p)
    return p


@pytest.mark.parametrize("warmup", [0, 3, 20])
def test_update(warmup):
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(5, dtype=torch.float64, generator=draw)
    gradients = torch.randn(7, 5, dtype=torch.float64, generator=draw)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = AdEMAMix([parameter], (0.9, 0.95), 1e-8, slow_beta=0.999, alpha=4.0, warmup=warmup)
    optimizer.param_groups[0].update(lr=0.1, weight_decay=0.2)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    recipe = {"lr": 0.1, "decay": 0.2, "b1": 0.9, "b2": 0.95, "b3": 0.999, "alpha": 4.0, "epsilon": 1e-8}
    wanted = [formula(p, own, warmup=warmup, **recipe) for p, own in zip(start.tolist(), gradients.T.tolist())]
    torch.testing.assert_close(parameter.tolist(), wanted, rtol=1e-12, atol=1e-12)


def test_resumed_on_two_ranks(straight, tmp_path):
    """Two steps on one rank and two on two with ZeRO 1 are four on one: all states are in the checkpoint."""
    train(tmp_path, 1, "training.stop_at_step=2")
    for one, two in zip(steps(straight[1]), steps(train(tmp_path, 2, "zero.stage=1")), strict=True):
        assert one[:2] == two[:2]
        assert one[2:] == pytest.approx(two[2:], rel=1e-5)


def test_hook_writes_whole_tensors_and_changes_nothing(straight, tmp_path):
    plain, two = train(tmp_path / "plain", 1), train(tmp_path / "two", 2, "parallel.tensor=2", hooks=[HOOK])
    assert steps(plain) == steps(straight[1]) and not any("weights" in each for each in plain)
    from megatron.checkpoint import open_checkpoint
    from megatron.checkpoint.fragment import FragmentSpec

    for last in (2, 4):
        checkpoint = open_checkpoint(straight[0] / "checkpoints" / f"step_{last:08d}")
        one, shared = (
            next(each["weights"] for each in records if "weights" in each and each["step"] == last)
            for records in (straight[1], two)
        )
        names = [name for name in checkpoint.tensors if "norm" in name or "embedding" in name]
        assert sorted(one) == sorted(shared) == sorted(names) and len(names) > 4
        for name in names:
            saved = checkpoint.read(FragmentSpec.whole(checkpoint.tensors[name], "master")).data
            assert one[name]["largest"] == saved.abs().max().item()
            assert one[name]["norm"] == pytest.approx(saved.double().norm().item(), rel=1e-12)
            assert shared[name] == pytest.approx(one[name], rel=1e-4)


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"slow_betta": 0.9}, "must not have slow_betta"),
        ({"slow_beta": 1.0}, "slow_beta must be above 0 and below 1"),
        ({"warmup_steps": 1.5}, "warmup_steps must be a whole number"),
    ],
)
def test_options_of_the_optimizer(options, rule):
    section = SimpleNamespace(options=options, betas=(0.9, 0.95), epsilon=1e-8)
    config = SimpleNamespace(optimizer=section, training=SimpleNamespace(steps=4))
    with pytest.raises(UserError, match=rule):
        AdEMAMix.build(config, [{"params": [torch.nn.Parameter(torch.zeros(1))]}])


@pytest.mark.parametrize("options", [{"parameters": "*"}, {"parameters": []}, {"parameters": ["*"], "every": 0}])
def test_options_of_the_hook(options):
    with pytest.raises(UserError, match="must be"):
        Weights(**options)
