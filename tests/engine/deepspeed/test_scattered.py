"""Gradients that are reduce-scattered in buckets under the backward pass: the bits of DeepSpeed's sums, half the bytes.

All layouts of `make layouts` at ZeRO 1 and 2 are compared with one process. Here it is with DeepSpeed's own reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.config import resolve
from megatron.config.arithmetic.wire import scatters_gradients
from megatron.config.variants import overlay
from megatron.engine import base
from megatron.engine.deepspeed import scattered as module
from megatron.engine.replicas import PieceHashes
from megatron.model.block import Block
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.layout import Layout
from megatron.parallel.messages.traffic import Tally
from megatron.parallel.transport.shared_sums import SharedSums
from megatron.plan.messages.predict import predict
from tests.engine.test_traffic import exact, trained_and_counted
from tests.selection import toured
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


@cache
def both(name: str) -> tuple[dict[str, Any], int, list, list]:
    """A pair's values without clipping, its ranks, and each rank's results and accounts: ours, and DeepSpeed's."""
    values, ranks = values_of(name, **SMALL)
    values = overlay(values, {"optimizer": {"gradient_clipping": 1e3}})
    ours = run(ranks, trained_and_counted, values, ranks)
    return values, ranks, ours, run(ranks, by_deepspeed, trained_and_counted, values, ranks)


@pytest.mark.parametrize("name", toured(PAIRS, "layouts"))
def test_the_sums_are_those_of_deepspeed(name: str):
    """Of two numbers there is one sum, so without clipping losses and masters have the same bits. Norms are added up
    in another order: of parts of ranks, each an fp32 sum with a relative error below 1e-6."""
    _, _, *found = both(name)
    ours, theirs = ([result for result, _ in own] for own in found)
    for mine, other in zip(ours, theirs):
        assert mine[0] == other[0] and mine[2] == other[2]
        assert mine[1] == pytest.approx(other[1], rel=2e-6)
    weights, wanted = (runs.assemble([each[3] for each in found]) for found in (ours, theirs))
    assert weights.keys() == wanted.keys()
    assert all((weights[key] == wanted[key]).all() for key in wanted)


@pytest.mark.parametrize("name", toured(PAIRS, "layouts"))
def test_half_the_bytes_of_an_all_reduce(name: str):
    """The account has what is predicted, several buckets, and no all-reduce of gradients of replicas. DeepSpeed sends
    each element in an all-reduce. A rank then sends twice as much as in a reduce-scatter of these bytes."""
    values, ranks, ours, others = both(name)
    config = resolve(values, ranks=ranks)
    assert scatters_gradients(config, Layout.of(config, ranks))
    predicted = [predict(config, ranks, rank, weighted=True) for rank in range(ranks)]
    for own, (_, steps) in zip(predicted, ours):
        assert exact(own, own.step) == exact(own, Tally.of_rows(steps[-1]))
    step = predicted[0].step.by("phase", "group", "operation")
    messages, size = step["backward", "data", "reduce_scatter"]
    assert messages > 3 and ("backward", "data", "all_reduce") not in step
    theirs = others[0][1][-1]
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


class Lazy:
    """A gather that sends what was there when it was begun, and writes weights when it is waited for."""

    def __init__(self, seen: list[str], weights: torch.Tensor, found: torch.Tensor) -> None:
        self.seen, self.weights, self.found = seen, weights, found

    def wait(self) -> None:
        self.seen.append("gathered")
        with torch.no_grad():
            self.weights.copy_(self.found)


def lazily(seen: list[str], work: Callable[..., Any], *arguments: Any) -> Any:
    gather = dist.all_gather_into_tensor

    def later(*given: Any, async_op: bool = False, **options: Any) -> Any:
        if not async_op:
            return gather(*given, **options)
        weights, own = given
        found = torch.empty_like(weights)
        gather(found, own, **options)
        return Lazy(seen, weights, found)

    with mock.patch.object(dist, "all_gather_into_tensor", later):
        return work(*arguments)


def trained_lazily(values: dict[str, Any], ranks: int) -> Any:
    seen = list[str]()
    return lazily(seen, runs.train, values, ranks), len(seen)


