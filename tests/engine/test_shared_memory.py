"""Training where ranks sum in memory of the host: of two ranks the same bits as with gloo, and the same account."""

from __future__ import annotations

import pytest

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
