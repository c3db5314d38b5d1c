"""The model cut over tensor parallel ranks, with and without sequence parallelism, equals the whole one."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from megatron.config import resolve
from megatron.model.stack import build_model
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from tests.float64 import DOUBLE
from tests.model.parity import check_part, named
from tests.workers import run

S, V = 12, 37
MODELS = {
    "neox": {
        "residual": {"form": "parallel"},
        "attention": {"heads": 4, "qkv_bias": True, "output_bias": True},
        "mlp": {"bias": True, "hidden_size": 25},
        "head": {"bias": True},
        "dropout": 0.2,
    },
    "grouped, fewer key/value heads than ranks": {
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "kv_heads": 1, "qk_norm": "head", "qkv_bias": True},
        "mlp": {"gated": True, "hidden_size": 30},
        "embedding": {"tied": True},
    },
    "olmo2": {
        "norm": {"type": "rmsnorm"},
        "residual": {"norm": "post"},
        "attention": {"heads": 4, "kv_heads": 2, "qk_norm": "full"},
        "mlp": {"gated": True, "hidden_size": 30},
    },
    "olmo2, one key/value head": {
        "residual": {"norm": "post"},
        "attention": {"heads": 4, "kv_heads": 1, "qk_norm": "full"},
    },
    "alibi, learned, embedding norm": {
        "attention": {"heads": 4, "position": "alibi", "dropout": 0.1},
        "embedding": {"position": "learned", "norm": True},
        "residual": {"form": "parallel", "shared_norm": True},
        "head": {"softcap": 3.0},
    },
}


def step(model_values: dict, layout: Layout, mode: str, move: bool = True):
    """(loss, this rank's gradients by name, logits) of one step of the model on this rank of the layout."""
    mesh = Mesh.single() if layout.tensor == 1 else Mesh.build(layout)
    config = resolve({
        "model": {"layers": "(attention/mlp) x2", "hidden_size": 24, "vocab_size": V, **model_values},
        "training": {
            "steps": 1,
            "sequence_length": S,
            "z_loss": 0.1,
            "loss_chunk": 7,
            "activation_checkpointing": {"mode": mode},
        },
    })
    model = build_model(config, mesh, dtype=DOUBLE)
    shake(model, layout)
    tokens, labels = torch.randint(V, (2, 2, S), generator=torch.Generator().manual_seed(0))
    loss, _ = model(tokens, labels, torch.ones(labels.shape), samples=torch.tensor([4, 9]))
    loss.backward()
    with torch.no_grad():
        logits = model.eval().logits(tokens)
    pieces = {name: (p.grad, p.logical.spans(mesh.tensor.rank, mesh.tensor.size)) for name, p in named(model).items()}
    return loss.item(), pieces, logits


@cache
def whole(name: str) -> tuple:
    """The step of one rank, which several layouts are compared with."""
    return step(MODELS[name], Layout(), "none")


def shake(model, layout: Layout) -> None:
    """Norms and biases too get values, the same on every layout."""
    with torch.no_grad():
        for name, p in named(model).items():
            if p.dim() == 1:
                whole = torch.randn(p.logical.shape, generator=torch.Generator().manual_seed(sum(name.encode())))
                spans = p.logical.spans(model.plan.mesh.tensor.rank, layout.tensor)[0]
                p.add_(0.2 * torch.cat([whole[each.start : each.stop] for each in spans]))
            else:
                p.mul_(4.0)


@pytest.mark.parametrize(
    "ranks, sequence, mode",
    [
        (2, False, "none"),
        (2, True, "none"),
        (4, True, "none"),
        (2, True, "full"),
        (2, False, "selective"),
        (2, True, "selective"),
    ],
)
def test_equals_one_rank(ranks: int, sequence: bool, mode: str):
    for name, values in MODELS.items():
        for rank, own in enumerate(run(ranks, step, values, Layout(tensor=ranks, sequence=sequence), mode)):
            check_part(own, whole(name), (name, rank))
