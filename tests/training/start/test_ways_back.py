"""Every way back to an earlier state, against a run that never left it."""

from __future__ import annotations

import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.hf.export import export
from megatron.checkpoint.levels import Levels
from megatron.checkpoint.read.reader import open_checkpoint
from megatron.config import load
from megatron.config.registry import INSIDE, OPTIMIZER
from megatron.report.ledger import read_ledger
from megatron.testing.runs import run_on_this_rank
from megatron.training.exchange import StepReport
from megatron.training.hook import Hook
from megatron.training.trainer import Trainer
from tests.selection import toured
from tests.training.test_run import job, tensors
from tests.workers import run as on_ranks
from tools.fork import main

YAML = """
model: {layers: "(attention/mlp) x1", hidden_size: 32, vocab_size: 64, attention: {heads: 2}}
training: {steps: 6, sequence_length: 16, micro_batch_size: 1, global_batch_size: 4}
optimizer: {lr: 1e-2, gradient_clipping: 1.0}
schedule: {type: constant, warmup_steps: 0}
data: {synthetic: copy}
tokenizer: {type: none}
evaluation: {at_end: false}
checkpoint: {every: 2, steps: [0]}
logging: {console: quiet, curve: false}
"""
# A norm a million times as large is a spike whatever the other norms are, and none of the others is.
SPIKES = "spikes={action: rollback, watch: grad_norm, window: 4, sigma: 1.0e+4, limit: 1, back: 1, leave_out: 2}"
STRUCK = 3  # the first step with more than half a window of norms before it


class Strike(Hook):
    """Multiplies gradients of one step by a million, once: as long as there is a file with the rank's number."""

    def __init__(self, folder: str, step: int = STRUCK) -> None:
        self.folder, self.step, self.handles = Path(folder), step, list[Any]()

    def before_step(self, trainer: Trainer, step: int) -> None:
        file = self.folder / str(trainer.mesh.rank)
        if step == self.step and file.exists():
            file.unlink()
            self.handles = [each.register_hook(lambda g: g * 1e6) for each in trainer.engine.module.parameters()]

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        while self.handles:
            self.handles.pop().remove()


def strike(folder: Path, ranks: int, step: int = STRUCK) -> str:
    """The override that has a run struck."""
    for rank in range(ranks):
        (folder / str(rank)).touch()
    return (
        f"hooks=[{{type: 'tests.training.start.test_ways_back:Strike', options: {{folder: '{folder}', step: {step}}}}}]"
    )


def train(folder: Path, name: str, *overrides: str, ranks: int = 1) -> list[tuple]:
    """Step, loss, norm and batch of each step of one start of a run, the last one where a step was repeated."""
    (folder / "tiny.yml").write_text(YAML)
    lines = on_ranks(ranks, partial(job), str(folder), ranks, f"run.dir={folder}/{name}", *overrides)[0]
    found = {line["step"]: line for line in lines if "loss" in line}
    return [(step, line["loss"], line["grad_norm"], line["batch_hash"]) for step, line in sorted(found.items())]


def left_out(entry: dict) -> str:
    """The override that omits the same batches from the beginning."""
    return f"data.left_out={[dict(zip(('step', 'batches'), pair)) for pair in entry['left_out']]}"


def same(folder: Path, one: str, other: str, step: int) -> None:
    """Two checkpoints of a step are equal to the last bit, with what counts next to tensors."""
    ours, theirs = tensors(folder, step, one), tensors(folder, step, other)
    different = [key for key in ours if not torch.equal(ours[key], theirs[key])]
    assert ours.keys() == theirs.keys() and not different
    assert counters(folder, one, step) == counters(folder, other, step)


def counters(folder: Path, name: str, step: int) -> dict:
    meta = json.loads((folder / name / "checkpoints" / f"step_{step:08d}" / "meta.json").read_text())
    return meta["optimizer"] | meta["loss_scaler"]


