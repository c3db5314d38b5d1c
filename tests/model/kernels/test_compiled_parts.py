"""Parts of layers compiled between collectives, hooks, chunks and draws: losses and gradients of one plain process."""

from __future__ import annotations

import pytest
import torch

from megatron.config import resolve
from megatron.config.variants import overlay
from megatron.model.stack import build_model
from megatron.testing.layouts import check_layouts, on_this_rank
from tests.selection import toured

COMPILED = torch.compile
MODELS = {
    "llama": {
        "layers": "(attention/mlp) x2",
        "attention": {"heads": 4, "kv_heads": 2, "qk_norm": "head"},
        "mlp": {"gated": True},
        "norm": {"type": "rmsnorm"},
    },
    "pythia": {"layers": "(attention/mlp) x2", "residual": {"form": "parallel"}, "attention": {"heads": 4}},
    "experts": {
        "layers": "(attention/moe) x2",
        "attention": {"heads": 4},
        "moe": {"experts": 4, "top_k": 2, "hidden_size": 16, "gated": True, "losses": {"balance": 0.0}},
    },
    "mamba2": {
        "layers": "mamba2/mlp attention/mlp",
        "attention": {"heads": 4},
        "mamba2": {"head_dim": 16, "groups": 2},
    },
    "mamba2, one group": {"layers": "mamba2/mlp attention/mlp", "attention": {"heads": 4}, "mamba2": {"head_dim": 16}},
    "gated delta": {
        "layers": "gated_delta/mlp x2",
        "gated_delta": {"heads": 2, "key_heads": 2, "key_dim": 8, "value_dim": 8},
    },
    "rwkv7": {"layers": "(rwkv7/rwkv7_ffn) x2", "rwkv7": {"head_dim": 16}, "norm": {"type": "layernorm", "bias": True}},
}
LAYOUTS = {
    "tensor": {"parallel": {"tensor": 2}},
    "sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "context": {"parallel": {"context": 2}},
    "zero 3": {"zero": {"stage": 3}, "ranks": 2},
}

CUTS = {
    "dropout": {"model": {"dropout": 0.1}},
    "chunks": {"training": {"sequence_chunks": 2}},
    "selective": {"training": {"activation_checkpointing": {"mode": "selective"}}},
}
ALWAYS = {
    "llama": ("tensor", "context", "zero 3", "dropout", "chunks", "selective"),
    "experts": ("tensor", "selective"),
    "mamba2, one group": ("tensor", "chunks"),
    "rwkv7": ("sequence", "zero 3"),
}


def cases(among: dict[str, dict]) -> list:
    """All models with all of these. Cases that are not in ALWAYS are slow."""
    return [
        pytest.param(name, each, marks=() if each in ALWAYS.get(name, ()) else pytest.mark.slow)
        for name in MODELS
        for each in among
    ]


def settings(model: dict, **training) -> dict:
    return {
        "model": {"hidden_size": 32, "vocab_size": 64, **model},
        "training": {"steps": 1, "sequence_length": 16, "global_batch_size": 4, **training},
    }


def trace() -> None:
    """Compile to torch's own operations from now on, in this process."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile = lambda forward, dynamic, options: COMPILED(forward, dynamic=dynamic, backend="aot_eager")


def traced() -> tuple[int, dict]:
    """How many graphs there are, and what broke them."""
    torch.compile = COMPILED
    counters = torch._dynamo.utils.counters
    found = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize(("name", "layout"), toured(cases(LAYOUTS), "layouts"))
def test_between_collectives_and_hooks(name: str, layout: str):
    check_layouts(settings(MODELS[name]), [LAYOUTS[layout] | {"training": {"compile": "layer"}}], step=_traced_step)


def _traced_step(values: dict, ranks: int) -> tuple[float, list[tuple]]:
    """The step of a rank whose parts must be compiled, without graph breaks."""
    trace()
    try:
        answer = on_this_rank(values, ranks)
    finally:
        graphs, breaks = traced()
    assert graphs and not breaks, (graphs, breaks)
    return answer


@pytest.mark.parametrize(("name", "cut"), toured(cases(CUTS), "layouts"))
def test_between_chunks_draws_and_what_is_recomputed(name: str, cut: str):
    values = overlay(settings(MODELS[name]), CUTS[cut])
    loss, wanted = gradients(values)
    trace()
    try:
        found_loss, found = gradients(overlay(values, {"training": {"compile": "layer"}}))
    finally:
        graphs, breaks = traced()
    assert graphs and not breaks, (graphs, breaks)
    torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
    for each, gradient in wanted.items():
        torch.testing.assert_close(found[each], gradient, rtol=1e-4, atol=1e-6, msg=each)


def gradients(values: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = build_model(resolve(values))
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
    mask, samples = torch.full((2, 16), 1 / 32), torch.tensor([3, 5])
    loss, _ = model(tokens[:, :-1], tokens[:, 1:], mask, samples=samples)
    loss.backward()
    return loss.detach(), {p.logical.name: p.grad for p in model.parameters()}
