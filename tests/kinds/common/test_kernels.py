"""Which implementation computes a layer, and that the adapters to packages of kernels give what torch gives."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from megatron.config import resolve
from megatron.config.kind import kinds_of
from megatron.kinds.common import convolution, convolution_kernels
from megatron.kinds.mamba import selective_scan
from megatron.kinds.mamba2 import ssd
from megatron.model import kernels
from megatron.model.stack import build_model
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import randomise, relative

MODELS = {
    "mamba": {"layers": "mamba x2", "mamba": {"state_size": 8, "chunk": 16}},
    "mamba2": {"layers": "mamba2 x2", "mamba2": {"head_dim": 16, "state_size": 16, "groups": 2, "most_step": 0.5}},
}
S, V, WIDTH = 64, 37, 64


def settings(name: str, wanted: str = "auto"):
    return resolve({
        "model": {
            "hidden_size": WIDTH,
            "vocab_size": V,
            "norm": {"type": "rmsnorm"},
            "kernels": wanted,
            **MODELS[name],
        },
        "training": {"steps": 1, "sequence_length": S},
    })


@pytest.mark.parametrize(
    "wanted, kind, device, there, choice, reason",
    [
        ("torch", "mamba2", "cuda", True, "torch", "model.kernels: torch"),
        ("auto", "mamba2", "cpu", True, "torch", "mamba_ssm needs a GPU"),
        ("auto", "mamba2", "cuda", True, "mamba_ssm", "model.kernels: auto"),
        ("auto", "mamba2", "cuda", False, "torch", "not installed: mamba_ssm"),
        ("mamba_ssm", "mamba", "cuda", True, "mamba_ssm", "model.kernels: mamba_ssm"),
        ("mamba_ssm", "mamba", "meta", False, "torch", "mamba_ssm needs a GPU"),
        ("mamba_ssm", "attention", "cuda", True, "torch", "no adapter of attention to mamba_ssm"),
        ("auto", "mlp", "cuda", True, "torch", "no adapter of mlp to any package"),
    ],
)
def test_the_choice_and_its_reason(monkeypatch, wanted, kind, device, there, choice, reason):
    monkeypatch.setattr(kernels, "installed", lambda package: there)
    assert kernels.choose_kernels(wanted, kind, kinds_of()[kind].packages, device) == (choice, reason)


def test_a_named_package_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(kernels, "installed", lambda package: False)
    with pytest.raises(ModuleNotFoundError, match="pip install mamba-ssm"):
        kernels.choose_kernels("mamba_ssm", "mamba2", kinds_of()["mamba2"].packages, "cuda")


def test_a_run_says_what_it_uses():
    assert kernels.describe_kernels(settings("mamba2"), "cpu") == ["kernels of mamba2: torch (mamba_ssm needs a GPU)"]
    dense = resolve({
        "model": {"layers": "attention/mlp", "hidden_size": 8, "vocab_size": 9, "attention": {"heads": 2}},
        "training": {"steps": 1, "sequence_length": 4},
    })
    assert kernels.describe_kernels(dense, "cuda") == []


# The interfaces of the packages, written from their documentation, one token at a time.


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    """x [batch, channels, length], channels last in memory where there is seq_idx; weight [channels, taps]."""
    assert activation == "silu" and (seq_idx is None or (x.stride(1) == 1 and seq_idx.dtype == torch.int32))
    rows = []
    for t in range(x.shape[-1]):
        y = 0.0 if bias is None else bias
        for tap in range(min(weight.shape[-1], t + 1)):
            same = 1.0 if seq_idx is None else (seq_idx[:, t - tap] == seq_idx[:, t]).unsqueeze(-1)
            y = y + x[:, :, t - tap] * weight[:, -1 - tap] * same
        rows.append(F.silu(y))
    return torch.stack(rows, -1)


def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    """u, delta, z [batch, channels, length]; A [channels, state]; B, C [batch, state, length]."""
    assert delta_softplus and all(each.is_contiguous() for each in (u, delta, B, C, z))
    step, state, rows = F.softplus(delta + delta_bias.unsqueeze(-1)), 0.0, []
    for t in range(u.shape[-1]):
        written = (step[..., t] * u[..., t]).unsqueeze(-1) * B[:, None, :, t]
        state = (step[..., t].unsqueeze(-1) * A).exp() * state + written
        rows.append((state * C[:, None, :, t]).sum(-1) + D * u[..., t])
    return torch.stack(rows, -1) * F.silu(z)


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
):
    """x [batch, length, heads, channels]; dt [batch, length, heads]; B, C [batch, length, groups, state]."""
    assert dt_softplus and chunk_size >= 16 and chunk_size & (chunk_size - 1) == 0
    share = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(share, 2), C.repeat_interleave(share, 2)
    step, state, rows = F.softplus(dt + dt_bias).clamp(*dt_limit), 0.0, []
    for t in range(x.shape[1]):
        kept = (step[:, t] * A).exp()
        if seq_idx is not None and t > 0:
            kept = kept * (seq_idx[:, t] == seq_idx[:, t - 1]).unsqueeze(-1)
        written = (step[:, t].unsqueeze(-1) * x[:, t]).unsqueeze(-1) * B[:, t].unsqueeze(2)
        state = kept[..., None, None] * state + written
        rows.append((state * C[:, t].unsqueeze(2)).sum(-1) + D.unsqueeze(-1) * x[:, t])
    return torch.stack(rows, 1)


@pytest.fixture
def packages(monkeypatch):
    """Modules of the packages' names with these functions."""
    for name, function in {
        "causal_conv1d": causal_conv1d_fn,
        "mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined,
        "mamba_ssm.ops.selective_scan_interface": selective_scan_fn,
    }.items():
        for parent in [".".join(name.split(".")[: end + 1]) for end in range(name.count(".") + 1)]:
            if parent not in sys.modules or parent == name:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        setattr(sys.modules[name], function.__name__, function)
    for module in (kernels, convolution_kernels):
        monkeypatch.setattr(module, "installed", lambda package: True)


