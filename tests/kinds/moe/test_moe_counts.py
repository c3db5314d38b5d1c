"""Counts of a mixture of experts: parameters, FLOPs of what a token uses, activations, against models that run."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import resolve
from megatron.model.costs.describe import layers, totals
from megatron.model.stack import build_model
from tests.model.costs.test_describe import B, S, inputs, kept_bytes
from tests.selection import covering

CASES = {
    "gated": {"experts": 8, "top_k": 2, "hidden_size": 24},
    "plain": {"experts": 8, "top_k": 1, "hidden_size": 24, "activation": "gelu", "gated": False},
    "shared": {
        "experts": 8,
        "top_k": 4,
        "hidden_size": 24,
        "shared_size": 32,
        "shared_gate": True,
        "router": {"score": "sigmoid", "normalize": True, "bias": True},
    },
    "biases, limits": {
        "experts": 4,
        "top_k": 2,
        "hidden_size": 24,
        "activation": "quick_gelu",
        "bias": True,
        "limit": 0.5,
        "up_offset": 1.0,
        "router": {"bias": True, "normalize": True},
    },
    "own norms": {
        **{"experts": 8, "top_k": 3, "hidden_size": 24, "shared_size": 32, "own_norms": True},
        "router": {"normalize": True, "expert_scale": True},
    },
    "latent": {"experts": 8, "top_k": 3, "hidden_size": 24, "latent_size": 16, "shared_size": 32},
    "router with a state": {
        "experts": 4,
        "top_k": 1,
        "hidden_size": 24,
        "router": {"network": "mlp", "width": 16, "average": False},
    },
}


def config_of(name: str, pattern: str, **training):
    model = {"layers": pattern, "hidden_size": 48, "vocab_size": 37, "attention": {"heads": 4}, "moe": CASES[name]}
    model |= {"norm": {"type": "rmsnorm"}} if "own_norms" in CASES[name] else {}
    return resolve({"model": model, "training": {"steps": 1, "sequence_length": S, "micro_batch_size": B, **training}})


def grouped(a: torch.Size, b: torch.Size, *_args, out_shape=None, **_kwargs) -> int:
    """A product of rows with one matrix each, [R, K] x [E, K, N], or its gradient, [M, R] x [R, N] in parts of R."""
    return 2 * a[0] * a[1] * b[-1]


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_flops(name: str):
    """Exactly what runs: only the chosen experts."""
    config = config_of(name, "attention moe")
    model, total = build_model(config), totals(config)
    assert total.parameters == sum(p.numel() for p in model.parameters())
    idle = sum(p.numel() for p in model.parameters() if ".experts." in p.logical.name) // CASES[name]["experts"]
    assert total.active_parameters == total.parameters - idle * (CASES[name]["experts"] - CASES[name]["top_k"])
    tokens, labels, weights = inputs()
    count = {"display": False, "custom_mapping": {torch.ops.aten._grouped_mm: grouped}}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(**count) as forward:
        model.eval().logits(tokens)
    assert forward.get_total_flops() == total.forward_flops * B * S
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(**count) as both:
        model.train()(tokens, labels, weights)[0].backward()
    assert both.get_total_flops() == total.training_flops * B * S


@pytest.mark.parametrize(("mode", "name"), covering(["none", "selective", "full"], CASES))
def test_kept_activations(name: str, mode: str):
    training = {"activation_checkpointing": {"mode": mode}}
    two, one = config_of(name, "moe attention moe", **training), config_of(name, "attention moe", **training)
    found = (kept_bytes(two) - kept_bytes(one)) / (B * S * 4)
    kept = layers(two)[1].saved
    if mode != "none":
        kept += 2 * CASES[name]["top_k"]  # the choice, which is not made again
    if mode == "none" and name == "own norms":
        kept += 2 * 48  # normalised outputs, which a fused norm does not keep
    if mode == "full" and "state" in name:
        kept += 16  # the router's state, which leaves the block
    assert found == pytest.approx(kept, rel=0.002 if mode == "none" else 0.06)
