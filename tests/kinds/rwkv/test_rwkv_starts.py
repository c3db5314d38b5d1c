"""Initial values of RWKV layers: the formulas of the authors' code, written down a second time with torch."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.config import resolve
from megatron.model.stack import build_model
from tests.float64 import FP32
from tests.model.parity import named

H, L, N = 96, 4, 16


def weights_of(kind: str, init: str = "published", layers: int | None = None) -> dict[str, torch.Tensor]:
    options = {} if kind == "rwkv4" else {"head_dim": N}
    config = resolve({
        "model": {
            "layers": f"({kind}/{kind}_ffn) x{L}",
            "hidden_size": H,
            "vocab_size": 400,
            "embedding": {"norm": True},
            kind: {**options, "init": init},
            f"{kind}_ffn": {"init": init},
            "init": {"embedding": "tiny_uniform", "head": "half_orthogonal", "layers": layers},
        },
        "training": {"steps": 1, "sequence_length": 8},
    })
    return {name: p.detach() for name, p in named(build_model(config)).items()}


def orthogonal(matrix: torch.Tensor, gain: float) -> None:
    rows, columns = matrix.shape
    square = matrix @ matrix.T if rows <= columns else matrix.T @ matrix
    torch.testing.assert_close(square, gain**2 * torch.eye(min(rows, columns)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_rwkv7_starts_as_published(layer: int):
    found = weights_of("rwkv7")
    own = {name.split("rwkv7.")[1]: p for name, p in found.items() if name.startswith(f"layers.{layer}.rwkv7.")}
    ratio, rest, n = layer / (L - 1), 1 - layer / L, torch.arange(H, dtype=torch.float64)
    for row, power in enumerate((0.2, 0.9, 0.7, 0.7, 0.9, 0.2)):
        torch.testing.assert_close(own["mix"][row], (1 - (n / H).pow(power * rest)).float(), rtol=FP32, atol=1e-6)
    linear = n / (H - 1) - 0.5
    z = (n % N - (N - 1) / 2) / ((N - 1) / 2)
    zigzag = z * z.abs()
    expected = {
        "decay_base": -6 + 6 * (n / (H - 1)) ** (1 + ratio**0.3) + 0.5 + 2.5 * zigzag,
        "rate_base": -0.19 + 0.3 * zigzag + 0.4 * linear,
        "key_scale": 0.71 - 0.1 * linear,
        "rate_scale": torch.full((H,), 1.02),
        "bonus": torch.full((H,), -0.04),
        "norm.bias": torch.zeros(H),
        "norm.weight": torch.full((H,), ((1 + layer) / L) ** 0.7),
    }
    if layer > 0:
        expected["blend_base"] = 0.73 - 0.4 * linear
    assert ("blend_base" in own) == (layer > 0)
    for name, value in expected.items():
        torch.testing.assert_close(own[name], value.float(), msg=name, rtol=FP32, atol=1e-6)
    for name, gain in (("receptance", 1.0), ("key", 0.1), ("value", 1.0)):
        orthogonal(own[f"{name}.weight"], gain)
    for name in ("decay", "rate", "gate"):
        assert not own[f"{name}.down.weight"].any()
        orthogonal(own[f"{name}.up.weight"], 0.1)
    assert not own["output.weight"].any() and not found[f"layers.{layer}.rwkv7_ffn.value.weight"].any()
    orthogonal(found[f"layers.{layer}.rwkv7_ffn.key.weight"], 1.0)
    torch.testing.assert_close(
        found[f"layers.{layer}.rwkv7_ffn.mix"][0], (1 - (n / H).pow(rest**4)).float(), rtol=FP32, atol=1e-6
    )
    orthogonal(found["head.weight"], 0.5 * math.sqrt(400 / H))
    assert 0.9e-4 < found["embedding.tokens.weight"].abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["rwkv4", "rwkv5", "rwkv6"])
@pytest.mark.parametrize("layer", [0, 3])
def test_earlier_ones_start_as_published(kind: str, layer: int):
    found = weights_of(kind)
    own = {name.split(f"{kind}.")[1]: p for name, p in found.items() if name.startswith(f"layers.{layer}.{kind}.")}
    ratio, rest, n = layer / (L - 1), 1 - layer / L, torch.arange(H, dtype=torch.float64)
    low, span = (-5, 8) if kind == "rwkv4" else (-6, 5)
    torch.testing.assert_close(
        own["decay"], (low + span * (n / (H - 1)) ** (0.7 + 1.3 * ratio)).float(), rtol=FP32, atol=1e-6
    )
    zigzag = (n + 1) % 3 - 1
    bonus = math.log(0.3) + 0.5 * zigzag if kind == "rwkv4" else ratio * (1 - n / (H - 1)) + 0.1 * zigzag
    torch.testing.assert_close(own["bonus"], bonus.float(), rtol=FP32, atol=1e-6)
    x, half = (n / H).pow(rest), (n / H).pow(0.5 * rest)
    shares = {
        "rwkv4": [x, x + 0.3 * ratio, half],
        "rwkv5": [x, x + 0.3 * ratio, half, half],
        "rwkv6": [1 - x, 1 - x, 1 - x - 0.3 * ratio, 1 - half, 1 - half],
    }[kind]
    torch.testing.assert_close(own["mix"], torch.stack(shares).float(), rtol=FP32, atol=1e-6)
    zero = ["output", "key", "receptance"] if kind == "rwkv4" else ["output"]
    assert not any(own[f"{name}.weight"].any() for name in zero)
    for name, gain in {"rwkv4": {"value": 1.0}}.get(
        kind, {"receptance": 1.0, "value": 1.0, "key": 0.1, "gate": 0.1}
    ).items():
        orthogonal(own[f"{name}.weight"], gain)
    orthogonal(found[f"layers.{layer}.{kind}_ffn.key.weight"], 2.0 if kind == "rwkv4" else 1.0)
    assert not found[f"layers.{layer}.{kind}_ffn.value.weight"].any()
    assert not found[f"layers.{layer}.{kind}_ffn.receptance.weight"].any()


@pytest.mark.parametrize("kind", ["rwkv4", "rwkv6", "rwkv7"])
def test_depth_is_that_of_the_stack(kind: str):
    """A layer count that was given for the schemes of other matrices does not change the authors' formulas."""
    wanted = weights_of(kind)
    for layers in (1, 40):
        found = weights_of(kind, layers=layers)
        assert all(found[name].equal(value) for name, value in wanted.items())


def test_the_simplified_recipe_of_rwkv7():
    found = weights_of("rwkv7", "uniform")
    for name, limit in (("rwkv7.receptance", 0.5), ("rwkv7.value", 0.5), ("rwkv7.key", 0.05), ("rwkv7_ffn.key", 0.5)):
        values = found[f"layers.1.{name}.weight"]
        assert 0.99 < values.abs().max() * math.sqrt(H) / limit <= 1.0
        assert abs(values.std() * math.sqrt(3 * H) / limit - 1) < 0.02
