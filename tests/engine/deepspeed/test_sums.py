"""Sums of gradients in bf16 that begin with a copy, against DeepSpeed's own, which begin with zeros."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron.config import resolve
from megatron.data.batch import StepBatch
from megatron.engine import base as engines
from megatron.engine.engine import build_engine
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.testing.ranks import on_ranks

SAMPLES, LENGTH, WORDS = 4, 8, 32


def train(
    ranks: int,
    limit: float = 0.5,
    stage: int = 1,
    compute: str = "bf16",
    reduce: str = "fp32",
    head_only: bool = False,
    **more: Any,
) -> dict[str, torch.Tensor]:
    """Weights, masters and moments after four steps of two micro-batches. In the second and third one matrix has no
    gradient.

    Args:
        head_only: only the head's matrix has gradients.
        more: sections of the configuration.
    """
    values = {
        "model": {
            "layers": "(attention/mlp) x2",
            "hidden_size": 16,
            "attention": {"heads": 2},
            "vocab_size": WORDS,
            "norm": {"type": "layernorm", "bias": True},
        },
        "training": {
            "steps": 4,
            "sequence_length": LENGTH,
            "micro_batch_size": SAMPLES // (2 * ranks),
            "global_batch_size": SAMPLES,
        },
        "optimizer": {"lr": 0.1, "gradient_clipping": limit},
        "precision": {"compute": compute, "reduce": reduce},
        "zero": {"stage": stage},
        **more,
    }
    config = resolve(values, ranks=ranks)
    mesh = Mesh.build(Layout.of(config, ranks))
    engine = build_engine(config, mesh)
    frozen = engine.module.get_parameter(next(n for n, p in engine.module.named_parameters() if p.dim() == 2))
    generator = torch.Generator().manual_seed(3)
    for step in range(4):
        tokens = torch.randint(WORDS, (2, SAMPLES // 2, LENGTH + 1), generator=generator)
        own = tokens[:, mesh.data.rank :: ranks]
        frozen.requires_grad_(step not in (1, 2))
        for name, weight in engine.module.named_parameters() if head_only else ():
            weight.requires_grad_(name == "head.weight")
        engine.step(StepBatch(step, own, torch.zeros(own.shape[:2], dtype=torch.int64), 0), 0.1)
    weights = {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}
    return weights | {
        f"{fragment.spec.tensor.name} {fragment.spec.state} {fragment.spec.start}": fragment.data.clone()
        for fragment in engine.state.fragments()
    }


def both_ways(ranks: int) -> list[str]:
    """Names of what differs in any bit, and of nothing else."""
    with mock.patch.object(engines, "scatters_gradients", lambda *_: False):
        with mock.patch.object(F, "embedding", wraps=F.embedding) as look_up:
            found = train(ranks)
        assert all(call.kwargs["sparse"] for call in look_up.call_args_list), "a gradient of the whole table"
        with mock.patch.object(engines, "begin_sums_with_copies", lambda *_: None):
            wanted = train(ranks)
    assert found.keys() == wanted.keys() and len(found) > 20
    return [name for name, values in found.items() if not values.equal(wanted[name])]


@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_are_the_same_bits(ranks: int):
    assert on_ranks(ranks, both_ways, ranks) == [[]] * ranks


def scattered() -> list[str]:
    """Names of what differs by more than a rounding from the sums of DeepSpeed, whose norm is added up otherwise."""
    found = train(2)
    with mock.patch.object(engines, "scatters_gradients", lambda *_: False):
        wanted = train(2)
    assert found.keys() == wanted.keys()
    return [name for name, values in found.items() if not values.allclose(wanted[name], rtol=1e-5, atol=1e-7)]


def test_a_bucket_with_a_parameter_without_gradient():
    assert on_ranks(2, scattered) == [[], []]
