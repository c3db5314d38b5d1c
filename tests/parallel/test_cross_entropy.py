"""The fused head and loss: the same whatever the chunk, nothing kept but gradients."""

from __future__ import annotations

import warnings
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F

from megatron.parallel.layers import cross_entropy
from megatron.parallel.layers.cross_entropy import LossOptions, linear_cross_entropy
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import relative

N, H, V = 13, 8, 29


def inputs(dtype=DOUBLE):
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((N, H), (V, H), (V,)))
    labels = torch.randint(V, (N,), generator=generator)
    weights = torch.rand(N, generator=generator)
    weights[3] = 0.0
    return *(each.requires_grad_() for each in (x, weight, bias)), labels, weights


@pytest.mark.parametrize("chunk", [0, 1, 2, 5, 12, 13, 14, 1024])
def test_equals_cross_entropy_for_all_chunks(chunk: int):
    x, weight, bias, labels, weights = inputs()
    wanted_ce = F.cross_entropy(F.linear(x, weight, bias), labels, reduction="none")
    wanted = torch.autograd.grad((wanted_ce * weights).sum(), (x, weight, bias))
    loss, ce = linear_cross_entropy(x, weight, bias, labels, weights, options=LossOptions(chunk=chunk))
    assert relative(ce, wanted_ce) < EXACT and relative(loss, (wanted_ce * weights).sum()) < EXACT
    for found, expected in zip(torch.autograd.grad(3.0 * loss, (x, weight, bias)), wanted):
        assert relative(found, 3.0 * expected) < EXACT


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize(
    "options",
    [{"multiplier": 0.3}, {"softcap": 2.0}, {"z_loss": 0.2}, {"multiplier": 1.7, "softcap": 1.5, "z_loss": 0.1}],
)
def test_multiplier_softcap_and_z_loss(chunk: int, options: dict):
    x, weight, bias, labels, weights = inputs()
    double = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    logits = options.get("multiplier", 1.0) * double[0] @ double[1].T + double[2]
    if "softcap" in options:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    log_z = logits.exp().sum(1).log()
    each = log_z - logits[torch.arange(N), labels] + options.get("z_loss", 0.0) * log_z**2
    wanted = torch.autograd.grad((each * weights).sum(), double)
    loss, _ = linear_cross_entropy(x, weight, bias, labels, weights, options=LossOptions(chunk=chunk, **options))
    assert relative(loss, (each * weights).sum()) < EXACT
    for found, expected in zip(torch.autograd.grad(loss, (x, weight, bias)), wanted):
        assert relative(found, expected) < EXACT


# Each length of a chunk is compiled: the last chunk is a shorter one where there are several.
@pytest.mark.parametrize(
    ("chunk", "options"), [(N, {}), (4, {"multiplier": 0.5, "softcap": 3.0, "z_loss": 0.1})], ids=["one", "several"]
)
def test_compiled_passes_compute_the_same(chunk: int, options: dict):
    results = []
    for compiled in (False, True):
        x, weight, _, labels, weights = inputs()
        loss, ce = linear_cross_entropy(
            x, weight, None, labels, weights, options=LossOptions(chunk=chunk, compiled=compiled, **options)
        )
        loss.backward()
        results.append((loss.detach(), ce, x.grad, weight.grad))
    for plain, found in zip(*results):
        torch.testing.assert_close(found, plain, rtol=EXACT, atol=EXACT)


def test_a_compiler_that_fails_is_reported_once_and_done_without(monkeypatch):
    """The first pass that cannot be compiled ends the attempt for all three."""
    compiled, tried = torch.compile, []

    def broken(graph, inputs):
        tried.append(graph)
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr("torch.compile", lambda each, **options: compiled(each, backend=broken, **options))
    monkeypatch.setattr(cross_entropy, "_passes", lru_cache(cross_entropy._passes.__wrapped__))
    torch._dynamo.reset()
    results = []
    for fused in (False, True):
        x, weight, _, labels, weights = inputs()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            options = LossOptions(chunk=4, compiled=fused, softcap=3.0)
            loss, ce = linear_cross_entropy(x, weight, None, labels, weights, options=options)
        loss.backward()
        results.append((loss.detach(), ce, x.grad, weight.grad))
    torch._dynamo.reset()
    reported = [str(each.message) for each in told if "torch.compile failed" in str(each.message)]
    begin = "torch.compile failed, so the loss runs as single operations: BackendCompilerFailed: "
    assert len(reported) == 1 and reported[0].startswith(begin) and "RuntimeError: no compiler here" in reported[0]
    assert len(tried) == 1
    for plain, found in zip(*results):
        torch.testing.assert_close(found, plain, rtol=EXACT, atol=EXACT)


def focal(ce_N, lse_N):
    """Depends on both, and not linearly."""
    return (1 - (-ce_N).exp()) ** 2 * ce_N + 0.3 * lse_N.sin()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_cost_of_an_objective(compiled: bool):
    """Against autograd through all logits, with all that else changes them."""
    x, weight, _, labels, weights = inputs()
    logits = 1.5 * torch.tanh(0.7 * x @ weight.T / 1.5)
    ce, log_z = F.cross_entropy(logits, labels, reduction="none"), logits.logsumexp(1)
    wanted = ((focal(ce, log_z) + 0.1 * log_z**2) * weights).sum()
    chunk = N if compiled else 4  # each length of a chunk is compiled
    options = LossOptions(multiplier=0.7, softcap=1.5, z_loss=0.1, chunk=chunk, compiled=compiled, cost=focal)
    loss, found = linear_cross_entropy(x, weight, None, labels, weights, options=options)
    assert relative(loss, wanted) < EXACT and relative(found, ce) < EXACT
    for own, other in zip(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(wanted, (x, weight))):
        assert relative(own, other) < EXACT


