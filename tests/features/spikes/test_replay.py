"""Steps that are computed twice: nothing changes where the machine repeats itself. Where it does not, the run reports
it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.report.ledger import read_ledger
from megatron.training.hook import Hook
from megatron.training.trainer import Trainer
from tests.features.spikes.test_spikes import BAD, STEPS, losses, same, train, write
from tests.selection import toured

LAYOUTS = {
    "one": (1, ()),
    "pipeline": (2, ("parallel.pipeline=2", "zero.stage=0")),
    "zero 1, bf16": (2, ("zero.stage=1", "precision=bf16")),
    "zero 3": (2, ("zero.stage=3",)),
    "columns": (2, ("parallel.columns=2", "model.dropout=0", "training.micro_batch_size=4")),
}


class Fault(Hook):
    """On the last rank the first (or every) forward pass of step `BAD` computes a loss that is `size` times too large.

    Args:
        once: a transient fault.
    """

    def __init__(self, size: float, once: bool) -> None:
        self._size, self._once = size, once
        self._armed = False

    def on_start(self, trainer: Trainer) -> None:
        if trainer.mesh.rank == trainer.mesh.layout.world_size - 1:
            head = next(m for m in reversed(list(trainer.engine.deepspeed.module.modules())) if _is_head(m))
            head.register_forward_hook(self._spoil)

    def before_step(self, trainer: Trainer, step: int) -> None:
        self._armed = step == BAD

    def _spoil(self, module: torch.nn.Module, inputs: object, outputs: tuple) -> tuple | None:
        if not self._armed:
            return None
        self._armed = not self._once
        return tuple(each * self._size for each in outputs)


def _is_head(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "Head"


def fault(size: float, once: bool) -> str:
    options = f"{{size: {size}, once: {str(once).lower()}}}"
    return f"hooks=[{{type: 'tests.features.spikes.test_replay:Fault', options: {options}}}]"


def events(folder: Path, name: str, event: str) -> list[dict]:
    return [each for each in read_ledger(folder / name / "ledger.jsonl") if each["event"] == event]


@pytest.mark.parametrize("layout", toured(LAYOUTS))
def test_an_audit_changes_nothing_and_sees_one_wrong_bit(layout: str, tmp_path: Path) -> None:
    ranks, options = LAYOUTS[layout]
    path = write(tmp_path, list(range(STEPS)), bad=())
    plain = train(tmp_path, "plain", path, *options, ranks=ranks)
    found = train(tmp_path, "run", path, *options, "training.audit=4", ranks=ranks)
    assert losses(found) == losses(plain)
    same(tmp_path, "run", STEPS, "plain", STEPS)
    told = events(tmp_path, "run", "audit")
    assert [each["step"] for each in told] == [3, 7, 11, 15, 19] and all(each["equal"] for each in told)
    spoilt = train(tmp_path, "spoilt", path, *options, "training.audit=4", fault(1.3, True), ranks=ranks)
    assert losses(spoilt) == losses(plain)  # the wrong one was the first, which was not used
    told = {each["step"]: each for each in events(tmp_path, "spoilt", "audit")}
    assert [step for step, each in told.items() if not each["equal"]] == [BAD]
    assert told[BAD]["losses"] == [ranks - 1], "the rank that computed it"
    assert told[BAD]["gradients"], "those that heard of it"


@pytest.mark.tour
def test_a_spike_is_told_apart_from_a_fault(tmp_path: Path) -> None:
    options = ("spikes.action=skip", "spikes.confirm=true")
    good, bad = write(tmp_path, list(range(STEPS)), bad=()), write(tmp_path, list(range(STEPS + 1)))
    plain = train(tmp_path, "plain", good)
    found = train(tmp_path, "transient", good, *options, fault(30.0, True))
    assert losses(found) == losses(plain)  # computed again, and applied
    same(tmp_path, "transient", STEPS, "plain", STEPS)
    (told,) = events(tmp_path, "transient", "replay")
    assert told["step"] == BAD and not told["repeated"] and told["losses"] == [0]
    assert not events(tmp_path, "transient", "spike")
    skipped = train(tmp_path, "skipped", bad, "spikes.action=skip")
    assert losses(train(tmp_path, "data", bad, *options)) == losses(skipped)
    same(tmp_path, "data", STEPS, "skipped", STEPS)
    (told,) = events(tmp_path, "data", "replay")
    assert told["step"] == BAD and told["repeated"] and not told["losses"] and not told["gradients"]
    assert [each["step"] for each in events(tmp_path, "data", "spike")] == [BAD]