WRITTEN = sorted(INSIDE[OPTIMIZER])
OFTEN = ("adamw", "muon", "schedule_free_adamw", "adamw_8bit")


@pytest.mark.parametrize(
    "optimizer", toured(each if each in OFTEN else pytest.param(each, marks=pytest.mark.slow) for each in WRITTEN)
)
def test_back_to_the_beginning(optimizer: str, tmp_path: Path) -> None:
    """The optimizer has counted nothing there: its bias corrections begin again."""
    options = (f"optimizer.type={optimizer}", "checkpoint.every=6")
    found = train(tmp_path, "back", *options, SPIKES, strike(tmp_path, 1))
    (back,) = [each for each in read_ledger(tmp_path / "back" / "ledger.jsonl") if each["event"] == "rollback"]
    assert (back["to"], back["left_out"]) == (0, [[STRUCK - 1, 2]])
    expected = train(tmp_path, "never", *options, left_out(back))
    assert found == expected
    for step in (0, 6):
        same(tmp_path, "back", "never", step)


def sent(wire: str) -> tuple[str, ...]:
    """The overrides of a run on two ranks."""
    return (f"parallel.communication.compress.data={wire}", "zero.stage=1", "training.weight_average=0.5")


@pytest.mark.parametrize("wire", toured(["int8_block", "top_k"]))
def test_what_was_left_out_of_a_skipped_step_is_not_sent_later(wire: str, tmp_path: Path) -> None:
    """The numbers of all other steps equal a run without it."""
    skip = "spikes={action: skip, watch: grad_norm, window: 4, sigma: 1.0e+4}"
    found = train(tmp_path, "skipped", *sent(wire), skip, strike(tmp_path, 2), ranks=2)
    confirmed = train(tmp_path, "twice", *sent(wire), skip, "spikes.confirm=true", strike(tmp_path, 2), ranks=2)
    never = (f"data.left_out=[{{step: {STRUCK}, batches: 1}}]", "training.steps=5", "checkpoint.every=5")
    expected = train(tmp_path, "never", *sent(wire), *never, ranks=2)
    kept = [line[1:] for line in found if line[0] != STRUCK]
    assert kept == [line[1:] for line in expected] and confirmed == found
    ours, theirs = tensors(tmp_path, 6, "skipped"), tensors(tmp_path, 5, "never")
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


@pytest.mark.parametrize("wire", toured(["int8_block", "top_k"]))
def test_a_return_begins_with_nothing_left_out(wire: str, tmp_path: Path) -> None:
    """As a start from the same checkpoint does."""
    train(tmp_path, "back", *sent(wire), SPIKES, strike(tmp_path, 2), ranks=2)
    (back,) = [each for each in read_ledger(tmp_path / "back" / "ledger.jsonl") if each["event"] == "rollback"]
    assert back["to"] == 2
    train(tmp_path, "never", *sent(wire), left_out(back), "training.stop_at_step=2", ranks=2)
    train(tmp_path, "never", *sent(wire), left_out(back), ranks=2)
    same(tmp_path, "back", "never", 6)


@pytest.mark.parametrize("wire", toured(["none", "top_k"]))
def test_passes_without_an_update_change_no_bit(wire: str, tmp_path: Path) -> None:
    """The noise scale and audits, and an audit of a healthy run finds nothing."""
    expected = train(tmp_path, "plain", *sent(wire), ranks=2)
    watched = ("logging.noise_scale=1", "training.audit=2", "training.audit_action=restart")
    assert train(tmp_path, "watched", *sent(wire), *watched, ranks=2) == expected
    same(tmp_path, "plain", "watched", 6)
    audits = [each for each in read_ledger(tmp_path / "watched" / "ledger.jsonl") if each["event"] == "audit"]
    assert len(audits) == 3 and all(each["equal"] for each in audits)


TRUNK = ("schedule.type=constant", "training.steps=8")


