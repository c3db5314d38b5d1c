"""Spikes in whole runs: a bad batch is planted in a file of tokens. A policy's result is compared with a run on a file
that never had it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from megatron.data.provenance import Provenance, run_config, step_hash
from megatron.data.skipped_batches import LeftOut
from megatron.data.token_file import TokenFileWriter
from megatron.report.curve import History
from megatron.report.ledger import batch_hashes, left_out, read_ledger
from megatron.training.exchange import StepReport
from megatron.training.hook import Hook
from megatron.training.trainer import Trainer
from tests.selection import toured
from tests.training.test_run import job, tensors
from tests.workers import run as on_ranks

STEPS, BATCH, LENGTH, BAD = 20, 4, 16, 11
YAML = """
model: {layers: "(attention/mlp) x2", hidden_size: 16, vocab_size: 64, attention: {heads: 2}}
training: {steps: 20, sequence_length: 16, micro_batch_size: 1, global_batch_size: 4}
optimizer: {lr: 1e-2, gradient_clipping: 1.0}
schedule: {type: constant, warmup_steps: 0}
data: {order: sequential}
tokenizer: {type: none}
evaluation: {at_end: false}
checkpoint: {every: 3}
logging: {console: quiet, curve: false}
spikes: {window: 10, sigma: 6, back: 1, leave_out: 3, limit: 2}
"""


def write(folder: Path, batches: list[int], bad: tuple[int, ...] = (BAD,)) -> str:
    """A file of these batches, in which each row counts upwards from a drawn place. Bad samples are noise of tokens
    that no other has."""
    rows = []
    for batch in batches:
        draw = np.random.default_rng(batch)
        for start in draw.integers(0, 8, BATCH):
            row = (start + np.arange(LENGTH + 1)) % 8
            rows.append(draw.integers(32, 64, LENGTH + 1) if batch in bad else row)
    path = folder / f"tokens_{len(batches)}"
    with TokenFileWriter(path, np.uint16) as file:
        for row in rows:
            file.append(row.astype(np.uint16))
    return str(path)


def train(folder: Path, name: str, path: str, *overrides: str, ranks: int = 1) -> list[dict]:
    (folder / "tiny.yml").write_text(YAML)
    options = (f"run.dir={folder}/{name}", f"data.train={path}", *overrides)
    return [line for line in on_ranks(ranks, partial(job), str(folder), ranks, *options)[0] if "loss" in line]


def same(folder: Path, one: str, at: int, other: str, then: int) -> None:
    """Weights and moments are equal to the last bit."""
    ours, theirs = tensors(folder, at, one), tensors(folder, then, other)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    different = [key for key in ours if not torch.equal(ours[key], theirs[key])]
    assert not different


def losses(lines: list[dict]) -> list[float]:
    return [line["loss"] for line in lines]


# One process, the pipeline and ZeRO 3 reach the optimizer by other code. The rest differ little from these.
OFTEN = ("one", "pipeline, zero 1", "zero 3", "zero 1, bf16")


def rarely(layouts: dict) -> list:
    """All layouts, most of them for `-m slow`."""
    return [each if each in OFTEN else pytest.param(each, marks=pytest.mark.slow) for each in layouts]


ROLLBACKS = {"one": (1, ()), "pipeline": (2, ("parallel.pipeline=2", "zero.stage=1")), "zero 3": (2, ("zero.stage=3",))}


@pytest.mark.parametrize("layout", toured(rarely(ROLLBACKS)))
def test_a_rollback_equals_data_without_these_batches(layout: str, tmp_path: Path) -> None:
    ranks, options = ROLLBACKS[layout]
    poisoned, clean = list(range(30)), [each for each in range(30) if not BAD - 1 <= each < BAD + 2]
    dirty = write(tmp_path, poisoned)
    found = train(tmp_path, "run", dirty, *options, "spikes.action=rollback", "training.stop_at_step=15", ranks=ranks)
    found = train(tmp_path, "run", dirty, *options, "spikes.action=rollback", ranks=ranks)  # resumed after it
    expected = train(tmp_path, "clean", write(tmp_path, clean), *options, ranks=ranks)
    assert losses(found) == losses(expected)
    same(tmp_path, "run", STEPS, "clean", STEPS)
    ledger = tmp_path / "run" / "ledger.jsonl"
    events = {entry["event"]: entry for entry in read_ledger(ledger)}
    assert events["spike"]["step"] == BAD and events["spike"]["action"] == "rollback"
    assert events["rollback"]["to"] == 9 and events["rollback"]["left_out"] == [[BAD - 1, 3]] == left_out(ledger)
    # The training is a function of the configuration and the ledger.
    provenance = Provenance(run_config(tmp_path / "run"), left_out=LeftOut.of(left_out(ledger)))
    for step, written in batch_hashes(ledger).items():
        assert f"{step_hash(provenance.step(step)):016x}" == written
    source = provenance.source(dirty)
    assert provenance.seen(source, BAD * BATCH) == [] and provenance.seen(source, 13 * BATCH) == [(10, 0)]
    # Elsewhere only the configuration says it.
    if ranks == 1:
        again = train(tmp_path, "again", dirty, f"data.left_out=[{{step: {BAD - 1}, batches: 3}}]")
        assert losses(again) == losses(expected)
    abandoned = History.read(tmp_path / "run" / "metrics.jsonl").abandoned
    assert [[step for step, _ in branch] for branch in abandoned] == [[9, 10, BAD]]


SKIPS = {
    "one": (1, ()),
    "tensor": (2, ("parallel.tensor=2", "zero.stage=0")),
    "pipeline": (2, ("parallel.pipeline=2", "zero.stage=0")),
    "pipeline, zero 1": (2, ("parallel.pipeline=2", "zero.stage=1", "precision=bf16")),
    "zero 1": (2, ("zero.stage=1",)),
    "zero 2": (2, ("zero.stage=2",)),
    "zero 3": (2, ("zero.stage=3",)),
}


@pytest.mark.parametrize("layout", toured(rarely(SKIPS)))
def test_a_skipped_update_never_was(layout: str, tmp_path: Path) -> None:
    ranks, options = SKIPS[layout]
    options = (*options, "checkpoint.every=1", "training.weight_average=0.9")
    path = write(tmp_path, list(range(STEPS)))
    found = train(tmp_path, "run", path, *options, "spikes.action=skip", ranks=ranks)
    same(tmp_path, "run", BAD, "run", BAD + 1)
    clean = write(tmp_path, [each for each in range(STEPS) if each != BAD])
    expected = train(tmp_path, "clean", clean, *options, f"training.steps={STEPS - 1}", ranks=ranks)
    assert losses(found)[:BAD] + losses(found)[BAD + 1 :] == losses(expected)
    same(tmp_path, "run", STEPS, "clean", STEPS - 1)
    meta = [tmp_path / name / "checkpoints" / f"step_{at:08d}" for name, at in (("run", STEPS), ("clean", STEPS - 1))]
    assert counters(meta[0]) == counters(meta[1]) == {"step": STEPS - 1.0}
    if layout != "one" and "bf16" not in str(options):
        alone = train(tmp_path, "alone", path, "spikes.action=skip")
        assert losses(found) == pytest.approx(losses(alone), rel=1e-5)


def counters(path: Path) -> dict:
    from megatron.checkpoint import open_checkpoint

    return open_checkpoint(path).meta.optimizer


@pytest.mark.tour
def test_a_decision_does_not_depend_on_a_restart(tmp_path: Path) -> None:
    """The window is part of the checkpoint: a run that is resumed just before the spike sees it as well."""
    path = write(tmp_path, list(range(STEPS)))
    whole = train(tmp_path, "whole", path, "spikes.action=skip", "spikes.limit=1")
    train(tmp_path, "parts", path, "spikes.action=skip", f"training.stop_at_step={BAD - 1}")
    assert losses(train(tmp_path, "parts", path, "spikes.action=skip")) == losses(whole)
    same(tmp_path, "whole", STEPS, "parts", STEPS)
    spikes = [
        [json.loads(line) for line in (tmp_path / name / "ledger.jsonl").read_text().splitlines() if '"spike"' in line]
        for name in ("whole", "parts")
    ]
    assert [[(e["step"], e["value"], e["limit"]) for e in found] for found in spikes] == [
        [(BAD, spikes[0][0]["value"], spikes[0][0]["limit"])]
    ] * 2


class Norms(Hook):
    """Each rank writes the gradient norms that it goes by, to the last digit."""

    def __init__(self, folder: str) -> None:
        self.folder, self.norms = Path(folder), list[str]()

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        self.norms.append(repr(report.grad_norm))

    def on_end(self, trainer: Trainer) -> None:
        early = trainer.engine.parts["spikes"].begin_to_meet is not None
        (self.folder / f"norms_{early}_{trainer.mesh.rank}").write_text("\n".join(self.norms))


def job_at_the_gate(*arguments) -> list[dict]:
    """The ranks meet where they decide, and go by the norm of the first."""
    with mock.patch("megatron.features.spikes.hook.meets_early", lambda *_: False):
        return job(*arguments)


ALIKE = {
    "zero 0": (2, ()),
    "zero 0, context": (2, ("parallel.context=2",)),
    "zero 0, bf16": (2, ("precision=bf16",)),
    "zero 1": (4, ("zero.stage=1",)),
    "zero 2": (4, ("zero.stage=2", "training.micro_batch_size=1")),
    "zero 3": (2, ("zero.stage=3",)),
}


@pytest.mark.parametrize("layout", ["zero 0", *(pytest.param(each, marks=pytest.mark.slow) for each in [*ALIKE][1:])])
@pytest.mark.parametrize("action", ["skip", pytest.param("clip", marks=pytest.mark.slow)])
def test_numbers_sent_before_the_gradients_decide_as_those_at_the_gate(
    layout: str, action: str, tmp_path: Path
) -> None:
    """Every rank has the same norm to the last bit, and the runs are one."""
    ranks, options = ALIKE[layout]
    path, lines = write(tmp_path, list(range(STEPS))), {}
    (tmp_path / "tiny.yml").write_text(YAML)
    hook = f"hooks=[{{type: 'tests.features.spikes.test_spikes:Norms', options: {{folder: '{tmp_path}'}}}}]"
    options = (f"data.train={path}", *options, f"spikes.action={action}", "spikes.clip.warmup=5", hook)
    for name, what in (("early", job), ("gate", job_at_the_gate)):
        own = on_ranks(ranks, what, str(tmp_path), ranks, f"run.dir={tmp_path}/{name}", *options)[0]
        lines[name] = [(line["loss"], line["grad_norm"], line["batch_hash"]) for line in own if "loss" in line]
    assert lines["early"] == lines["gate"] and len(lines["gate"]) == STEPS
    same(tmp_path, "early", STEPS, "gate", STEPS)
    found = [read_ledger(tmp_path / name / "ledger.jsonl") for name in ("early", "gate")]
    spikes = [[(e["step"], e["value"], e["limit"]) for e in each if e["event"] == "spike"] for each in found]
    assert spikes[0] == spikes[1] and BAD in [step for step, *_ in spikes[0]]
    norms = {(tmp_path / f"norms_{early}_{rank}").read_text() for early in (True, False) for rank in range(ranks)}
    assert len(norms) == 1 and len(norms.pop().splitlines()) == STEPS


class Nan(Hook):
    """Makes a gradient no number in one step."""

    def before_step(self, trainer: Trainer, step: int) -> None:
        if step == BAD:
            parameter = next(trainer.engine.module.parameters())
            self._handle = parameter.register_hook(lambda gradient: gradient * float("nan"))

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        if step == BAD:
            self._handle.remove()


def attempt(*arguments: str) -> str:
    try:
        job(arguments[0], int(arguments[1]), *arguments[2:])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "finished"


NAN = {
    "one": (1, ()),
    "zero 1": (2, ("zero.stage=1",)),
    "zero 1, bf16": (2, ("zero.stage=1", "precision=bf16")),
    "zero 3": (2, ("zero.stage=3",)),
    "pipeline, bf16": (2, ("parallel.pipeline=2", "zero.stage=1", "precision=bf16")),
}


@pytest.mark.parametrize("layout", toured(rarely(NAN)))
def test_gradients_that_are_no_numbers(layout: str, tmp_path: Path) -> None:
    """DeepSpeed leaves such an update out by itself under ZeRO. Here that is no overflow of fp16, and is not silent."""
    ranks, options = NAN[layout]
    path = write(tmp_path, list(range(STEPS)), bad=())
    options = (*options, "hooks=['tests.features.spikes.test_spikes:Nan']")
    found = train(tmp_path, "run", path, *options, "spikes.non_finite=skip", ranks=ranks)
    clean = write(tmp_path, [each for each in range(STEPS) if each != BAD], bad=())
    expected = train(tmp_path, "clean", clean, *options[:-1], f"training.steps={STEPS - 1}", ranks=ranks)
    assert losses(found)[:BAD] + losses(found)[BAD + 1 :] == losses(expected)
    same(tmp_path, "run", STEPS, "clean", STEPS - 1)
    options = (f"run.dir={tmp_path}/stop", f"data.train={path}", *options)
    said = on_ranks(ranks, attempt, str(tmp_path), str(ranks), *options)
    assert all(text.startswith("NonFinite: ") and f"at step {BAD} " in text for text in said), said


class NanOnce(Nan):
    """As long as there is a file with the rank's number."""

    def __init__(self, folder: str) -> None:
        self.folder, self.struck = Path(folder), False

    def before_step(self, trainer: Trainer, step: int) -> None:
        file = self.folder / str(trainer.mesh.rank)
        if step == BAD and file.exists():
            file.unlink()
            self.struck = True
            super().before_step(trainer, step)

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        if self.struck:
            super().after_step(trainer, step, report)