def loss_and_gradients(model, documents):
    model.zero_grad()
    tokens = torch.randint(V, (2, S + 1), generator=torch.Generator().manual_seed(1)).to(
        next(model.parameters()).device
    )
    numbers = None
    if documents:
        numbers = torch.tensor([[0] * 5 + [1] * (S - 5), [0] * 20 + [1] * 3 + [2] * (S - 23)], device=tokens.device)
    loss, ce = model(tokens[:, :-1], tokens[:, 1:], torch.ones(2, S, device=tokens.device), documents=numbers)
    loss.backward()
    return ce.detach(), {p.logical.name: p.grad.clone() for p in model.parameters()}


def compare(name: str, documents: bool, bound: float, device: str = "cpu", dtype=None) -> None:
    plain, fused = (build_model(each, device=device, dtype=dtype) for each in (settings(name, "torch"), settings(name)))
    for model in (plain, fused):
        randomise(model.cpu(), 3)
        model.to(device)
    assert not any(block.mixer.fused for block in plain.blocks)
    for block in fused.blocks:
        block.mixer.fused = True
    wanted, gradients = loss_and_gradients(plain, documents)
    found, own = loss_and_gradients(fused, documents)
    assert relative(found, wanted) < bound
    for key, gradient in gradients.items():
        assert relative(own[key], gradient) < 10 * bound, key


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_adapters_hand_over_what_the_packages_document(name: str, documents: bool, packages, monkeypatch):
    used = []
    scans = {"mamba": (selective_scan, "_scan"), "mamba2": (ssd, "_ssd")}
    module, inner = scans[name]
    torchs = getattr(module, inner)
    monkeypatch.setattr(module, inner, lambda *a, **k: (used.append("scan"), torchs(*a, **k))[1])
    form = "_convolve" if documents else "_products"  # which runs three times for a gradient on CPU
    own = getattr(convolution, form)
    monkeypatch.setattr(convolution, form, lambda *a: (used.append("convolution"), own(*a))[1])
    compare(name, documents, EXACT, dtype=DOUBLE)
    # two layers on torch, forward and (but for the gradient of mamba2's scan, which is written out) once more for the
    # gradient; mamba's scan stays there where documents end within a sample
    assert used.count("convolution") == {"mamba": 2, "mamba2": 4}[name] * (2 if documents else 3)
    scans = 4 * (S // 16) * (2 if documents else 1) if name == "mamba" else 2
    assert used.count("scan") == scans


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_equal_torch(name: str, documents: bool):
    pytest.importorskip("mamba_ssm")
    compare(name, documents, 1e-3, device="cuda")