@pytest.mark.tour
def test_what_comes_from_a_trunk_that_went_back_reads_its_batches(tmp_path: Path) -> None:
    """A branch and a run elsewhere: the checkpoint was saved before the rollback."""
    options = (*TRUNK, SPIKES, strike(tmp_path, 1))
    trunk = train(tmp_path, "trunk", *options)
    (back,) = [each for each in read_ledger(tmp_path / "trunk" / "ledger.jsonl") if each["event"] == "rollback"]
    assert (back["to"], back["left_out"]) == (2, [[2, 2]])
    at = tmp_path / "trunk" / "checkpoints" / "step_00000002"
    elsewhere = train(tmp_path, "elsewhere", *TRUNK, SPIKES, f"checkpoint.resume={at}")
    assert elsewhere == trunk[2:]
    same(tmp_path, "trunk", "elsewhere", 8)
    words = ["--at", "2", "--steps", "6", "--output", str(tmp_path / "branch")]
    assert main([str(tmp_path / "trunk"), *words]) == 0
    file = str(tmp_path / "branch" / "fork.yml")
    for stop in ("training.stop_at_step=3", "training.stop_at_step=5"):  # the second begins from the branch's own
        branch = on_ranks(1, alone, file, stop)[0]
    read = {line["step"]: line["batch_hash"] for line in branch if "loss" in line}
    assert read == {step: batch for step, *_, batch in trunk if step in read} and {2, 3, 4} <= read.keys()


def alone(file: str, *overrides: str, ranks: int = 1) -> list[dict]:
    """A file as it is, with nothing from `tiny.yml`."""
    return run_on_this_rank(load([file], overrides, ranks=ranks), ranks)


WAYS = ("skip", "rollback", "watch", "stop")


@pytest.mark.parametrize(
    "seed", toured(pytest.param(each, marks=pytest.mark.slow) if each > 3 else each for each in range(40))
)
def test_a_drawn_way_back(seed: int, tmp_path: Path) -> None:
    """Any optimizer, average, form of gradients and ZeRO stage. Two ranks."""
    draw = random.Random(seed)
    way, optimizer = WAYS[seed % len(WAYS)], draw.choice(WRITTEN)
    stage = draw.choice([0, 1, 2, 3])
    wire = draw.choice(["none", "bf16", "int8_block", "top_k"]) if stage < 3 else "none"
    average = "null" if optimizer == "schedule_free_adamw" else draw.choice(["null", "0.5"])
    options = (f"optimizer.type={optimizer}", f"zero.stage={stage}", f"training.weight_average={average}")
    options = (*options, f"parallel.communication.compress.data={wire}")
    if way == "skip":
        skip = "spikes={action: skip, watch: grad_norm, window: 4, sigma: 1.0e+4}"
        found = train(tmp_path, "found", *options, skip, strike(tmp_path, 2), ranks=2)
        never = (f"data.left_out=[{{step: {STRUCK}, batches: 1}}]", "training.steps=5", "checkpoint.every=5")
        expected = train(tmp_path, "never", *options, *never, *length_of(optimizer), ranks=2)
        assert [line[1:] for line in found if line[0] != STRUCK] == [line[1:] for line in expected]
        return
    if way == "rollback":
        train(tmp_path, "found", *options, SPIKES, strike(tmp_path, 2), ranks=2)
        (back,) = [each for each in read_ledger(tmp_path / "found" / "ledger.jsonl") if each["event"] == "rollback"]
        options = (*options, left_out(back))
    elif way == "watch":
        train(tmp_path, "found", *options, "training.audit=2", "logging.noise_scale=1", ranks=2)
    else:
        train(tmp_path, "found", *options, "training.stop_at_step=2", ranks=2)
        train(tmp_path, "found", *options, ranks=2)
    if way in ("rollback", "stop") and wire in ("int8_block", "top_k"):  # feedback begins at zero at each start
        train(tmp_path, "never", *options, "training.stop_at_step=2", ranks=2)
    train(tmp_path, "never", *options, ranks=2)
    same(tmp_path, "found", "never", 6)