@pytest.mark.tour
@pytest.mark.parametrize("layout", ["one", pytest.param("zero 1, bf16", marks=pytest.mark.slow)])
def test_back_from_gradients_that_are_no_numbers(layout: str, tmp_path: Path) -> None:
    """As from a spike: the run ends like one whose data do not have these batches."""
    ranks, options = NAN[layout]
    for rank in range(ranks):
        (tmp_path / str(rank)).touch()
    hook = {"type": "tests.features.spikes.test_spikes:NanOnce", "options": {"folder": str(tmp_path)}}
    path = write(tmp_path, list(range(30)), bad=())
    found = train(
        tmp_path, "run", path, *options, f"hooks={json.dumps([hook])}", "spikes.non_finite=rollback", ranks=ranks
    )
    clean = write(tmp_path, [each for each in range(30) if not BAD - 1 <= each < BAD + 2], bad=())
    expected = train(tmp_path, "clean", clean, *options, ranks=ranks)
    assert losses(found) == losses(expected)
    same(tmp_path, "run", STEPS, "clean", STEPS)
    ledger = tmp_path / "run" / "ledger.jsonl"
    events = {entry["event"]: entry for entry in read_ledger(ledger)}
    assert events["spike"]["step"] == BAD and events["spike"]["limit"] is None
    assert events["rollback"]["to"] == 9 and left_out(ledger) == [[BAD - 1, 3]]


