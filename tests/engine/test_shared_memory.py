"""Training where ranks sum in memory of the host: of two ranks the same bits as with gloo, and the same account."""

from __future__ import annotations

import pytest
import torch

from megatron.config import resolve
from megatron.config.variants import overlay
from megatron.engine.deepspeed.reduction import one_behind_the_other
from megatron.engine.engine import build_engine
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.transport.shared_sums import SharedSums
from tests.engine.test_traffic import counted
from tests.training import runs
from tests.training.matrix import cases
from tests.workers import run

# A way of reducing gradients each, and one that sums activations.
RUNS = [
    "bf16: llama on dp2, ZeRO 1, four micro-batches",
    "fp32: neox on dp2, ZeRO 1, four micro-batches",
    "fp32: llama on dp2, ZeRO 2, four micro-batches",
    "fp32: llama on dp2, ZeRO 3, four micro-batches, recomputation",
    "fp32: gpt2 on tp2 · pp2, sequence parallel, recomputation",
]


def shared(work, values: dict, ranks: int) -> tuple:
    """What `work(values, ranks)` gives, and how many groups had such memory."""
    sums = SharedSums(print, least=1, chunk=2048)
    with sums.installed():
        found = work(values, ranks)
        return found, len(sums._hosts)


@pytest.mark.parametrize("name", RUNS)
def test_the_same_bits_and_the_same_account(name: str):
    case = next(case for case in cases() if case.name == name)
    plain, other = run(case.ranks, runs.train, case.values, case.ranks), None
    for one, (other, groups) in zip(plain, run(case.ranks, shared, runs.train, case.values, case.ranks)):
        assert groups > 0
        assert one[:3] == other[:3]
        assert all((mine[-1] == theirs[-1]).all() for mine, theirs in zip(one[3], other[3]))
    sent = run(case.ranks, counted, case.values, case.ranks)
    assert sent == [account for account, _ in run(case.ranks, shared, counted, case.values, case.ranks)]


def buckets(values: dict, ranks: int) -> bool:
    """Whether DeepSpeed copies a rank's gradients into buckets before they are summed."""
    config = resolve(values, ranks=ranks)
    engine = build_engine(config, Mesh.build(Layout.of(config, ranks)), "cpu")
    return engine.deepspeed.optimizer.contiguous_gradients


def test_gradients_of_zero_1_are_not_copied_into_buckets():
    dense = {
        "model": {"hidden_size": 32, "layers": "attention/mlp", "attention": {"heads": 4}, "vocab_size": 64},
        "training": {"steps": 1, "sequence_length": 16, "global_batch_size": 4},
        "data": {"synthetic": "copy"},
    }
    experts = {"model": {"layers": "attention/moe", "moe": {"experts": 4}}, "parallel": {"expert": 2}}
    assert run(2, buckets, overlay(dense, {"zero": {"stage": 1}}), 2) == [False, False]
    assert run(2, buckets, overlay(dense, {"zero": {"stage": 1, "overlap": True}}), 2) == [True, True]
    assert run(2, buckets, overlay(dense, {"zero": {"stage": 2}}), 2) == [True, True]
    assert run(2, buckets, overlay(dense, experts), 2) == [True, True]  # their group is another


def test_parts_next_to_each_other_are_one():
    whole = torch.arange(10.0)
    joined = one_behind_the_other([whole[2:4], whole[4:5], whole[5:9]])
    assert joined is not None and torch.equal(joined, whole[2:9]) and joined.data_ptr() == whole[2:].data_ptr()
    assert one_behind_the_other([whole[2:4], whole[5:9]]) is None
    assert one_behind_the_other([whole[2:4], torch.arange(4.0)]) is None
    assert one_behind_the_other([whole.view(2, 5), whole]) is None
    assert one_behind_the_other([whole[::2]]) is None