def length_of(optimizer: str) -> tuple[str, ...]:
    """Numbers that an optimizer derives from the length of the run stay at six steps."""
    return ("optimizer.options.warmup=6",) if optimizer == "ademamix" else ()


def events(run: Path, event: str) -> list[dict]:
    return [each for each in read_ledger(run / "ledger.jsonl") if each["event"] == event]


def damaged(folder: Path, options: tuple[str, ...], draw: random.Random) -> None:
    """The newest checkpoint is damaged anywhere: the run takes the one before."""
    expected = train(folder, "never", *options, ranks=2)
    train(folder, "found", *options, "training.stop_at_step=4", ranks=2)
    newest = folder / "found" / "checkpoints" / "step_00000004"
    file = draw.choice(sorted(each for each in newest.rglob("*") if each.stat().st_size and each.is_file()))
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content[: draw.randrange(len(content))] if draw.random() < 0.5 else content)
    assert train(folder, "found", *options, ranks=2) == expected
    (resumed,) = events(folder / "found", "resume")
    assert resumed["step"] == 2 and [Path(each).name for each in resumed["skipped"]] == ["step_00000004"]
    same(folder, "found", "never", 6)


def from_a_level(folder: Path, options: tuple[str, ...], draw: random.Random) -> None:
    """Only a copy in memory, or on a disk of the host, is left of a run that was killed."""
    place = draw.choice(["memory", "disk"])
    level = f"checkpoint.levels=[{{place: {place}, path: '{folder}/level', every: {draw.choice([1, 3])}}}]"
    options = (*options, "checkpoint.every=null", "checkpoint.steps=[]")
    expected = train(folder, "never", *options, ranks=2)
    on_ranks(2, killed, str(folder), f"run.dir={folder}/found", *options, level, "training.stop_at_step=4")
    shutil.rmtree(folder / "found" / "checkpoints" / "step_00000004")
    assert train(folder, "found", *options, level, ranks=2) == expected
    (resumed,) = events(folder / "found", "resume")
    assert resumed["checkpoint"].startswith(place)
    same(folder, "found", "never", 6)


def killed(folder: str, *overrides: str) -> None:
    """A start whose copies outlive it, as after a kill."""
    remove = Levels.remove
    try:
        Levels.remove = lambda self: None  # type: ignore[method-assign]
        job(folder, 2, *overrides)
    finally:
        Levels.remove = remove  # type: ignore[method-assign]


def struck(folder: Path, options: tuple[str, ...]) -> tuple[list[tuple], str]:
    """A trunk that goes back to step 2: its lines, and the override for a run that skips the same batches."""
    lines = train(folder, "trunk", *options, SPIKES, strike(folder, 2), ranks=2)
    (back,) = events(folder / "trunk", "rollback")
    assert back["to"] == 2
    return lines, left_out(back)


def forked(folder: Path, options: tuple[str, ...], draw: random.Random) -> None:
    """A branch ends as one run does whose rate decays from there on. Its trunk may have gone back."""
    skipped: tuple[str, ...] = ()
    if draw.random() < 0.5:
        skipped = (struck(folder, options)[1],)
    else:
        train(folder, "trunk", *options, ranks=2)
    decay = ("schedule.type=wsd", "schedule.steps=6", "schedule.decay_steps=4")
    expected = train(folder, "never", *options, *decay, *skipped, ranks=2)
    words = ["--at", "2", "--steps", "4", "--output", str(folder / "branch")]
    assert main([str(folder / "trunk"), *words]) == 0
    file = str(folder / "branch" / "fork.yml")
    if draw.random() < 0.5:
        on_ranks(2, partial(alone, ranks=2), file, "training.stop_at_step=4")
    lines = on_ranks(2, partial(alone, ranks=2), file)[0]
    found = {each["step"]: each for each in lines if "loss" in each}
    assert [(s, each["loss"], each["grad_norm"], each["batch_hash"]) for s, each in sorted(found.items())] == expected[
        2:
    ]
    same(folder, "branch", "never", 6)


