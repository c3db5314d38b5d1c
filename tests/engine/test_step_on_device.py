"""Updates that are decided on the device, against DeepSpeed's, which the host decides. Both run on a CPU here: torch's
fused AdamW takes the same arguments there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config import resolve
from megatron.data.batch import StepBatch
from megatron.engine.deepspeed import step_on_device
from megatron.engine.deepspeed.step_on_device import skips_on_device
from megatron.engine.engine import build_engine
from megatron.parallel.layout.mesh import Mesh
from megatron.testing.ranks import on_ranks

STEPS = 4


def config(limit: float, **sections: Any):
    return resolve({
        "model": {"layers": "(attention/mlp) x1", "hidden_size": 32, "attention": {"heads": 2}, "vocab_size": 61},
        "training": {"steps": STEPS, "sequence_length": 8, "micro_batch_size": 1, "global_batch_size": 2},
        "optimizer": {"gradient_clipping": limit},
        "zero": {"stage": 1},
        "precision": {"compute": "bf16"},
        **sections,
    })


def trained(on_device: bool, limit: float, bad_step: int | None = None) -> list[tuple[float, list[torch.Tensor]]]:
    """The norm of each step, and the masters and moments after it."""
    step_on_device._on_gpu = lambda optimizer: on_device
    engine, seen = build_engine(config(limit), Mesh.single()), []
    ways = [engine.deepspeed.optimizer.step.__qualname__.startswith("decide_on_device")]
    assert ways == [on_device]
    batches = torch.randint(61, (STEPS, 2, 1, 9), generator=torch.Generator().manual_seed(1))
    for number, tokens in enumerate(batches):
        handles = []
        if number == bad_step:
            first = next(iter(engine.module.parameters()))
            handles = [first.register_hook(lambda gradient: gradient * float("nan"))]
        result = engine.step(StepBatch(number, tokens, torch.zeros((2, 1), dtype=torch.int64), 0), 1e-2)
        for each in handles:
            each.remove()
        state = engine.optimizer.state.values()
        kept = [*engine.deepspeed.optimizer.fp32_groups_flat_partition]
        kept += [part for each in state for part in each.values() if isinstance(part, torch.Tensor)]
        seen.append((float(result.grad_norm), [each.detach().clone() for each in kept]))
    return seen


@pytest.mark.parametrize("limit", [0.0, 0.05, 100.0])
def test_equals_the_update_that_the_host_decides(limit):
    """Apart from a rounding where gradients are clipped: they are divided here, and multiplied there. A weight may then
    round to the next bf16, 2**-8 of it, so that later gradients differ. After the first step, masters below 0.06 differ
    by a rounding of fp32, 2**-28."""
    (host,), (device,) = on_ranks(1, trained, False, limit), on_ranks(1, trained, True, limit)
    for step, ((norm, before), (own, after)) in enumerate(zip(host, device, strict=True)):
        assert own == pytest.approx(norm, rel=0 if limit != 0.05 else 1e-2) and norm > 0.05
        for wanted, found in zip(before, after, strict=True):
            if limit == 0.05:
                torch.testing.assert_close(found, wanted, rtol=1e-2 if step else 1e-6, atol=1e-3 if step else 2**-28)
            else:
                assert torch.equal(found, wanted)


def test_an_update_that_is_not_finite_changes_nothing():
    (seen,) = on_ranks(1, trained, True, 1.0, 2)
    assert [norm for norm, _ in seen][2] == float("inf")
    for before, after in zip(seen[1][1], seen[2][1], strict=True):
        assert torch.equal(before, after)  # masters, moments and the count of updates
    assert any(not torch.equal(before, after) for before, after in zip(seen[2][1], seen[3][1], strict=True))


def test_what_cannot_skip_on_the_device_keeps_the_way_of_the_host():
    weight = torch.nn.Parameter(torch.ones(2))
    assert skips_on_device(torch.optim.AdamW([weight], fused=True))
    assert not skips_on_device(torch.optim.AdamW([weight], fused=False))
    assert not skips_on_device(torch.optim.SGD([weight], fused=True))
    gated = torch.optim.AdamW([weight], fused=True)
    gated.step = lambda closure=None: None
    assert not skips_on_device(gated)
