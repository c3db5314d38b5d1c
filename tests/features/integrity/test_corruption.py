"""A bit that flips in one rank's state is found, and the rank is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.engine.replicas import hash_bits
from megatron.features.integrity.part import StateDifference, differences, guilty
from megatron.report.ledger import read_ledger
from megatron.training.hook import Hook
from megatron.training.trainer import Trainer
from megatron.worker.job import CORRUPT, guarded
from tests.features.spikes.test_spikes import attempt
from tests.selection import toured
from tests.training.test_run import TINY
from tests.workers import run as on_ranks

LAST = 6
# One micro-batch a step where many messages make each dear: states change in updates only.
LAYOUTS = {  # ranks, overrides. Rank and state whose bit flips, ranks that are named, whether for certain
    "three replicas": (3, ("zero.stage=0",), (1, "master", [1], True)),
    "three replicas, moment": (3, ("zero.stage=0",), (2, "exp_avg_sq", [2], True)),
    "two replicas": (2, ("zero.stage=0",), (1, "master", [0, 1], False)),
    "tensor": (
        2,
        ("parallel.tensor=2", "zero.stage=1", "parallel.sequence=true", "training.micro_batch_size=12"),
        (0, "master", [0, 1], False),
    ),
    "tensor, zero 3": (
        4,
        ("parallel.tensor=2", "zero.stage=3", "training.micro_batch_size=6"),
        (2, "master", [2, 3], False),
    ),
    "weights of zero 2": (3, ("zero.stage=2", "precision=bf16"), (2, "weight", [2], True)),
    "columns": (
        4,
        ("parallel.columns=4", "model.dropout=0", "model.mlp.bias=true", "training.micro_batch_size=12"),
        (2, "master", [2], True),
    ),
    "pipeline": (4, ("parallel.pipeline=2", "zero.stage=0"), (2, "exp_avg", [2, 3], False)),
}


class Flip(Hook):
    """One bit, in one rank's state: before a step, or right after the update, where the next one would repair it."""

    def __init__(self, rank: int, state: str) -> None:
        self._rank, self._state = rank, state

    def before_step(self, trainer: Trainer, step: int) -> None:
        if step == 4 and self._state != "weight":
            self._flip(trainer)

    def after_step(self, trainer: Trainer, step: int, report: object) -> None:
        if step == 3 and self._state == "weight":
            self._flip(trainer)

    def _flip(self, trainer: Trainer) -> None:
        if trainer.mesh.rank != self._rank:
            return
        state = trainer.engine.state
        if self._state == "weight":
            weights = [*trainer.engine.module.parameters()]  # gathered: a gather that still runs would repair the bit
            data = weights[-1].detach().view(-1)
        else:
            held = [each for each in state.targets() if each.state == self._state]
            data = next(each.data for each in held if each.tensor_ranks == 1 and each.data.numel() > 4)
        bits = data[3:4].view({2: torch.int16, 4: torch.int32}[data.element_size()])
        bits ^= 1 << 3


@pytest.mark.parametrize("layout", toured(LAYOUTS))
def test_a_flipped_bit_is_found_and_its_rank_named(layout: str, tmp_path: Path) -> None:
    ranks, options, (rank, state, named, certain) = LAYOUTS[layout]
    (tmp_path / "tiny.yml").write_text(TINY.replace("global_batch_size: 8", "global_batch_size: 12"))
    options = (*options, "training.hashes=3", "checkpoint.every=4", "evaluation.every=null", f"training.steps={LAST}")
    said = on_ranks(ranks, attempt, str(tmp_path), str(ranks), *options, f"run.dir={tmp_path}/sound")
    assert said == ["finished"] * ranks, "a false alarm"
    chosen = f"{{rank: {rank}, state: {state}}}"
    flip = f"hooks=[{{type: 'tests.features.integrity.test_corruption:Flip', options: {chosen}}}]"
    # A weight flips just before a save, which is where that is found. All else is found at the next comparison.
    done, good = (4, 3) if state == "weight" else (LAST, 4)
    said = on_ranks(ranks, attempt, str(tmp_path), str(ranks), *options, flip)
    assert len(set(said)) == 1 and said[0].startswith(f"Corruption: after {done} updates "), said
    assert f"({state})" in said[0] or state != "weight"
    entry = next(each for each in read_ledger(tmp_path / "run" / "ledger.jsonl") if each["event"] == "corruption")
    assert (entry["ranks"], entry["certain"], entry["step"], entry["good"]) == (named, certain, done - 1, good)
    saved = [each.name for each in (tmp_path / "run" / "checkpoints").iterdir() if each.name.startswith("step_")]
    assert saved == ["step_00000004"] * (done > 4)


def test_every_bit_counts() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        values = torch.randn(9000, generator=torch.Generator().manual_seed(0)).to(dtype)
        before = hash_bits(values)
        size = values.element_size() * 8
        bits = values.view({16: torch.int16, 32: torch.int32, 64: torch.int64}[size])
        for place in (0, 1, 4095, 4096, 8191, 8192, 8999):
            for bit in range(size):
                mask = 1 << bit if bit < size - 1 else -(1 << bit)
                bits[place] ^= mask
                assert hash_bits(values) != before
                bits[place] ^= mask
        assert hash_bits(values) == before == hash_bits(values.clone().view(90, 100))


@pytest.mark.parametrize("size", [4096, 9001, (1 << 22) + 12_345])
def test_a_hash_does_not_depend_on_where_in_memory_values_are(size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float64):
        memory = torch.zeros(size + 8, dtype=dtype)
        values = torch.randint(0, 200, (size,), generator=torch.Generator().manual_seed(1)).to(dtype)
        found = set()
        for offset in range(8):
            place = memory[offset : offset + size]
            found.add(int(hash_bits(place.copy_(values))))
            place[size - 1] += 1
            found.add(-int(hash_bits(place)))
        assert len(found) == 2


def test_who_is_named() -> None:
    def found(*values: int) -> list[StateDifference]:
        return differences([[(7, value), (8, 0)] for value in values])

    assert found(1, 1, 1) == [] and guilty([]) == ([], False)
    assert guilty(found(1, 2, 1)) == ([1], True) and guilty(found(2, 1, 1, 3)) == ([0, 1, 2, 3], False)
    assert guilty(found(1, 2)) == ([0, 1], False)
    pair = differences([[(1, 5), (2, 5)], [(1, 5), (2, 6)], [(1, 6)]])  # a pair, and a majority elsewhere
    assert guilty(pair) == ([2], True)


def test_an_exit_status_of_its_own(capsys: pytest.CaptureFixture) -> None:
    from megatron.features.integrity.part import Corruption

    def fail() -> None:
        raise Corruption("rank 3 holds other bits", 5)

    assert guarded(fail) == CORRUPT == 17
    assert "rank 3 holds other bits" in capsys.readouterr().err
    with pytest.raises(RuntimeError):
        guarded(lambda: (_ for _ in ()).throw(RuntimeError("another")))
