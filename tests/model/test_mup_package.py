"""muP against the package of its authors: initial values, the multiplier of logits, rates and decay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.model.stack import build_model
from tests.model.parity import named
from tests.model.test_parametrization import BASE, DECAY, DENSE, RATE, config_of, settings

# Its requirements name torchvision, which it does not import.
mup = pytest.importorskip("mup", reason="needs pip install --no-deps mup==1.0.0")


class Theirs(nn.Module):
    """The shapes of a dense model's parameters for the package, which reads nothing else of a model."""

    def __init__(self, width: int):
        super().__init__()
        self.tokens = nn.Embedding(211, width)
        self.hidden = nn.Linear(width, 4 * width, bias=False)
        self.output = nn.Linear(4 * width, width, bias=False)
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = mup.MuReadout(width, 211, bias=False)

    @property
    def named(self) -> dict[str, nn.Parameter]:
        return {
            "embedding.tokens.weight": self.tokens.weight,
            "layers.0.mlp.up.weight": self.hidden.weight,
            "layers.0.mlp.down.weight": self.output.weight,
            "layers.0.ffn_norm.weight": self.norm.weight,
            "head.weight": self.head.weight,
        }


@pytest.fixture(scope="module")
def theirs() -> Theirs:
    torch.manual_seed(0)
    model = Theirs(256)
    mup.set_base_shapes(model, Theirs(BASE), delta=Theirs(2 * BASE))
    with torch.no_grad():
        for name in ("embedding.tokens.weight", "layers.0.mlp.up.weight", "layers.0.mlp.down.weight", "head.weight"):
            mup.init.normal_(model.named[name], std=0.05)
    return model


@pytest.mark.parametrize("optimizer, make", [("adamw", "MuAdamW"), ("sgd", "MuSGD")])
def test_rates_and_decay_are_those_of_the_package(theirs, optimizer, make):
    config = config_of(DENSE, optimizer=optimizer, type="mup")
    ours = settings(config, build_model(config))
    # The package says of a decoupled decay that it stays as it is, and of one times the rate that lr * decay stays.
    groups = getattr(mup, make)(theirs.named.values(), lr=RATE, weight_decay=DECAY).param_groups
    expected = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    for name, parameter in theirs.named.items():
        lr, decay = expected[id(parameter)]
        assert ours[name][0] == pytest.approx(lr, rel=1e-12), name
        assert ours[name][0] * ours[name][1] == pytest.approx(RATE * DECAY, rel=1e-12), name
        if optimizer == "adamw":
            assert ours[name][1] == pytest.approx(decay, rel=1e-12), name


def test_initial_values_and_logits_are_those_of_the_package(theirs):
    model = build_model(config_of(DENSE, type="mup"))
    ours = named(model)
    for name, parameter in theirs.named.items():
        # Two samples of n numbers of one distribution: their deviations differ by a share of about 1 / sqrt(n).
        room = 6 / parameter.numel() ** 0.5
        assert float(ours[name].detach().std()) == pytest.approx(
            float(parameter.detach().std()), rel=room, abs=1e-12
        ), name
    x = torch.randn(3, 256)
    with torch.no_grad():
        model.head.weight.copy_(theirs.head.weight)
        assert torch.allclose(model.head.logits_at(x), theirs.head(x), rtol=1e-5, atol=1e-7)
