"""Which implementation computes a layer, and that the adapters to packages of kernels give what torch gives."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from megatron.config import resolve
from megatron.config.kind import kinds_of
from megatron.kinds.common.recurrence import convolution
from megatron.kinds.mamba import selective_scan, ssd
from megatron.kinds.rwkv import wkv7, wkv7_kernels
from megatron.model.kernels import choice as kernels
from megatron.model.stack import build_model
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import randomise, relative

MODELS = {
    "mamba": {"layers": "mamba x2", "mamba": {"state_size": 8, "chunk": 16}},
    "mamba2": {"layers": "mamba2 x2", "mamba2": {"head_dim": 16, "state_size": 16, "groups": 2, "most_step": 0.5}},
    "rwkv7": {"layers": "(rwkv7/rwkv7_ffn) x2", "rwkv7": {"head_dim": 16}},
}
PAIRS = [("mamba", "mamba_ssm"), ("mamba2", "mamba_ssm"), ("mamba2", "fla"), ("rwkv7", "fla")]
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
        ("auto", "mamba2", "cpu", True, "torch", "mamba_ssm and fla need a GPU"),
        ("auto", "mamba2", "cuda", True, "mamba_ssm", "model.kernels: auto"),
        ("fla", "mamba2", "cuda", True, "fla", "model.kernels: fla"),
        ("auto", "rwkv7", "cuda", True, "fla", "model.kernels: auto"),
        ("fla", "rwkv7", "cuda", True, "fla", "model.kernels: fla"),
        ("auto", "mamba2", "cuda", False, "torch", "not installed: mamba_ssm, fla"),
        ("mamba_ssm", "mamba", "cuda", True, "mamba_ssm", "model.kernels: mamba_ssm"),
        ("mamba_ssm", "mamba", "meta", False, "torch", "mamba_ssm needs a GPU"),
        ("mamba_ssm", "attention", "cuda", True, "torch", "no adapter of this kind to mamba_ssm"),
        ("auto", "mlp", "cuda", True, "torch", "no adapter of this kind to any package"),
    ],
)
def test_the_choice_and_its_reason(monkeypatch, wanted, kind, device, there, choice, reason):
    monkeypatch.setattr(kernels, "installed", lambda package: there)
    assert kernels.choose_kernels(wanted, kinds_of()[kind], device) == (choice, reason)


SKIPPED = "auto skips fla: on Hopper it rejects gradients with Triton 3.4 to 3.7.0"


@pytest.mark.parametrize(
    "wanted, triton, capability, choice, reason",
    [
        ("auto", "3.6.0", (9, 0), "torch", SKIPPED),
        ("auto", "3.7.0+git1", (9, 0), "torch", SKIPPED),
        ("auto", "3.7.1", (9, 0), "fla", "model.kernels: auto"),
        ("auto", "3.6.0", (10, 0), "fla", "model.kernels: auto"),
        ("fla", "3.6.0", (9, 0), "fla", "model.kernels: fla"),
    ],
)
def test_auto_takes_no_kernels_that_fail_in_the_first_backward_pass(
    monkeypatch, wanted, triton, capability, choice, reason
):
    monkeypatch.setattr(kernels, "installed", lambda package: package == "fla")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels.metadata, "version", lambda package: triton)
    assert kernels.choose_kernels(wanted, kinds_of()["mamba2"], "cuda") == (choice, reason)


@pytest.mark.parametrize("width", [wkv7_kernels.NARROWEST_HEAD - 1, wkv7_kernels.WIDEST_HEAD + 1])
def test_heads_that_do_not_fit_the_kernels_are_computed_by_torch(width: int):
    torch.manual_seed(0)
    inputs = [torch.randn(1, 3, 1, width) for _ in range(6)]
    inputs[1] = -torch.sigmoid(inputs[1]) / 2
    assert torch.equal(wkv7_kernels.wkv7_of_fla(*inputs, chunk=2)[0], wkv7.wkv7(*inputs, chunk=2)[0])


def test_a_named_package_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(kernels, "installed", lambda package: False)
    with pytest.raises(ModuleNotFoundError, match="pip install mamba-ssm"):
        kernels.choose_kernels("mamba_ssm", kinds_of()["mamba2"], "cuda")


def test_a_run_says_what_it_uses():
    assert kernels.describe_kernels(settings("mamba2"), "cpu") == [
        "kernels of mamba2: torch (mamba_ssm and fla need a GPU)"
    ]
    dense = resolve({
        "model": {"layers": "attention/mlp", "hidden_size": 8, "vocab_size": 9, "attention": {"heads": 2}},
        "training": {"steps": 1, "sequence_length": 4},
    })
    assert kernels.describe_kernels(dense, "cuda") == []


# The interfaces of the packages, written from their documentation, one token at a time.


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    """x [batch, channels, length], channels last in memory where there is seq_idx. Weight [channels, taps]."""
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
    """u, delta, z [batch, channels, length]. A [channels, state]. B, C [batch, state, length]."""
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
    """x [batch, length, heads, channels]. Dt [batch, length, heads]. B, C [batch, length, groups, state]."""
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


def bounds_of(x, cu_seqlens):
    """Whether a token, [batch, length], is the first of a sequence."""
    first = torch.zeros(x.shape[:2], dtype=torch.bool)
    if cu_seqlens is not None:
        assert x.shape[0] == 1 and cu_seqlens[0] == 0 and cu_seqlens[-1] == x.shape[1]
        first[0, cu_seqlens[:-1]] = True
    first[:, 0] = True
    return first


def causal_conv1d(x, weight, bias=None, *, activation=None, cu_seqlens=None):
    """fla's: x [batch, length, channels], weight [channels, taps]. The sequences of a single sample from bounds."""
    numbers = bounds_of(x, cu_seqlens).cumsum(1).to(torch.int32)
    y = causal_conv1d_fn(x.transpose(1, 2), weight, bias, seq_idx=numbers, activation=activation)
    return y.transpose(1, 2), None


