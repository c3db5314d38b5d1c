"""ZeRO 1 on CPUs without the copies that DeepSpeed makes: the same bits, in memory that stays where it is."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from megatron.config.variants import overlay
from megatron.engine import base as module
from tests.training import runs
from tests.training.matrix import cases
from tests.workers import run

NAME = "fp32: neox on dp2, ZeRO 1, four micro-batches"


def without(names: list[str], values: dict, ranks: int) -> tuple:
    """The run as DeepSpeed does it, as far as these functions change it."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(module, name, lambda optimizer: None))
        return runs.train(values, ranks)


@pytest.mark.parametrize("limit", [1e-3, 1e3], ids=["clipped", "not clipped"])
def test_the_same_bits(limit: float):
    """Of losses, norms, the evaluation with other weights in their place, and masters. The norm is that of fp64 but for
    the roundings of fp32, so that where it decides about nothing the run is bit for bit DeepSpeed's."""
    case = next(case for case in cases() if case.name == NAME)
    values = overlay(case.values, {"optimizer": {"gradient_clipping": limit}})
    ours = run(case.ranks, runs.train, values, case.ranks)
    copied = run(case.ranks, without, ["update_in_place"], values, case.ranks)
    plain = run(case.ranks, without, ["update_in_place", "norms_without_copies"], values, case.ranks)
    for mine, theirs, exact in zip(ours, copied, plain):
        assert mine[:3] == theirs[:3]
        assert all((one[-1] == other[-1]).all() for one, other in zip(mine[3], theirs[3]))
        assert mine[1] == pytest.approx(exact[1], rel=1e-6) and min(mine[1]) > 1e-3 and max(mine[1]) < 1e3
        if limit > 1:
            assert all((one[-1] == other[-1]).all() for one, other in zip(mine[3], exact[3]))


def addresses(values: dict, ranks: int) -> tuple[list, list, list]:
    """Of the part of the weights that the rank updates, of its masters, and of the gradients in each of two steps. Also
    bytes that a file of DeepSpeed's would have of the masters and their own."""
    config, engine = runs.start(values, ranks)
    zero, gradients = engine.deepspeed.optimizer, list[list[int]]()
    engine.optimizer.register_step_pre_hook(
        lambda *_: gradients.append([p.grad.data_ptr() for g in engine.optimizer.param_groups for p in g["params"]])
    )
    runs.steps(config, engine, 0, 2)
    rank, masters = torch.distributed.get_rank(), zero.single_partition_of_fp32_groups
    parts = [each[rank].data_ptr() for each in zero.parallel_partitioned_bit16_groups]
    saved = zero.state_dict()["single_partition_of_fp32_groups"]
    sizes = [(each.untyped_storage().nbytes(), 4 * each.numel()) for each in saved]
    fragments = [p._hp_mapping.get_hp_fragment().data_ptr() - p.data_ptr() for p in owned(engine)]
    return [parts, [each.data_ptr() for each in masters]], gradients, [sizes, fragments]


def owned(engine) -> list:
    """Parameters that this rank has from their first element on."""
    mapped = [p for p in engine.module.parameters() if p._hp_mapping is not None]
    return [p for p in mapped if p._hp_mapping.lp_fragment_address.start == 0]


def test_masters_are_weights_and_gradients_stay():
    case = next(case for case in cases() if case.name == NAME)
    for (parts, masters), gradients, (sizes, fragments) in run(case.ranks, addresses, case.values, case.ranks):
        assert parts == masters
        groups = len(masters)
        steps = [sum(gradients[first : first + groups], []) for first in range(0, len(gradients), groups)]
        assert len(steps) == 2 and steps[0] == steps[1]
        assert sizes and all(stored == own for stored, own in sizes)
        assert fragments and not any(fragments)
