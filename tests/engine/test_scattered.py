"""Gradients that are reduce-scattered in buckets under the backward pass: the bits of DeepSpeed's sums, half the bytes.

All layouts of `make layouts` at ZeRO 1 and 2 are compared with one process; here it is with DeepSpeed's own reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.config import resolve
from megatron.config.arithmetic.wire import scatters_gradients
from megatron.config.variants import overlay
from megatron.engine import base
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.layout import Layout
from megatron.parallel.messages.traffic import Tally
from megatron.plan.messages.predict import predict
from tests.engine.test_traffic import counted, exact
from tests.training import runs
from tests.training.matrix import cases
from tests.workers import run

# One of each form: sums kept whole or cut, fp32 or bf16, stages that share a weight, experts with a group of their own.
PAIRS = [
    "fp32: neox on dp2, ZeRO 1, four micro-batches",
    "fp32: llama on dp2, ZeRO 2, four micro-batches",
    "fp32: llama on dp2, ZeRO 2, four micro-batches reduced once",
    "bf16: llama on dp2, ZeRO 1, four micro-batches",
    "bf16: llama on dp2, ZeRO 2, four micro-batches",
    "bf16: moe on dp2 · ep2, ZeRO 1, four micro-batches",
    "fp32: gpt2 on pp2 · dp2, ZeRO 1",
]
SMALL = {"bucket_size": 2000}


def values_of(name: str, **zero: Any) -> tuple[dict[str, Any], int]:
    case = next(case for case in cases() if case.name == name)
    return overlay(case.values, {"zero": zero}), case.ranks


def by_deepspeed(work: Callable[..., Any], values: dict[str, Any], ranks: int) -> Any:
    with mock.patch.object(base, "scatters_gradients", lambda *_: False):
        return work(values, ranks)


@pytest.mark.parametrize("name", PAIRS)
def test_the_sums_are_those_of_deepspeed(name: str):
    """Of two numbers there is one sum, so without clipping losses and masters have the same bits. Norms are added up
    in another order: of parts of ranks, each an fp32 sum with a relative error below 1e-6."""
    values, ranks = values_of(name, **SMALL)
    values = overlay(values, {"optimizer": {"gradient_clipping": 1e3}})
    ours, theirs = run(ranks, runs.train, values, ranks), run(ranks, by_deepspeed, runs.train, values, ranks)
    for mine, other in zip(ours, theirs):
        assert mine[0] == other[0] and mine[2] == other[2]
        assert mine[1] == pytest.approx(other[1], rel=2e-6)
    weights, wanted = (runs.assemble([each[3] for each in found]) for found in (ours, theirs))
    assert weights.keys() == wanted.keys()
    assert all((weights[key] == wanted[key]).all() for key in wanted)


@pytest.mark.parametrize("name", PAIRS)
def test_half_the_bytes_of_an_all_reduce(name: str):
    """The account has what is predicted, several buckets, and no all-reduce of gradients of replicas. DeepSpeed sends
    each element in an all-reduce, of which a rank sends twice as much as of a reduce-scatter of these bytes."""
    values, ranks = values_of(name, **SMALL)
    config = resolve(values, ranks=ranks)
    assert scatters_gradients(config, Layout.of(config, ranks))
    predicted = [predict(config, ranks, rank, weighted=True) for rank in range(ranks)]
    found = run(ranks, counted, values, ranks)
    for own, steps in zip(predicted, found):
        assert exact(own, own.step) == exact(own, Tally.of_rows(steps[-1]))
    step = predicted[0].step.by("phase", "group", "operation")
    messages, size = step["backward", "data", "reduce_scatter"]
    assert messages > 3 and ("backward", "data", "all_reduce") not in step
    theirs = run(ranks, by_deepspeed, counted, values, ranks)[0][-1]
    summed = sum(
        row[-1]
        for row in theirs
        if row[0] == "backward" and row[2] in ("data", "expert_data") and row[4] == "all_reduce"
    )
    assert summed <= size + step.get(("backward", "expert_data", "reduce_scatter"), (0, 0))[1] <= 1.05 * summed


def order(values: dict[str, Any], ranks: int) -> list[str]:
    """Gradients and messages of a step, in order."""
    config, engine = runs.start(values, ranks)
    seen, send = list[str](), dist.reduce_scatter_tensor
    for parameter in engine.module.parameters():
        name = logical_of(parameter).name
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))

    def noted(*arguments: Any, **options: Any) -> Any:
        seen.append("send")
        return send(*arguments, **options)

    with mock.patch.object(dist, "reduce_scatter_tensor", noted):
        runs.steps(config, engine, 0, 1)
    return seen


def test_buckets_are_sent_before_the_backward_pass_ends():
    """None before the last of four micro-batches, and most before the gradients of the first block, which come last."""
    values, ranks = values_of(PAIRS[0], **SMALL)
    for seen in run(ranks, order, values, ranks):
        gradients = len(seen) - seen.count("send")
        assert gradients // 4 * 3 <= seen.index("send") < gradients
        block = [number for number, name in enumerate(seen) if name.startswith("layers.0.")]
        assert seen[: block[len(block) // 4 * 3]].count("send") > seen.count("send") // 2


def twice(values: dict[str, Any], ranks: int) -> str:
    _, engine = runs.start(values, ranks)
    scattered = engine.scattered
    parameter = next(iter(scattered._order[0].parameters))
    scattered._order[0].sent = True
    try:
        torch.nn.functional.mse_loss(parameter, torch.zeros_like(parameter)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_gradient_that_comes_too_late_is_an_error():
    values, ranks = values_of(PAIRS[1], **SMALL)
    assert all("after its bucket was sent" in each for each in run(ranks, twice, values, ranks))


@pytest.mark.parametrize(
    "more",
    [
        {"zero": {"stage": 3}},
        {"zero": {"offload_optimizer": {"device": "cpu"}}, "optimizer": {"type": "adamw"}},
        {"optimizer": {"type": "muon"}},
        {"parallel": {"communication": {"compress": {"data": "bf16"}}}},
        {"precision": {"compute": "bf16", "accumulate": "bf16"}},
        {"deepspeed": {"zero_optimization": {"round_robin_gradients": True}}},
    ],
)
def test_what_keeps_the_reduction_of_deepspeed(more: dict[str, Any]):
    values, ranks = values_of(PAIRS[0])
    config = resolve(overlay(values, more), ranks=ranks)
    assert not scatters_gradients(config, Layout.of(config, ranks))
