"""The loop: its numbers against a plain torch loop, bitwise resume, the order of hooks, what it writes."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers
from torch.nn import functional as F

from megatron.report.jsonl import read_lines
from megatron.report.ledger import batch_hashes, hash_text, read_ledger
from megatron.training.hook import Hook
from tests.training.settings import settings
from tests.training.toy import ToyEngine, ToyLoader, elsewhere, run, toy_trainer


def config(tmp_path, name="run", steps=12, **sections):
    base = {
        "run": {"dir": str(tmp_path / name), "name": name},
        "logging": {"console": "quiet"},
        "schedule": {"warmup_steps": 3},
        "optimizer": {"lr": 0.05},
    }
    for key, section in sections.items():
        base[key] = {**base.get(key, {}), **section}
    return settings(steps, **base)


def lines(path) -> tuple[list[dict], list[dict]]:
    records = list(read_lines(path / "metrics.jsonl"))
    return [r for r in records if "loss" in r], [r for r in records if "validation" in r]


def plain_loop(wanted):
    """The same training with only torch and transformers: losses, norms, rates, final weights."""
    engine, loader = ToyEngine(wanted), ToyLoader(wanted)
    table, head = (p.detach().clone().requires_grad_() for p in engine.parameters)
    optimizer = torch.optim.AdamW([table, head], lr=wanted.optimizer.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, 3, wanted.training.steps, min_lr_rate=0.1
    )
    rows = []
    for step in range(wanted.training.steps):
        batch = loader.step(step)
        logits = F.embedding(batch.tokens[0, :, :-1], table) @ head.T
        each = F.cross_entropy(logits.transpose(1, 2), batch.tokens[0, :, 1:], reduction="none")
        loss = (each * batch.loss_mask[0]).sum() / batch.loss_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in (table, head)))
        rows.append((loss.item(), norm, optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return rows, (table, head)


def test_metrics_are_those_of_a_plain_loop(tmp_path):
    wanted = config(tmp_path)
    trainer = toy_trainer(wanted)
    outcome = run(trainer)
    rows, weights = plain_loop(wanted)
    training, _ = lines(tmp_path / "run")
    assert (outcome.step, outcome.finished) == (12, True)
    assert [line["step"] for line in training] == list(range(12))
    for line, (loss, norm, lr) in zip(training, rows, strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert line["lr"] == pytest.approx(lr, rel=1e-12)
        assert line["tokens"] == (line["step"] + 1) * 4 * 8
        assert line["batch_hash"] == hash_text(ToyLoader(wanted).step(line["step"]).hash)
        assert line["tokens_per_second"] > 0 and line["table_norm"] > 0
        assert line["tflops"] == pytest.approx(line["tokens_per_second"] * 1000 / 1e12)
        assert line["tokens_per_second"] == pytest.approx(4 * 8 / line["step_seconds"])
        assert 0 <= line["data_seconds"] <= line["step_seconds"] and line["memory_bytes"] > 10**7
        assert "mfu" not in line
    for ours, theirs in zip(trainer.engine.parameters, weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_validation_is_the_mean_over_labels(tmp_path):
    wanted = config(tmp_path, evaluation={"every": 5, "at_start": True, "at_end": True})
    trainer = toy_trainer(wanted)
    run(trainer)
    training, validation = lines(tmp_path / "run")
    assert [line["step"] for line in validation] == [0, 5, 10, 12]
    losses, masks = [], []
    for index in range(3):
        batch = ToyLoader(wanted, seed=2).step(index)
        losses.append(trainer.engine.losses(batch).detach().double())
        masks.append(batch.loss_mask.flatten().double())
    each, mask = torch.cat(losses), torch.cat(masks)
    expected = float((each * mask).sum() / mask.sum())
    found = validation[-1]["validation"]["b"]
    assert found["loss"] == pytest.approx(expected, rel=1e-5) and found["tokens"] == mask.sum()
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert found["loss"] < validation[0]["validation"]["b"]["loss"]
    order = [("loss" in r, r["step"]) for r in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert order.index((False, 5)) == order.index((True, 4)) + 1


def test_resume_is_bitwise(tmp_path):
    options = {"evaluation": {"every": 3}, "checkpoint": {"every": 4}}
    straight = toy_trainer(config(tmp_path, "straight", evaluation={"every": 3}))
    run(straight)
    first = toy_trainer(config(tmp_path, "cut", training={"stop_at_step": 5}, **options))
    outcome = run(first)
    assert (outcome.step, outcome.finished) == (5, False) and "stop_at_step" in outcome.reason
    assert first.saver.saved == [4, 5]
    second = toy_trainer(config(tmp_path, "cut", **options), start=4)  # as if 5 was lost
    assert run(second).finished
    for a, b in zip(straight.engine.parameters, second.engine.parameters, strict=True):
        assert torch.equal(a, b)
    timeless = ("step", "loss", "lr", "grad_norm", "tokens", "batch_hash", "table_norm")
    for folder_lines in zip(lines(tmp_path / "straight")[0], lines(tmp_path / "cut")[0], strict=True):
        a, b = ({key: line[key] for key in timeless} for line in folder_lines)
        assert a == b
    assert lines(tmp_path / "straight")[1] == lines(tmp_path / "cut")[1]
    assert batch_hashes(tmp_path / "straight" / "ledger.jsonl") == batch_hashes(tmp_path / "cut" / "ledger.jsonl")
    superseded = list(read_lines(tmp_path / "cut" / "metrics.superseded.jsonl"))
    assert [line["step"] for line in superseded] == [4]


def test_a_finished_run_started_again_does_nothing(tmp_path):
    run(toy_trainer(config(tmp_path, checkpoint={"every": 6})))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again = toy_trainer(config(tmp_path, checkpoint={"every": 6}), start=12)
    outcome = run(again)
    assert outcome.finished and again.saver.saved == []
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_run_started_anew_moves_the_old_one_aside(tmp_path):
    for _ in range(2):
        run(toy_trainer(config(tmp_path, steps=3, evaluation={"at_start": True})))
    training, validation = lines(tmp_path / "run")
    assert [line["step"] for line in training] == [0, 1, 2] and [line["step"] for line in validation] == [0, 3]
    assert len((tmp_path / "run" / "metrics.superseded.jsonl").read_text().splitlines()) == 5


def test_the_ledger_tells_the_story(tmp_path):
    run(toy_trainer(config(tmp_path, training={"stop_at_step": 7}, checkpoint={"every": 4})))
    run(toy_trainer(config(tmp_path, checkpoint={"every": 4}), start=4))
    ledger = read_ledger(tmp_path / "run" / "ledger.jsonl")
    events = [(entry["event"], entry.get("step", entry.get("first_step"))) for entry in ledger]
    written = ("checkpoint_written", None)
    assert events == [
        ("start", 0),
        ("batches", 0),
        ("checkpoint", 4),
        ("batches", 4),
        written,
        ("batches", 5),
        ("checkpoint", 7),
        written,
        ("stop", 7),
        ("superseded", 4),
        ("resume", 4),
        ("batches", 4),
        ("checkpoint", 8),
        ("batches", 8),
        written,
        ("batches", 9),
        ("checkpoint", 12),
        written,
        ("end", 12),
    ]
    assert [entry["path"][-9:] for entry in ledger if entry["event"] == "checkpoint_written"] == [
        "step_4.pt",
        "step_7.pt",
        "step_8.pt",
        "tep_12.pt",
    ]
    start = ledger[0]
    assert start["data"] == "toy" and start["seed"] == 1234 and start["layout"]["data"] == 1


def test_logging_every_n_steps_and_the_last(tmp_path):
    run(toy_trainer(config(tmp_path, logging={"every": 5})))
    assert [line["step"] for line in lines(tmp_path / "run")[0]] == [0, 5, 10, 11]
    assert len(batch_hashes(tmp_path / "run" / "ledger.jsonl")) == 12


class Probe(Hook):
    """Writes down when it is called."""

    def __init__(self, calls: list, name: str) -> None:
        self.calls, self.name = calls, name

    def on_start(self, trainer):
        self.calls.append((self.name, "on_start"))

    def before_step(self, trainer, step):
        self.calls.append((self.name, "before_step", step, trainer.completed))

    def on_numbers(self, trainer, report):
        self.calls.append((self.name, "on_numbers", report.step, trainer.completed))

    def after_step(self, trainer, step, report):
        assert report.step == step
        self.calls.append((self.name, "after_step", step, trainer.completed))

    def on_end(self, trainer):
        self.calls.append((self.name, "on_end"))


def test_hooks_are_called_in_order(tmp_path):
    calls: list = []
    short = config(tmp_path, steps=2, schedule={"warmup_steps": 1})
    run(toy_trainer(short, more=[Probe(calls, "x"), Probe(calls, "y")]))
    expected = [("x", "on_start"), ("y", "on_start")]
    for step in range(2):
        for point, done in (("before_step", step), ("on_numbers", step + 1), ("after_step", step + 1)):
            expected += [("x", point, step, done), ("y", point, step, done)]
    assert calls == [*expected, ("y", "on_end"), ("x", "on_end")]


@pytest.mark.parametrize("every", [1, 3])
def test_on_an_accelerator_numbers_come_one_step_later(tmp_path, every):
    """The queue of unread numbers, with a device that is called something else than cpu. The records are the same."""
    calls: list = []
    records = []
    for name, device in (("cpu", False), ("elsewhere", True)):
        asked = config(tmp_path / name, steps=4, logging={"every": every})
        trainer = toy_trainer(asked, more=[Probe(calls, "x")] if device else [])
        if device:
            elsewhere(trainer)
        run(trainer)
        records.append([each for each in read_lines(tmp_path / name / "run" / "metrics.jsonl") if "loss" in each])
    seen = [call[2:] for call in calls if call[1] == "on_numbers"]
    # Each is read after the next step has run, logged or not, and the last one at the end.
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)]
    assert len(batch_hashes(tmp_path / "elsewhere" / "run" / "ledger.jsonl")) == 4
    same = ("step", "loss", "lr", "grad_norm", "tokens", "batch_hash")
    cpu, late = ([{name: each.get(name) for name in same} for each in record] for record in records)
    assert cpu == late and [each["step"] for each in cpu] == ([0, 1, 2, 3] if every == 1 else [0, 3])


def test_errors_reach_the_ledger_and_the_hooks(tmp_path):
    class Breaks(Hook):
        def after_step(self, trainer, step, report):
            if step == 2:
                raise OSError("no space left")

    calls: list = []
    trainer = toy_trainer(config(tmp_path), more=[Probe(calls, "x"), Breaks()])
    with pytest.raises(OSError, match="no space"):
        run(trainer)
    last = read_ledger(tmp_path / "run" / "ledger.jsonl")[-1]
    assert (
        last["event"] == "error"
        and last["error"] == "OSError: no space left"
        and (last["step"], last["completed"]) == (2, 3)
    )
    assert calls[-1] == ("x", "on_end") and isinstance(trainer.error, OSError)


def test_pictures_and_words_at_the_end(tmp_path, capsys):
    run(toy_trainer(config(tmp_path, logging={"console": "plain"}, evaluation={"every": 6})))
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    for text in (
        "step  0",
        "validation after 6 steps  a: loss",
        "loss (nats per token) by step",
        "o validation: a",
        "finished after",
        "12 steps, 384 tokens",
    ):
        assert text in out
    assert "MFU" not in out  # the peak of a CPU is unknown
    json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