def imported(folder: Path, options: tuple[str, ...], draw: random.Random) -> None:
    """Weights that went to Hugging Face's format and back begin the same run as the checkpoint's."""
    options = (*options, "model.mlp.bias=true")
    train(folder, "trunk", *options, ranks=2)
    at = folder / "trunk" / "checkpoints" / f"step_{draw.choice([2, 4, 6]):08d}"
    export(open_checkpoint(at), folder / "theirs", dtype="float32")
    expected = train(folder, "never", *options, f"checkpoint.initialize_from={at}", ranks=2)
    assert train(folder, "found", *options, f"checkpoint.initialize_from={folder}/theirs", ranks=2) == expected
    same(folder, "found", "never", 6)


LAYOUTS = {
    "one rank": (1, ()),
    "other stage": (2, ()),
    "tensor": (2, ("parallel.tensor=2",)),
    "pipeline": (2, ("parallel.pipeline=2",)),
}


def on_another_layout(folder: Path, options: tuple[str, ...], draw: random.Random) -> None:
    """The batches are the same, and losses differ by rounding."""
    options = (*options, "model.layers=(attention/mlp) x2")
    (ranks, other), stage = LAYOUTS[draw.choice(sorted(LAYOUTS))], draw.choice([0, 1, 2, 3])
    other = (*other, f"zero.stage={min(stage, 1) if 'parallel.pipeline=2' in other else stage}")
    expected = train(folder, "never", *options, ranks=2)
    train(folder, "found", *options, "training.stop_at_step=2", ranks=2)
    found = train(folder, "found", *options, *other, ranks=ranks)
    assert [(step, batch) for step, *_, batch in found] == [(step, batch) for step, *_, batch in expected]
    assert [line[1] for line in found] == pytest.approx([line[1] for line in expected], rel=1e-4)


def from_elsewhere(folder: Path, options: tuple[str, ...], draw: random.Random) -> None:
    """Of a URL or path, in a store or in a run's folder: the checkpoint was saved before its run went back to it."""
    store = f"file://{folder}/bucket"
    options = (*options, "schedule.type=constant")
    found, skipped = struck(
        folder, (*options, f"checkpoint.levels=[{{place: store, url: '{store}', every: auto, keep: all}}]")
    )
    where = draw.choice([
        f"{store}/step_00000002",
        f"{folder}/bucket/step_00000002",
        f"file://{folder}/trunk/checkpoints/step_00000002",
        f"{folder}/trunk/checkpoints/step_00000002",
    ])
    expected = train(folder, "never", *options, skipped, ranks=2)
    assert train(folder, "found", *options, f"checkpoint.resume={where}", ranks=2) == expected[2:] == found[2:]
    same(folder, "found", "never", 6)


AGAIN = (damaged, from_a_level, forked, imported, on_another_layout, from_elsewhere)


@pytest.mark.parametrize(
    "seed", toured(pytest.param(each, marks=pytest.mark.slow) if each > 5 else each for each in range(48))
)
def test_a_drawn_way_to_begin_again(seed: int, tmp_path: Path) -> None:
    """Files that a run has left somewhere make the run that was never interrupted."""
    draw = random.Random(seed)
    optimizer = draw.choice(WRITTEN)
    average = "null" if optimizer == "schedule_free_adamw" else draw.choice(["null", "0.5"])
    options = (f"optimizer.type={optimizer}", f"zero.stage={draw.choice([0, 1, 2, 3])}")
    options = (*options, f"training.weight_average={average}", *length_of(optimizer))
    (tmp_path / "tiny.yml").write_text(YAML)
    AGAIN[seed % len(AGAIN)](tmp_path, options, draw)
