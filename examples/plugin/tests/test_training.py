"""The optimizer against its formula, and resumed on other ranks. The hook's records, and that it changes nothing."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from my_lab.qhadam import QHAdam
from my_lab.weights import Weights

from megatron.config.problems import UserError
from megatron.testing import train_on_ranks

VALUES = yaml.safe_load((Path(__file__).parents[1] / "retention.yml").read_text())
SHORT = {
    **VALUES,
    "training": {**VALUES["training"], "steps": 4},
    "optimizer": {"type": "qhadam", "lr": 1e-2, "options": {"nu1": 0.8, "nu2": 0.9}},
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


def formula(p, gradients, lr, decay, b1, b2, nu1, nu2, epsilon):
    """The paper's update, one number at a time."""
    m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        mean, square = (1 - nu1) * g + nu1 * m / (1 - b1**t), (1 - nu2) * g * g + nu2 * v / (1 - b2**t)
        p -= lr * (mean / (math.sqrt(square) + epsilon) + decay * p)
    return p


def trained(optimizer, parameter, gradients):
    optimizer.param_groups[0].update(lr=0.1, weight_decay=0.2)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("nu1, nu2", [(0.7, 1.0), (0.5, 0.25), (1.0, 1.0)])
def test_update(nu1, nu2):
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(5, dtype=torch.float64, generator=draw)
    gradients = torch.randn(7, 5, dtype=torch.float64, generator=draw)
    parameter = torch.nn.Parameter(start.clone())
    found = trained(QHAdam([parameter], (0.9, 0.95), 1e-8, nu1, nu2), parameter, gradients)
    recipe = {"lr": 0.1, "decay": 0.2, "b1": 0.9, "b2": 0.95, "nu1": nu1, "nu2": nu2, "epsilon": 1e-8}
    wanted = [formula(p, own, **recipe) for p, own in zip(start.tolist(), gradients.T.tolist())]
    torch.testing.assert_close(found.tolist(), wanted, rtol=1e-12, atol=1e-12)
    if nu1 == nu2 == 1.0:
        twin = torch.nn.Parameter(start.clone())
        adamw = trained(torch.optim.AdamW([twin], betas=(0.9, 0.95), eps=1e-8), twin, gradients)
        torch.testing.assert_close(found, adamw, rtol=1e-12, atol=1e-12)


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
    from megatron.checkpoint.format.fragment import FragmentSpec

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
        ({"nu": 0.9}, "must not have nu: use nu1, nu2"),
        ({"nu1": 1.5}, "nu1 must be from 0 to 1"),
        ({"nu2": "most"}, "nu2 must be a number"),
    ],
)
def test_options_of_the_optimizer(options, rule):
    section = SimpleNamespace(options=options, betas=(0.9, 0.95), epsilon=1e-8)
    config = SimpleNamespace(optimizer=section, training=SimpleNamespace(steps=4))
    with pytest.raises(UserError, match=rule):
        QHAdam.build(config, [{"params": [torch.nn.Parameter(torch.zeros(1))]}])


@pytest.mark.parametrize("options", [{"parameters": "*"}, {"parameters": []}, {"parameters": ["*"], "every": 0}])
def test_options_of_the_hook(options):
    with pytest.raises(UserError, match="must be"):
        Weights(**options)
