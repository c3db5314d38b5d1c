"""Products of 8-bit floats: the numbers of the formats, worked out in float64, and models that train with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.config import resolve
from megatron.config.variants import overlay
from megatron.model.stack import build_model
from megatron.parallel.layers.eight_bits import E4M3, E5M2, linear_for, linear_of_8_bits, plain, rounded
from megatron.testing.layouts import _assembled, on_this_rank, one_process
from megatron.testing.ranks import on_ranks
from tests.float64 import DOUBLE
from tests.selection import covering

FORMATS = {E4M3: (3, -6, 7), E5M2: (2, -14, 14)}  # bits of mantissa, least normal exponent, where the largest goes


def by_hand(x: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """The format's rounding of x under a power of two that brings the largest to [2^top, 2^(top + 1)), in float64."""
    mantissa, least, top = FORMATS[dtype]
    values = x.double().numpy()
    scale = 2.0 ** (math.floor(math.log2(np.abs(values).max())) - top)
    exponents = np.floor(np.log2(np.maximum(np.abs(values) / scale, 1e-300)))
    spacing = scale * 2.0 ** (np.maximum(exponents, least) - mantissa)
    return np.round(values / spacing) * spacing  # halves to the even one


def drawn(*shape: int, seed: int = 0, size: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator) * torch.randn(*shape, generator=generator).exp() * size
    return values.to(dtype)


@pytest.mark.parametrize(
    ("size", "given", "dtype"), covering([1e-20, 1.0, 3e12], [torch.float32, torch.bfloat16], FORMATS)
)
def test_rounding(dtype: torch.dtype, given: torch.dtype, size: float):
    x = drawn(64, 48, size=size, dtype=given)
    found, scale = rounded(x, dtype)
    assert found.dtype == dtype and math.frexp(scale.item())[0] == 0.5  # a power of two
    np.testing.assert_array_equal(found.double().numpy() * scale.item(), by_hand(x, dtype))


def test_nothing_and_too_much():
    zeros, scale = rounded(torch.zeros(4, 16), E4M3)
    assert scale > 0 and not zeros.float().any()
    for bad in (math.inf, math.nan):
        x = torch.ones(16, 16)
        x[3, 5] = bad
        assert not linear_of_8_bits(x, torch.ones(16, 16), None)[3].isfinite().any()


