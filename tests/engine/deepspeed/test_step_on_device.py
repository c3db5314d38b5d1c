"""Updates that are decided on the device, against DeepSpeed's, which the host decides. Both run on a CPU here: torch's
fused AdamW takes the same arguments there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.config import resolve
from megatron.config.variants import overlay
from megatron.data.batch import StepBatch
from megatron.engine.deepspeed import step_on_device
from megatron.engine.deepspeed.step_on_device import skips_on_device
from megatron.engine.engine import build_engine
from megatron.parallel.layout.mesh import Mesh
from megatron.testing.ranks import on_ranks
from tests.training import runs
from tests.training.matrix import cases
from tests.workers import run

STEPS, BAD = 4, 2
CASES = [  # ZeRO stage, gradient clipping, whether gradients of step BAD are not finite
    *((stage, limit, False) for stage in (1, 2) for limit in (0.0, 0.05, 100.0)),
    *((3, limit, False) for limit in (0.0, 100.0)),
    *((stage, 100.0, True) for stage in (1, 2, 3)),
]
MASTERS = {1: "fp32_groups_flat_partition", 2: "single_partition_of_fp32_groups", 3: "fp32_partitioned_groups_flat"}
Steps = list[tuple[float, list[torch.Tensor]]]


def trained(on_device: bool) -> list[Steps]:
    """Of each case and step the norm, and masters, moments and counts of updates after it."""
    with _as_if(on_device):
        return [_trained(on_device, *case) for case in CASES]


@contextmanager
def _as_if(on_device: bool) -> Iterator[None]:
    """Decisions on the device, in this context only: ranks are used by other tests too. A CPU has no streams."""
    with (
        patch.object(step_on_device, "on_gpu", lambda optimizer: on_device),
        patch.object(step_on_device, "_order_on_device", lambda optimizer: None),
    ):
        yield


def _trained(
    on_device: bool, stage: int, limit: float, bad: bool, more: dict[str, Any] | None = None, factor: float = torch.nan
) -> Steps:
    values = {
        "model": {"layers": "(attention/mlp) x1", "hidden_size": 32, "attention": {"heads": 2}, "vocab_size": 61},
        "training": {"steps": STEPS, "sequence_length": 8, "micro_batch_size": 1, "global_batch_size": 2},
        "optimizer": {"gradient_clipping": limit},
        "zero": {"stage": stage},
        "precision": {"compute": "bf16"},
    }
    config = resolve(overlay(values, more or {}))
    engine, seen = build_engine(config, Mesh.single()), []
    zero = engine.deepspeed.optimizer
    batches = torch.randint(61, (STEPS, 2, 1, 9), generator=torch.Generator().manual_seed(1))
    for number, tokens in enumerate(batches):
        first, handles = next(iter(engine.module.parameters())), []
        if bad and number == BAD:
            handles.append(first.register_hook(lambda gradient: gradient * factor))
        result = engine.step(StepBatch(number, tokens, torch.zeros((2, 1), dtype=torch.int64), 0), 1e-2)
        for each in handles:
            each.remove()
        states = [part for each in engine.optimizer.state.values() for part in each.values()]
        offloads = getattr(zero, "cpu_offload", False)  # of ZeRO 1 and 2, which are one optimizer then
        kept = [
            *getattr(zero, MASTERS[2 if offloads else stage]),
            *(part for part in states if isinstance(part, torch.Tensor)),
        ]
        seen.append((float(result.grad_norm), [each.detach().clone() for each in kept]))
    assert hasattr(engine.optimizer, "found_inf") == on_device
    return seen


@pytest.fixture(scope="module")
def both() -> list[tuple[Steps, Steps]]:
    (host,), (device,) = on_ranks(1, trained, False), on_ranks(1, trained, True)
    return list(zip(host, device, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_equals_the_update_that_the_host_decides(both, case):
    """Apart from a rounding where the bf16 optimizer clips: gradients are divided here, and multiplied there. A weight
    may then round to the next bf16, 2**-8 of it, so that later gradients differ. After the first step, masters below
    0.06 differ by a rounding of fp32, 2**-28. At ZeRO 3 DeepSpeed takes the norm in fp64, ours adds fp32 squares."""
    rounds, near_norm = case[:2] == (1, 0.05), 1e-6 if case[0] == 3 else 0
    for step, ((norm, before), (own, after)) in enumerate(zip(*both[CASES.index(case)], strict=True)):
        assert own == pytest.approx(norm, rel=1e-2 if rounds else near_norm) and norm > 0.05
        for wanted, found in zip(before, after, strict=True):
            if rounds:
                near = {"rtol": 1e-2, "atol": 1e-3} if step else {"rtol": 1e-6, "atol": 2**-28}
                torch.testing.assert_close(found, wanted, **near)
            else:
                assert torch.equal(found, wanted)


@pytest.mark.parametrize("case", [case for case in CASES if case[2]])
def test_an_update_that_is_not_finite_changes_nothing(both, case):
    _, steps = both[CASES.index(case)]
    assert steps[BAD][0] == float("inf")
    for before, after in zip(steps[BAD - 1][1], steps[BAD][1], strict=True):
        assert torch.equal(before, after)
    assert any(not torch.equal(before, after) for before, after in zip(steps[BAD][1], steps[BAD + 1][1], strict=True))


def trained_with_experts(on_device: bool, values: dict[str, Any], ranks: int) -> tuple[list[float], list[float]]:
    with _as_if(on_device):
        config, engine = runs.start(values, ranks)
        return runs.steps(config, engine, 0, 2)


def test_experts_on_several_ranks():
    """Their norm stays on the device too. Nothing is clipped, so losses and norms have the same bits."""
    case = next(case for case in cases() if case.name == "bf16: moe on dp2 · ep2, ZeRO 1, four micro-batches")
    values = overlay(case.values, {"optimizer": {"gradient_clipping": 1e3}})
    host, device = (run(case.ranks, trained_with_experts, on_device, values, case.ranks) for on_device in (False, True))
    assert host == device


class Gathers:
    """Stands for the stream of ZeRO 3's gathers. It keeps the weights of the times at which it waits for another."""

    def __init__(self) -> None:
        self.optimizer: Any = None
        self.found: list[torch.Tensor] = []

    def of(self, optimizer: Any) -> Gathers:
        self.optimizer = optimizer
        return self

    def wait_stream(self, other: str) -> None:
        assert other == "the current one"
        self.found.append(self.optimizer.fp16_partitioned_groups_flat[0].clone())