def test_each_label_has_a_cost():
    x, weight, bias, labels, weights = inputs()
    with pytest.raises(ValueError, match="must have one value per label, 13"):
        linear_cross_entropy(x, weight, bias, labels, weights, options=LossOptions(cost=lambda ce, lse: ce.mean()))


def test_large_logits_do_not_overflow():
    x, weight, _, labels, weights = inputs()
    loss, _ = linear_cross_entropy(x * 1e3, weight, None, labels, weights)
    wanted = (F.cross_entropy((x * 1e3) @ weight.T, labels, reduction="none") * weights).sum()
    assert relative(loss, wanted) < EXACT


def test_in_bf16_the_loss_is_fp32():
    x, weight, bias, labels, weights = inputs(torch.bfloat16)
    loss, ce = linear_cross_entropy(x, weight, bias, labels, weights, options=LossOptions(chunk=4))
    assert loss.dtype == ce.dtype == torch.float32
    exact = F.cross_entropy(F.linear(x.double(), weight.double(), bias.double()), labels, reduction="none")
    assert relative(ce, exact) < 1e-2
    wanted = torch.autograd.grad((exact * weights).sum(), (x, weight, bias))
    for found, expected in zip(torch.autograd.grad(loss, (x, weight, bias)), wanted):
        assert found.dtype == torch.bfloat16 and relative(found.double(), expected.double()) < 2e-2


@pytest.mark.parametrize("options", [{}, {"multiplier": 0.5, "softcap": 3.0, "z_loss": 0.1}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [0, 5, 1024])
def test_rows_at_a_time_change_no_bit(monkeypatch, options: dict, dtype: torch.dtype, chunk: int):
    """Each row is a sum of its own, and the products see all rows of a chunk. A bias sums over rows, so it has none."""
    found = []
    for rows in (N, 3, 1):
        monkeypatch.setattr(cross_entropy, "ROW_BYTES", 4 * V * rows)
        x, weight, _, labels, weights = inputs(dtype)
        loss, ce = linear_cross_entropy(x, weight, None, labels, weights, options=LossOptions(chunk=chunk, **options))
        found.append((loss.detach(), ce, *torch.autograd.grad(loss, (x, weight))))
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("columns", [1, 7, V])
def test_some_columns_of_logits_at_a_time_in_bf16(monkeypatch, columns: int):
    monkeypatch.setattr(cross_entropy, "COLUMNS", columns)
    test_in_bf16_the_loss_is_fp32()


@pytest.mark.parametrize("chunk", [5, 1024])
def test_rows_at_a_time_with_a_bias(monkeypatch, chunk: int):
    monkeypatch.setattr(cross_entropy, "ROW_BYTES", 4 * V * 2)
    test_equals_cross_entropy_for_all_chunks(chunk)


def test_no_logits_are_kept():
    x, weight, _, labels, weights = inputs()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        linear_cross_entropy(x, weight, None, labels, weights, options=LossOptions(chunk=4))
    assert sorted(kept) == sorted([(N, H), (V, H)])


def test_evaluation_computes_no_gradients():
    x, weight, _, labels, weights = inputs()
    with torch.no_grad():
        loss, ce = linear_cross_entropy(x, weight, None, labels, weights)
    assert not loss.requires_grad
    assert relative(loss, (ce * weights).sum()) < EXACT


def test_fp16_gradients_do_not_vanish_before_the_loss_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, vocab, scale = 512, 16, 300, 65536.0
    x = torch.randn(tokens, hidden, generator=generator).half().requires_grad_()
    weight = (0.3 * torch.randn(vocab, hidden, generator=generator)).half().requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    weights = torch.rand(tokens, generator=generator) / 1e6
    loss, _ = linear_cross_entropy(x, weight, None, labels, weights, options=LossOptions(chunk=100))
    (loss * scale).backward()

    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    ce = torch.nn.functional.cross_entropy(x64 @ weight64.T, labels, reduction="none")
    ((ce * weights).sum() * scale).backward()
    for ours, exact in ((x.grad, x64.grad), (weight.grad, weight64.grad)):
        assert float((ours.double() - exact).norm() / exact.norm()) < 3e-3  # three digits are what fp16 has


def test_the_memory_that_is_kept_is_nobodys_result():
    """The next call writes into it: what an earlier one gave must not change, nor what it was given matter."""
    x, weight, bias, labels, weights = inputs()
    options = LossOptions(chunk=8)
    loss, ce = linear_cross_entropy(x, weight, bias, labels, weights, options=options)
    gradients = torch.autograd.grad(loss, (x, weight, bias))
    before = [each.clone() for each in (loss, ce, *gradients)]
    with torch.no_grad():
        linear_cross_entropy(x[:3] * 50.0, weight.roll(1, 0), bias, labels[:3], weights[:3], options=options)
    assert all(torch.equal(each, copy) for each, copy in zip((loss, ce, *gradients), before, strict=True))
    again, _ = linear_cross_entropy(x, weight, bias, labels, weights, options=options)
    assert torch.equal(again, before[0])
    assert all(torch.equal(each, copy) for each, copy in zip(torch.autograd.grad(again, (x, weight, bias)), before[2:]))