@pytest.mark.parametrize("name", [PAIRS[1], PAIRS[3], PAIRS[5], PAIRS[6]])
def test_no_weight_is_read_before_it_is_gathered(name: str):
    """Where gathers take place as late as they can, steps, evaluation and masters have the same bits."""
    values, ranks = values_of(name, **SMALL)
    ours, late = run(ranks, runs.train, values, ranks), run(ranks, trained_lazily, values, ranks)
    for mine, (other, gathers) in zip(ours, late):
        assert mine[:3] == other[:3] and gathers > 3
        assert all((one[-1] == two[-1]).all() for one, two in zip(mine[3], other[3], strict=True))


QK_CLIP = {"model": {"attention": {"qk_clip": 0.5}}, "training": {"steps": 2}}


def test_rows_that_shrink_after_an_update_are_not_gathered_from_before():
    """Masters in fp32 are parts of the weights: a gather that ends after a change of them would undo it."""
    values, ranks = values_of(PAIRS[0], **SMALL)
    values = overlay(values, QK_CLIP)
    assert Layout.of(resolve(values, ranks=ranks), ranks).zero_stage == 1
    ours, late = run(ranks, runs.train, values, ranks), run(ranks, trained_lazily, values, ranks)
    plain = run(ranks, runs.train, overlay(values, {"model": {"attention": {"qk_clip": None}}}), ranks)
    assert ours[0][0] != plain[0][0]
    for mine, (other, gathers) in zip(ours, late):
        assert mine[:3] == other[:3] and gathers > 3


def hashes(values: dict[str, Any], ranks: int) -> tuple[list[list[int]], bool]:
    """Hashes of all pieces after a step, and whether gathers were under way when they were taken."""
    config, engine = runs.start(values, ranks)
    pieces = PieceHashes(engine.state)
    pieces.find()
    lazily([], runs.steps, config, engine, 0, 1)
    flying = bool(engine.scattered.gathers._flying)
    return pieces.take(torch.device("cpu"))[0].tolist(), flying


@pytest.mark.parametrize("name", PAIRS[:2])
def test_hashes_wait_for_the_weights(name: str):
    """All ranks have the same weights, also if the hashes were prepared before the step."""
    values, ranks = values_of(name, **SMALL)
    found = run(ranks, hashes, values, ranks)
    assert all(flying for _, flying in found)
    held = [dict(map(tuple, pieces)) for pieces, _ in found]
    both = held[0].keys() & held[1].keys()
    assert len(both) > 20 and all(held[0][code] == held[1][code] for code in both)


def gathers(values: dict[str, Any], ranks: int) -> list[str]:
    """Gathers and blocks of the forward pass of a second step, in order."""
    config, engine = runs.start(values, ranks)
    seen = list[str]()
    for number, block in enumerate(each for each in engine.module.modules() if isinstance(each, Block)):
        block.register_forward_pre_hook(lambda *_, number=number: seen.append(f"block {number}"))
    lazily(seen, runs.steps, config, engine, 0, 1)
    seen.clear()
    runs.steps(config, engine, 1, 1)
    engine.module  # noqa: B018  waits for the gathers of the last step
    return seen


def test_a_block_runs_before_the_weights_of_later_blocks_are_there():
    values, ranks = values_of(PAIRS[0], **SMALL)
    for seen in run(ranks, gathers, values, ranks):
        first, last = seen.index("block 0"), seen.index("block 3")
        assert "gathered" in seen[:first] and "gathered" not in seen[last:]
        assert all("gathered" in seen[seen.index(f"block {n}") : seen.index(f"block {n + 1}")] for n in range(3))


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


