"""The gradient norm of large tensors, against float64: torch's own is off by up to half a percent on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config import resolve
from megatron.data.batch import StepBatch
from megatron.engine.deepspeed.clipping import GlobalClipping
from megatron.engine.deepspeed.sum_of_squares import ROW, norm, sum_of_squares
from megatron.engine.engine import build_engine
from megatron.parallel.layout.mesh import Mesh
from megatron.testing.ranks import on_ranks

# A row's fp32 sum makes one rounding for each element and register of 8, and its root halves their sum: at the worst.
BOUND = ROW / 8 * 2**-24 / 2
WORDS, WIDTH = 40_000, 64


def of_float64(tensors: list[torch.Tensor]) -> float:
    return sum(float(each.double().square().sum()) for each in tensors) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_with_few_large_elements(dtype):
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(1250, 4099, generator=generator)
    large[:12] *= 100  # whose squares come first
    tensors = [large.to(dtype), large[:7, :5].to(dtype), large[0, :ROW].to(dtype), torch.zeros(0, dtype=dtype)]
    wanted = of_float64(tensors)
    assert abs(float(sum_of_squares(tensors).sqrt()) / wanted - 1) < BOUND
    assert abs(float(norm(tensors[0].t())) / of_float64(tensors[:1]) - 1) < BOUND
    if dtype == torch.float32:  # why this is not torch's norm
        assert abs(float(torch.linalg.vector_norm(tensors[0])) / of_float64(tensors[:1]) - 1) > 10 * BOUND


def test_what_is_not_finite_stays_so():
    values = torch.ones(3 * ROW)
    for bad in (float("inf"), float("nan")):
        values[ROW + 5] = bad
        assert not sum_of_squares([values]).isfinite()
    assert sum_of_squares([torch.zeros(0)]) == 0


def of_an_engine(precision: str) -> tuple[float, float]:
    """The norm that a step reports, and the norm of its gradients in float64."""
    config = resolve({
        "model": {
            "layers": "(attention/mlp) x1",
            "hidden_size": WIDTH,
            "attention": {"heads": 2},
            "vocab_size": WORDS,
            "embedding": {"tied": False},
        },
        "training": {"steps": 1, "sequence_length": 8, "micro_batch_size": 1, "global_batch_size": 2},
        "optimizer": {"lr": 0.0, "gradient_clipping": 0},
        "precision": {"compute": precision},
    })
    engine, seen = build_engine(config, Mesh.single()), list[float]()
    _look_before_update(engine, seen)
    tokens = torch.arange(18).view(2, 1, 9)
    result = engine.step(StepBatch(0, tokens, torch.zeros((2, 1), dtype=torch.int64), 0), 0.0)
    return float(result.grad_norm), seen[-1]


def _look_before_update(engine: Any, seen: list[float]) -> None:
    optimizer = engine.deepspeed.optimizer
    if hasattr(optimizer, "fp32_groups_gradients_flat"):  # DeepSpeed's bf16 optimizer
        find = optimizer.get_grads_for_norm

        def found(for_clipping: bool = False) -> Any:
            seen.append(of_float64(optimizer.fp32_groups_gradients_flat))
            return find(for_clipping)

        optimizer.get_grads_for_norm = found
        return

    def look(clipping: GlobalClipping) -> torch.Tensor:
        seen.append(of_float64([p.grad for p in clipping.parameters if p.grad is not None]))
        return plain(clipping)

    plain, GlobalClipping._norm = GlobalClipping._norm, look  # type: ignore[method-assign]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_engine_tells_the_norm_of_its_gradients(precision):
    [(told, wanted)] = on_ranks(1, of_an_engine, precision)
    assert (
        wanted > 0 and abs(told / wanted - 1) < 16 * 2**-24
    )  # roundings of rows go both ways: torch's norm is 7e-6 off
