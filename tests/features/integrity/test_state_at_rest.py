"""Bits that flip where no other rank holds the same: in a rank's own state between updates, and in its gradients."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.engine.replicas import Piece
from megatron.features.integrity.part import StateAtRest
from megatron.report.ledger import read_ledger
from megatron.training.hook import Hook
from megatron.training.trainer import Trainer
from megatron.trials.inject import corrupt_gradient, flip, held
from tests.features.spikes.test_spikes import BAD, attempt
from tests.selection import toured
from tests.training.test_run import TINY
from tests.workers import run as on_ranks

LAYOUTS = {  # ranks, overrides
    "one": (1, ("zero.stage=0",)),
    "zero 0": (2, ("zero.stage=0",)),
    "zero 1": (2, ("zero.stage=1", "precision=bf16")),
    "zero 2": (2, ("zero.stage=2",)),
    "zero 3": (2, ("zero.stage=3", "precision=bf16")),
    "tensor": (2, ("parallel.tensor=2", "zero.stage=1", "precision=bf16", "parallel.sequence=true")),
    "pipeline": (2, ("parallel.pipeline=2", "zero.stage=0")),
    "pipeline, bf16": (2, ("parallel.pipeline=2", "zero.stage=1", "precision=bf16")),
}
# One process, each way in which ZeRO keeps states, and each way of cutting a model. The rest differ little from these.
OFTEN = ("one", "zero 1", "zero 3", "tensor", "pipeline, bf16")
LAST = 6
STATES = ("master", "exp_avg", "exp_avg_sq", "weight")
# States change in updates only: two micro-batches of 4 in place of four of 2.
BATCHES = ("training.micro_batch_size=4", "evaluation.every=null", f"training.steps={LAST}")
EVERY = ("training.hashes=3", "checkpoint.every=4", *BATCHES)
AUDITED = 3


class FlipHeld(Hook):
    """One bit of what the last rank holds, while it waits for the next batch."""

    def __init__(self, step: int, state: str) -> None:
        self._step, self._state = step, state

    def before_step(self, trainer: Trainer, step: int) -> None:
        if step == self._step and trainer.mesh.rank == trainer.mesh.layout.world_size - 1:
            flip(held(trainer.engine.state, self._state))


class FlipGradient(Hook):
    """One bit of one gradient of the last rank, in the first of two computations of a step.

    Args:
        summed: after ranks have summed it, or else before.
    """

    def __init__(self, summed: bool) -> None:
        self._summed = summed

    def before_step(self, trainer: Trainer, step: int) -> None:
        if step != AUDITED or trainer.mesh.rank != trainer.mesh.layout.world_size - 1:
            return
        zero = trainer.engine.deepspeed.optimizer
        if not self._summed:
            once = [True]
            next(trainer.engine.module.parameters()).register_hook(lambda g: _flipped(g) if once and once.pop() else g)
        elif trainer.config.zero.stage > 0:
            _in_shares(zero)
        else:
            corrupt_gradient(trainer.engine.optimizer)


def _flipped(gradient: torch.Tensor) -> torch.Tensor:
    other = gradient.clone()
    flat = other.view(-1)
    flip(flat[int(flat.abs().argmax()) :])
    return other


def _in_shares(zero: object) -> None:
    """Before ZeRO takes the norm, once."""
    update = zero.step

    def step(*arguments: object, **options: object) -> object:
        zero.step = update
        flats = getattr(zero, "fp32_groups_gradient_flat_partition", None)  # the bf16 optimizer's
        shares = flats or [each for group in zero.averaged_gradients.values() for each in group]
        share = max(shares, key=torch.Tensor.numel)
        share.copy_(_flipped(share))
        return update(*arguments, **options)

    zero.step = step


def flips(name: str, **options: object) -> str:
    said = ", ".join(f"{key}: {str(value).lower()}" for key, value in options.items())
    return f"hooks=[{{type: 'tests.features.integrity.test_state_at_rest:{name}', options: {{{said}}}}}]"


def corruption(folder: Path) -> dict:
    (found,) = [each for each in read_ledger(folder / "run" / "ledger.jsonl") if each["event"] == "corruption"]
    return found


def saved(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "run" / "checkpoints").iterdir() if each.name.startswith("step_"))


@pytest.mark.parametrize(
    "layout", toured(pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in LAYOUTS)
)
def test_a_bit_that_flips_in_any_state_is_found_and_its_rank_named(layout: str, tmp_path: Path) -> None:
    ranks, options = LAYOUTS[layout]
    options = (*options, *EVERY, "training.hashes_at_rest=always")
    for state in STATES:
        if state == "weight" and "zero.stage=0" in options:
            continue  # it is the master
        folder = tmp_path / state
        folder.mkdir()
        (folder / "tiny.yml").write_text(TINY)
        said = on_ranks(ranks, attempt, str(folder), str(ranks), *options, flips("FlipHeld", step=4, state=state))
        who = f"rank {ranks - 1} on "
        assert len(set(said)) == 1 and said[0].startswith(f"Corruption: until {LAST} updates were done {who}"), said
        entry = corruption(folder)
        assert (entry["ranks"], entry["certain"], entry["found"]) == ([ranks - 1], True, "rest")
        assert (entry["step"], entry["good"], len(entry["hosts"])) == (LAST - 1, 4, 1)
        assert len(entry["tensors"]) == 1 and entry["tensors"][0].endswith(f"({state})")
        assert saved(folder) == ["step_00000004"], "nothing is saved after it"


@pytest.mark.tour
def test_without_more_only_the_updates_before_a_comparison_are_watched(tmp_path: Path) -> None:
    (tmp_path / "tiny.yml").write_text(TINY)
    for step, found in ((4, False), (5, True)):
        options = ("zero.stage=1", *EVERY, f"run.dir={tmp_path}/{step}", flips("FlipHeld", step=step, state="exp_avg"))
        said = on_ranks(2, attempt, str(tmp_path), "2", *options)
        assert said[0].startswith("Corruption: until 6 updates were done rank 1 on ") == found, said
        assert found or said == ["finished"] * 2


SOUND = {
    "evaluated weights are others": (
        2,
        ("optimizer.type=schedule_free_adamw", "schedule.type=constant", "zero.stage=1"),
    ),
    "matrices": (2, ("optimizer.type=muon", "zero.stage=1")),
    "eight bits": (2, ("optimizer.type=adamw_8bit", "zero.stage=0")),
    "audits": (2, ("training.audit=2", "training.audit_action=restart", "zero.stage=2", "precision=bf16")),
    "average": (2, ("training.weight_average=0.9", "zero.stage=3")),
    "skipped updates": (
        2,
        ("zero.stage=3", "spikes.non_finite=skip", "hooks=['tests.features.spikes.test_spikes:Nan']"),
    ),
}


@pytest.mark.parametrize("run", toured(SOUND))
def test_nothing_that_a_run_does_itself_is_taken_for_a_fault(run: str, tmp_path: Path) -> None:
    ranks, options = SOUND[run]
    (tmp_path / "tiny.yml").write_text(TINY)
    always = (*options, "training.hashes=2", "training.hashes_at_rest=always", f"training.steps={BAD + 3}")
    for end in (("training.stop_at_step=4",), ()):  # and continues
        assert on_ranks(ranks, attempt, str(tmp_path), str(ranks), *always, *end) == ["finished"] * ranks


@pytest.mark.parametrize(
    "layout",
    toured([
        "zero 1",
        "zero 3",
        "tensor",
        "pipeline",
        *(pytest.param(f"zero {n}", marks=pytest.mark.slow) for n in (0, 2)),
    ]),
)
def test_a_bit_that_flips_in_a_gradient_is_found_and_its_rank_named(layout: str, tmp_path: Path) -> None:
    """In a step that is computed twice. Clipping, by a norm that all ranks share, hides no rank."""
    ranks, options = LAYOUTS[layout]
    options = (*options, f"training.audit={AUDITED + 1}", "training.audit_action=restart", "evaluation.every=null")
    for summed in (False, True):
        folder = tmp_path / str(summed)
        folder.mkdir()
        (folder / "tiny.yml").write_text(TINY)
        said = on_ranks(ranks, attempt, str(folder), str(ranks), *options, flips("FlipGradient", summed=summed))
        what = f"rank {ranks - 1} {'got' if summed else 'computed'} other gradients"
        assert len(set(said)) == 1 and said[0].startswith(
            f"Corruption: audit of step {AUDITED}: computed twice, {what}"
        ), said
        entry = corruption(folder)
        assert (entry["ranks"], entry["certain"], entry["found"]) == ([ranks - 1], True, "audit")
        assert saved(folder) == ["step_00000002"], "its update is not saved"


def test_the_rest_begins_after_an_update_and_ends_before_the_next() -> None:
    weight, average = torch.zeros(8, requires_grad=True), torch.zeros(8)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    rest = StateAtRest()
    optimizer.register_step_pre_hook(lambda *_: rest.before_update())  # as the engine calls its parts
    pieces = [Piece("w (master)", 1, weight.detach()), Piece("w (average)", 2, average)]
    rest.pieces = SimpleNamespace(find=lambda: pieces)

    def update() -> int:
        weight.grad = torch.ones(8)
        optimizer.step()
        return int(rest.count(torch.device("cpu")))

    rest.begin()
    average += 1
    assert update() == 0 and update() == 0, "an update is no fault, nor is an average that moves"
    weight.data[3] = 5.0
    assert update() == 0, "nobody watched"
    rest.begin()
    weight.data[3] = 7.0
    rest.begin()  # an update was omitted: it is the same rest
    assert update() == 1 and rest.changed() == ["w (master)"]
    assert update() == 1, "it is not forgotten until somebody asks"
    rest.begin(frozenset())
    assert rest.changed() == []