def test_a_number_is_rounded_alike_beside_larger_ones():
    x = drawn(32, 32, dtype=torch.bfloat16).clamp(-2, 2)
    x = torch.where(x.abs() < 2**-6, 2**-6, x)
    alone, scale = rounded(x, E4M3)
    x[0, 0] = 100.0
    beside, other = rounded(x, E4M3)
    assert other > scale
    torch.testing.assert_close(beside[1:].float() * other, alone[1:].float() * scale, rtol=0, atol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_products_and_their_gradients(bias: bool):
    """Products of the rounded numbers, in float64."""
    x, weight = drawn(2, 24, 32, seed=1).requires_grad_(), drawn(48, 32, seed=2, size=0.1).requires_grad_()
    added = drawn(48, seed=3).requires_grad_() if bias else None
    grad = drawn(2, 24, 48, seed=4, size=1e-3)
    y = linear_of_8_bits(x, weight, added)
    y.backward(grad)
    rows, matrix = by_hand(x.detach().flatten(0, 1), E4M3), by_hand(weight.detach(), E4M3)
    of_y = by_hand(grad.flatten(0, 1), E5M2)
    wanted = rows @ matrix.T + (0 if added is None else added.detach().double().numpy())
    for found, exact in ((y, wanted), (x.grad, of_y @ matrix), (weight.grad, of_y.T @ rows)):
        exact = exact.reshape(found.shape)
        np.testing.assert_allclose(found.detach().numpy(), exact, rtol=1e-5, atol=1e-6 * np.abs(exact).max())
    if added is not None:
        torch.testing.assert_close(added.grad, grad.sum((0, 1)))


def test_which_matrices():
    assert linear_for("fp8", 32, 48, "cpu", torch.bfloat16) is linear_of_8_bits
    for products, inputs, outputs, dtype in (
        ("compute", 32, 48, torch.bfloat16),
        ("fp8", 24, 48, torch.bfloat16),
        ("fp8", 32, 40, torch.bfloat16),
        ("fp8", 32, 48, torch.float64),
    ):
        assert linear_for(products, inputs, outputs, "cpu", dtype) is plain
    x, weight = drawn(4, 24), drawn(48, 24)
    assert torch.equal(plain(x, weight, None), F.linear(x, weight))


@pytest.mark.parametrize(
    "capability, hip, word", [((8, 0), None, "sm_89"), ((9, 4), "6.4", "AMD"), ((8, 9), None, ""), ((9, 0), None, "")]
)
def test_a_gpu_that_cannot(monkeypatch, capability: tuple[int, int], hip: str | None, word: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.version, "hip", hip)
    if word:
        with pytest.raises(ValueError, match=word):
            linear_for("fp8", 32, 32, "cuda", torch.bfloat16)
    else:
        assert linear_for("fp8", 32, 32, "cuda", torch.bfloat16) is linear_of_8_bits


MODEL = {
    "layers": "(attention/mlp) x2",
    "hidden_size": 64,
    "vocab_size": 96,
    "attention": {"heads": 4, "kv_heads": 2},
    "mlp": {"hidden_size": 128, "gated": True, "activation": "silu"},
    "norm": {"type": "rmsnorm"},
}


def settings(products: str, compute: str = "fp32", **training) -> dict:
    return {
        "model": MODEL,
        "precision": {"compute": compute, "products": products},
        "training": {"steps": 1, "sequence_length": 32, "micro_batch_size": 2, "global_batch_size": 4, **training},
    }


def gradients(products: str, dtype: torch.dtype, **training) -> tuple[float, torch.Tensor]:
    """Loss and all gradients, one after another."""
    compute = "bf16" if dtype == torch.bfloat16 else "fp32"
    model = build_model(resolve(settings(products, compute, **training)), dtype=dtype)
    tokens = torch.randint(96, (2, 33), generator=torch.Generator().manual_seed(1))
    loss, _ = model(tokens[:, :-1], tokens[:, 1:], torch.full((2, 32), 1 / 64))
    loss.backward()
    return loss.item(), torch.cat([p.grad.double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_model(recompute: str):
    """A number of e4m3 is off by at most 2^-4, by 2^-4 / sqrt(12) to 2^-4 / sqrt(3) in the mean square. A gradient here
    stands behind at most 16 rounded factors: 4 times that."""
    exact, wanted = gradients("compute", DOUBLE)
    plain_loss, plain_gradient = gradients("compute", torch.bfloat16)
    loss, found = gradients("fp8", torch.bfloat16, activation_checkpointing={"mode": recompute})
    error, usual = ((each - wanted).norm() / wanted.norm() for each in (found, plain_gradient))
    assert usual < error < 4 * 2**-4 / math.sqrt(3), (error, usual)
    assert 0 < abs(loss / exact - 1) < 2**-8
    again, same = gradients("fp8", torch.bfloat16)
    assert again == loss and torch.equal(same, found)


def test_compiled_blocks_have_no_breaks(monkeypatch):
    torch._dynamo.reset()
    loss, wanted = gradients("fp8", torch.float32)
    compiled = torch.compile
    monkeypatch.setattr(
        "torch.compile", lambda forward, dynamic, options: compiled(forward, dynamic=dynamic, backend="aot_eager")
    )
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found_loss, found = gradients("fp8", torch.float32, compile="layer")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    assert not torch._dynamo.utils.counters["graph_break"]
    assert abs(found_loss / loss - 1) < 1e-6 and (found - wanted).norm() < 1e-4 * wanted.norm()
    torch._dynamo.reset()


RANKS = {
    "data": {"zero": {"stage": 1}},
    "zero 3": {"zero": {"stage": 3}},
    "pipeline": {"parallel": {"pipeline": 2}, "zero": {"stage": 1}},
    "context": {"parallel": {"context": 2}},
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "zero 3" else pytest.mark.slow) for each in RANKS]
)
def test_on_ranks(name: str):
    """Sums in another order (1e-6) bring one number in 10^5 over the middle between two 8-bit ones, which are 2^-3
    apart: 4e-4 in the mean square. Where activations are summed so, the next layer's numbers and their rounding change
    in turn. So differences grow over layers, at most to the size of the roundings themselves.
    """
    recipe = {
        "optimizer": {"type": "sgd", "lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0, "gradient_clipping": 1e9},
        "data": {"synthetic": "copy"},
    }
    values = overlay(settings("fp8"), recipe)
    loss, wanted = one_process(values, torch.float32)
    _, unrounded = one_process(overlay(values, {"precision": {"products": "compute"}}), torch.float32)
    answers = on_ranks(2, on_this_rank, overlay(values, RANKS[name]), 2)
    found = _assembled([answer[1] for answer in answers])
    assert found.keys() == wanted.keys() and abs(answers[0][0] / loss - 1) < 1e-4
    for each, gradient in wanted.items():
        size = np.linalg.norm(gradient)
        rounding = np.linalg.norm(unrounded[each] - gradient)
        assert np.linalg.norm(found[each] - gradient) < (rounding if name == "context" else 2e-3 * size), each
        if each.startswith("layers") and gradient.size > 1000:
            assert rounding > 5e-3 * size, each