def sums_of_hooks(values: dict[str, Any], ranks: int, missing: bool) -> list[tuple[str, float, float]]:
    """For each parameter in this rank's parts its largest gradient, and the largest error against the mean over ranks
    of the gradients that hooks saw. With `missing`, rank 1 has no gradient of some parameters in a micro-batch, or in
    none."""
    config, engine = runs.start(values, ranks)
    names, seen = dict[str, torch.nn.Parameter](), dict[str, torch.Tensor]()
    for parameter in engine.module.parameters():
        name = logical_of(parameter).name
        names[name], seen[name] = parameter, torch.zeros(parameter.shape, dtype=torch.float64)

        def see(gradient: torch.Tensor, name: str = name) -> None:
            seen[name] += gradient

        parameter.register_hook(see)
    found, scattered, update = list[tuple[str, float, float]](), engine.scattered, engine.deepspeed.optimizer.step
    absent, one = list(names.values())[2::5], list(names.values())[3::5]

    def step(*arguments: Any, **options: Any) -> Any:
        for own in seen.values():
            dist.all_reduce(own)
        for bucket in scattered.buckets:
            begin = bucket.own.numel() * dist.get_rank(bucket.group)
            for parameter, part in bucket.pieces():
                if parameter is None:
                    assert not part.any()
                    continue
                first = max(begin - bucket.parameters[parameter], 0)
                mean = seen[logical_of(parameter).name].view(-1)[first : first + part.numel()] / ranks
                error = (part.double() - mean).abs().max()
                found.append((logical_of(parameter).name, float(mean.abs().max()), float(error)))
        for own in seen.values():
            own.zero_()
        return update(*arguments, **options)

    engine.deepspeed.optimizer.step = step
    forward, calls = engine.deepspeed.module.forward, 0

    def some(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        lacks = missing and dist.get_rank() == 1 and calls < 4
        for each in absent:
            each.requires_grad_(not lacks)
        for each in one:
            each.requires_grad_(not (lacks and calls == 1))
        calls += 1
        return forward(*arguments, **options)

    engine.deepspeed.module.forward = some
    runs.steps(config, engine, 0, 2)
    return found


def in_few_kernels(work: Callable[..., Any], *arguments: Any) -> Any:
    """As on a GPU."""
    with mock.patch.object(module, "on_gpu", lambda optimizer: True):
        return work(*arguments)


@pytest.mark.parametrize(("name", "few"), [*((name, False) for name in PAIRS[:5]), (PAIRS[0], True), (PAIRS[2], True)])
def test_a_rank_without_some_gradients(name: str, few: bool):
    """Parameters that one rank does not use, in one micro-batch or in a step, count as zeros there. No sum of the step
    before stays, and the messages keep their order. Sums of four gradients in fp32 round by less than 1e-6 of the
    largest. With micro-batches in bf16, hooks see what is summed."""
    values, ranks = values_of(name, **SMALL)
    call = (in_few_kernels, sums_of_hooks) if few else (sums_of_hooks,)
    for found in run(ranks, *call, values, ranks, True):
        assert len(found) > 20 and any(largest for _, largest, _ in found)
        for parameter, largest, error in found:
            assert error <= 1e-6 * max(largest, 1e-3), parameter


def operations(values: dict[str, Any], ranks: int, routed: bool) -> tuple[set[str], list[float]]:
    """The kinds of sums of buckets in a step through shared memory, and the step's norm."""
    found, send = set[str](), dist.reduce_scatter_tensor

    def noted(*arguments: Any, **options: Any) -> Any:
        found.add(str(options["op"]))
        return send(*arguments, **options)

    with SharedSums(print, least=64).installed():
        config, engine = runs.start(values, ranks)
        routes = mock.patch.object(module, "installed_routes", lambda: object() if routed else None)
        with routes, mock.patch.object(dist, "reduce_scatter_tensor", noted):
            return found, runs.steps(config, engine, 0, 1)[1]


def test_a_table_of_algorithms_gets_sums_that_it_knows():
    """An average would go past the table (`transport.routes`). Half of a sum and an average of two have the same
    bits."""
    values, ranks = values_of(PAIRS[0], **SMALL)
    averaged, routed = (run(ranks, operations, values, ranks, each) for each in (False, True))
    assert [norm for _, norm in averaged] == [norm for _, norm in routed]
    assert all("AVG" in str(kinds) and len(kinds) == 1 for kinds, _ in averaged)
    assert all("SUM" in str(kinds) and len(kinds) == 1 for kinds, _ in routed)


def test_stages_that_share_a_weight_add_gradients_where_deepspeed_reads_them():
    values, ranks, ours, _ = both(PAIRS[6])
    again = run(ranks, in_few_kernels, runs.train, values, ranks)
    assert [each[:2] for each in again] == [found[:2] for found, _ in ours]
