"""Training where ranks sum in memory of the host: of two ranks the same bits as with gloo, and the same account."""

from __future__ import annotations

import pytest

from megatron.parallel.transport.shared_sums import SharedSums
from tests.engine.test_traffic import trained_and_counted
from tests.selection import toured
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


def shared(values: dict, ranks: int) -> tuple:
    """Results and accounts of a run, and the number of groups that had such memory."""
    sums = SharedSums(print, least=1, chunk=2048)
    with sums.installed():
        found = trained_and_counted(values, ranks)
        return found, len(sums._hosts)


@pytest.mark.parametrize("name", toured(RUNS, "layouts"))
def test_the_same_bits_and_the_same_account(name: str):
    case = next(case for case in cases() if case.name == name)
    plain = run(case.ranks, trained_and_counted, case.values, case.ranks)
    found = run(case.ranks, shared, case.values, case.ranks)
    for (one, account), ((other, sent), groups) in zip(plain, found, strict=True):
        assert groups > 0 and sent == account and len(sent) > 1
        assert one[:3] == other[:3]
        assert all((mine[-1] == theirs[-1]).all() for mine, theirs in zip(one[3], other[3]))