CLIPS = {"tensor, zero 0": (2, ("parallel.tensor=2", "zero.stage=0")), "zero 2": (2, ("zero.stage=2",))}


def test_clipping_is_that_of_one_process(tmp_path: Path) -> None:
    """A gradient enters with the norm that the rule says: with plain gradient descent, the weights move by it times the
    learning rate."""
    path = write(tmp_path, list(range(STEPS)))
    clip = ("spikes.action=clip", "spikes.clip.warmup=6", "spikes.clip.z=1.0", "checkpoint.every=1")
    descent = ("optimizer.type=sgd", "optimizer.momentum=0.0", "optimizer.weight_decay=0.0", "optimizer.lr=0.5")
    clip = (*clip, "optimizer.gradient_clipping=100.0")
    alone = train(tmp_path, "alone", path, *clip, *descent)
    spikes = {e["step"]: e for e in read_ledger(tmp_path / "alone" / "ledger.jsonl") if e["event"] == "spike"}
    assert spikes
    for step, spike in spikes.items():
        assert spike["limit"] < spike["value"]
        before, after = (tensors(tmp_path, each, "alone") for each in (step, step + 1))
        moved = sum(float((after[key] - before[key]).double().square().sum()) for key in before) ** 0.5
        assert moved == pytest.approx(0.5 * spike["limit"], rel=1e-4)
    for name, (ranks, options) in CLIPS.items():
        found = train(tmp_path, name, path, *clip, *descent, *options, ranks=ranks)
        assert losses(found) == pytest.approx(losses(alone), rel=1e-5)


def test_a_policy_gives_up(tmp_path: Path) -> None:
    """More spikes than the limit allows, and a rollback without a checkpoint of before."""
    (tmp_path / "tiny.yml").write_text(YAML)
    path = write(tmp_path, list(range(40)), bad=(8, 13))
    options = (f"data.train={path}", "spikes.limit=1", "spikes.window=8", f"run.dir={tmp_path}")
    (said,) = on_ranks(1, attempt, str(tmp_path), "1", *options[:-1], f"run.dir={tmp_path}/a", "spikes.action=skip")
    assert said.startswith("TooManySpikes: step 13") and "spikes.limit = 1" in said
    (said,) = on_ranks(1, attempt, str(tmp_path), "1", *options[:-1], f"run.dir={tmp_path}/b", "spikes.action=rollback")
    assert said.startswith("CannotRollBack: step 1") and "has gone back 1 times already" in said
    late = ("spikes.action=rollback", "checkpoint.every=19")
    (said,) = on_ranks(1, attempt, str(tmp_path), "1", *options[:-1], f"run.dir={tmp_path}/c", *late)
    assert said.startswith("CannotRollBack: step 8") and "no checkpoint from before" in said