def waited(offload: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The new weights of each step, and the weights at each wait of the stream of gathers."""
    gathers = Gathers()
    with (
        _as_if(offload == "none"),
        patch.object(step_on_device, "_gather_stream", gathers.of),
        patch.object(torch.cuda, "current_stream", lambda: "the current one"),
    ):
        steps = _trained(offload == "none", 3, 0.0, False, {"zero": {"offload_optimizer": {"device": offload}}})
    return [masters.to(gathers.found[0].dtype) for _, (masters, *_) in steps], gathers.found


def refreshed() -> tuple[torch.Tensor, torch.Tensor]:
    """New masters as weights, and the weights when the stream of gathers waits."""
    values = {
        "model": {"layers": "(attention/mlp) x1", "hidden_size": 32, "attention": {"heads": 2}, "vocab_size": 61},
        "training": {"steps": 1, "sequence_length": 8, "micro_batch_size": 1, "global_batch_size": 2},
        "zero": {"stage": 3},
        "precision": {"compute": "bf16"},
    }
    engine, gathers = build_engine(resolve(values), Mesh.single()), Gathers()
    masters = engine.deepspeed.optimizer.fp32_partitioned_groups_flat[0]
    masters.data.add_(1.0)
    with (
        patch.object(step_on_device, "_gather_stream", gathers.of),
        patch.object(torch.cuda, "current_stream", lambda: "the current one"),
    ):
        engine.state.refresh()
    return masters.detach().bfloat16(), gathers.found[-1]


def test_gathers_of_another_stream_wait_for_weights_of_a_checkpoint():
    ((wanted, found),) = on_ranks(1, refreshed)
    assert torch.equal(wanted, found)


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_gathers_of_another_stream_wait_for_the_update(offload: str):
    """With `zero.overlap` a GPU gathers on a stream of its own, and the host no longer waits for the update."""
    ((wanted, found),) = on_ranks(1, waited, offload)
    assert len(found) == STEPS and all(map(torch.equal, wanted, found))


OFFLOADED = [(stage, bad) for stage in (1, 2, 3) for bad in (False, True)]


def offloaded(of_each: bool) -> list[Steps]:
    """Steps with masters on the host. DeepSpeed reads norms and overflows of each parameter, or group at ZeRO 3."""
    own = {name: lambda optimizer: None for name in ("_add_up_offloaded", "_add_up_offloaded_shards")}
    with patch.multiple(step_on_device, **own) if of_each else nullcontext():
        more = {"zero": {"offload_optimizer": {"device": "cpu"}}}
        return [_trained(False, stage, 0.05, bad, more) for stage, bad in OFFLOADED]


def test_the_norm_of_offloaded_gradients_is_read_once():
    (of_each,), (once,) = on_ranks(1, offloaded, True), on_ranks(1, offloaded, False)
    for case, before, after in zip(OFFLOADED, of_each, once, strict=True):
        assert [norm for norm, _ in before] == [norm for norm, _ in after]
        assert (after[BAD][0] == float("inf")) == case[1]
        for (_, wanted), (_, found) in zip(before, after, strict=True):
            assert all(map(torch.equal, wanted, found))


def trained_offloaded(of_each: bool, values: dict[str, Any], ranks: int) -> tuple[list[float], list[float]]:
    own = patch.object(step_on_device, "_add_up_offloaded_shards", lambda optimizer: None)
    with own if of_each else nullcontext():
        config, engine = runs.start(values, ranks)
        return runs.steps(config, engine, 0, 2)


@pytest.mark.parametrize(
    "name",
    ["state space on dp2, ZeRO 3, four micro-batches, recomputation", "llama on tp2 · dp2, ZeRO 3, sequence parallel"],
)
def test_offloaded_shards_of_several_ranks(name: str):
    """Of parameter groups in two types, and with tensor parallel parameters. Gradients are clipped."""
    case = next(case for case in cases() if case.name == f"bf16: {name}")
    offloaded = {"zero": {"offload_optimizer": {"device": "cpu"}}}
    values = overlay(case.values, offloaded) | {"optimizer": {"lr": 1e-2, "gradient_clipping": 0.3}}
    of_each, once = (run(case.ranks, trained_offloaded, own, values, case.ranks) for own in (True, False))
    assert of_each == once and min(once[0][1]) > 0.3


@pytest.mark.parametrize("own", ["swap_optimizer", "zenflow", "dtype", "class"])
def test_gradients_that_the_host_reads_earlier_keep_the_waits_of_deepspeed(own: str):
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    made = (
        type("SuperOffload", (DeepSpeedZeroOptimizer_Stage3,), {}) if own == "class" else DeepSpeedZeroOptimizer_Stage3
    )
    optimizer = made.__new__(made)
    before = {"offload_optimizer": True, "swap_optimizer": False, "zenflow": False, "dtype": torch.bfloat16}
    before |= {} if own == "class" else {own: torch.float16 if own == "dtype" else True}
    vars(optimizer).update(before)
    step_on_device.decide_on_device(optimizer, torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
    assert vars(optimizer) == before


GATED = [  # ZeRO stage, action at spikes, factor of a gradient in step BAD
    *((stage, action, factor) for stage in (1, 2) for action in ("skip", "clip") for factor in (1e4, torch.nan)),
    (3, "skip", 1e4),
    (3, "skip", torch.nan),
]


def gated(on_device: bool) -> list[Steps]:
    """Steps whose updates a gate judges."""
    with _as_if(on_device):
        own = {"non_finite": "skip", "window": 4, "clip": {"warmup": 2}}
        each = [(stage, {"spikes": {"action": action, **own}}, factor) for stage, action, factor in GATED]
        return [_trained(on_device, stage, 0.0, True, more, factor) for stage, more, factor in each]


def test_updates_that_a_gate_judges():
    (host,), (device,) = on_ranks(1, gated, False), on_ranks(1, gated, True)
    for (stage, action, factor), before, after in zip(GATED, host, device, strict=True):
        for (norm, wanted), (own, found) in zip(before, after, strict=True):
            assert own == pytest.approx(norm, rel=1e-6 if stage == 3 else 0)
            assert all(map(torch.equal, wanted, found))
        masters = [step[1][0] for step in after]
        assert torch.equal(masters[BAD], masters[BAD - 1]) == (action == "skip" or factor != factor)
        assert not torch.equal(masters[BAD], masters[BAD + 1])


def test_what_cannot_skip_on_the_device_keeps_the_way_of_the_host():
    weight = torch.nn.Parameter(torch.ones(2))
    assert skips_on_device(torch.optim.AdamW([weight], fused=True))
    assert not skips_on_device(torch.optim.AdamW([weight], fused=False))
    assert not skips_on_device(torch.optim.SGD([weight], fused=True))
    wrapped = torch.optim.AdamW([weight], fused=True)
    wrapped.step = lambda closure=None: None
    assert not skips_on_device(wrapped)
    for needed in (True, False):
        wrapped.step.needs_clipped = needed
        assert skips_on_device(wrapped) != needed