def chunk_simple_gla(q, k, v, g, *, scale, cu_seqlens=None):
    """q, k [batch, length, heads, K], v [.., V], g [batch, length, heads]: the logarithm of each step's decay."""
    assert all(each.is_contiguous() for each in (q, k, v, g))
    first, state, rows = bounds_of(q, cu_seqlens), 0.0, []
    for t in range(q.shape[1]):
        kept = g[:, t].exp().masked_fill(first[:, t, None], 0.0)[..., None, None]
        state = kept * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        rows.append(scale * (q[:, t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(rows, 1), None


def chunk_rwkv7(r, w, k, v, a, b, *, scale, cu_seqlens=None, safe_gate):
    """All [batch, length, heads, K]. W: the logarithm of each channel's decay, in [-5, 0) for safe gates."""
    assert safe_gate and bool(((w >= -5) & (w < 0)).all()) and all(each.is_contiguous() for each in (r, w, k, v, a, b))
    first, state, rows = bounds_of(r, cu_seqlens), torch.zeros((*r[:, 0].shape, v.shape[-1]), dtype=r.dtype), []
    for t in range(r.shape[1]):
        state = state.masked_fill(first[:, t, None, None, None], 0.0)
        removed = (a[:, t].unsqueeze(-1) * state).sum(-2, keepdim=True) * b[:, t].unsqueeze(-1)
        state = w[:, t].exp().unsqueeze(-1) * state + removed + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        rows.append(scale * (r[:, t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(rows, 1), None


@pytest.fixture
def packages(monkeypatch):
    """Modules of the packages' names with these functions."""
    for name, function in {
        "fla.modules.causal_conv1d": causal_conv1d,
        "fla.ops.simple_gla": chunk_simple_gla,
        "fla.ops.rwkv7": chunk_rwkv7,
        "causal_conv1d": causal_conv1d_fn,
        "mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined,
        "mamba_ssm.ops.selective_scan_interface": selective_scan_fn,
    }.items():
        for parent in [".".join(name.split(".")[: end + 1]) for end in range(name.count(".") + 1)]:
            if parent not in sys.modules or parent == name:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        setattr(sys.modules[name], function.__name__, function)
    for module in (kernels, convolution):
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


def compare(name: str, package: str, documents: bool, bound: float, device: str = "cpu", dtype=None) -> None:
    plain, fused = (
        build_model(each, device=device, dtype=dtype) for each in (settings(name, "torch"), settings(name, package))
    )
    for model in (plain, fused):
        randomise(model.cpu(), 3)
        model.to(device)
    for block in fused.blocks:  # on a CPU none is chosen
        if hasattr(block.mixer, "kernels"):
            block.mixer.kernels = package
        else:
            block.mixer.fused = True
    wanted, gradients = loss_and_gradients(plain, documents)
    found, own = loss_and_gradients(fused, documents)
    assert relative(found, wanted) < bound
    for key, gradient in gradients.items():
        assert relative(own[key], gradient) < 10 * bound, key


def counted(monkeypatch, module, name: str, used: list[str]) -> None:
    own = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **k: (used.append(name), own(*a, **k))[1])


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name, package", PAIRS)
def test_adapters_hand_over_what_the_packages_document(name, package, documents: bool, packages, monkeypatch):
    used: list[str] = []
    module, inner = {"mamba": (selective_scan, "_scan"), "mamba2": (ssd, "_ssd"), "rwkv7": (wkv7, "_wkv7")}[name]
    counted(monkeypatch, module, inner, used)
    form = "_convolve" if documents else "_products"  # which runs three times for a gradient on CPU
    counted(monkeypatch, convolution, form, used)
    compare(name, package, documents, EXACT, dtype=DOUBLE)
    # two layers on torch, forward and (but for the gradient of mamba2's scan, which is written out) once more for the
    # gradient. Mamba's scan stays there where documents end within a sample
    assert used.count(form) == {"mamba": 2, "mamba2": 4, "rwkv7": 0}[name] * (2 if documents else 3)
    scans = {"mamba": 4 * (S // 16) * (2 if documents else 1), "mamba2": 2, "rwkv7": 4}
    assert used.count(inner) == scans[name]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_kernels_equal_torch(name: str, documents: bool):
    pytest.importorskip("mamba_ssm")
    compare(name, "mamba_ssm", documents, 1e-3, device="cuda")
