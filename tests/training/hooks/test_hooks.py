"""Hooks one by one: the guard, signals, wall time, checkpoints by the clock, samples, profiles, and two ranks."""

from __future__ import annotations

import json
import math
import os
import signal

import pytest
import torch

from megatron.engine.protocol import StepDropped, StepResult
from megatron.report.jsonl import read_lines
from megatron.report.ledger import hash_text, read_ledger
from megatron.training.exchange import Exchange
from megatron.training.hook import Hook, HookContext, RollBack
from megatron.training.hooks.guard import NonFinite
from megatron.training.hooks.log import LogHook
from megatron.training.trainer import Clock
from tests.training.settings import settings
from tests.training.toy import ToyLoader, elsewhere, run, toy_trainer


def config(tmp_path, steps=10, **sections):
    base = {
        "run": {"dir": str(tmp_path / "run"), "name": "run"},
        "logging": {"console": "quiet"},
        "optimizer": {"lr": 0.05},
    }
    for key, section in sections.items():
        base[key] = {**base.get(key, {}), **section}
    return settings(steps, **base)


class Act(Hook):
    """Does something before a given step."""

    def __init__(self, step: int, action) -> None:
        self.step, self.action = step, action

    def before_step(self, trainer, step):
        if step == self.step:
            self.action(trainer)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run_with_a_place_to_look(tmp_path, factor):
    wanted = config(tmp_path, checkpoint={"every": 4})
    trainer = toy_trainer(wanted)
    trainer.engine.poison = {3: factor}
    with pytest.raises(NonFinite) as caught:
        run(trainer)
    text = str(caught.value)
    assert "at step 3" in text and hash_text(ToyLoader(wanted).step(3).hash) in text and "samples 12 to 15" in text
    assert "--step 3" in text and "Last good step: loss" in text and "at step 2" in text
    assert trainer.saver.saved == []  # step 4's checkpoint would have had the broken weights
    assert read_ledger(tmp_path / "run" / "ledger.jsonl")[-1]["event"] == "error"
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]


def test_broken_weights_are_not_saved_although_their_numbers_come_late(tmp_path):
    trainer = toy_trainer(config(tmp_path, checkpoint={"every": 4}, logging={"every": 100}))
    elsewhere(trainer)
    trainer.engine.poison = {3: math.nan}
    with pytest.raises(NonFinite, match="at step 3"):
        run(trainer)
    assert trainer.saver.saved == []


def test_skipped_steps_pass_until_there_are_fifty_in_a_row(tmp_path):
    trainer = toy_trainer(config(tmp_path, steps=120))
    trainer.engine.skip = {*range(5, 54), *range(60, 110)}
    trainer.engine.poison = {step: math.inf for step in range(5, 54)}
    with pytest.raises(NonFinite, match="50 steps in a row.*step 109"):
        run(trainer)
    training = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert training[5]["skipped"] is True and training[5]["loss"] is None and training[5]["grad_norm"] is None
    assert "skipped" not in training[54] and training[54]["loss"] > 0


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_saves_and_stops(tmp_path, name):
    before = signal.getsignal(getattr(signal, name))
    trainer = toy_trainer(config(tmp_path), more=[Act(2, lambda _: os.kill(os.getpid(), getattr(signal, name)))])
    outcome = run(trainer)
    assert (outcome.step, outcome.finished, outcome.reason) == (4, False, f"signal {name}")
    assert trainer.saver.saved == [4]
    assert signal.getsignal(getattr(signal, name)) == before
    ledger = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert ledger[-1]["reason"] == f"signal {name}"
    assert [entry["reason"] for entry in ledger if entry["event"] == "checkpoint"] == ["the run was asked to stop"]


class Hands:
    """A clock that somebody turns."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def test_wall_time_stops_and_minutes_save(tmp_path):
    hands = Hands()
    trainer = toy_trainer(
        config(tmp_path, steps=100, training={"stop_after": 10.0}, checkpoint={"minutes": 3.0}),
        more=[Act(step, lambda _: setattr(hands, "time", hands.time + 60)) for step in range(100)],
    )
    trainer.clock = Clock(hands)
    outcome = run(trainer)
    # Before step s the clock shows s minutes. A request made there is received with the numbers of step s.
    # Then s + 1 steps are done and the clock shows s + 1. So: request at 3, saved at 4. Request at 7, saved at 8. Stop
    # requested at 10.
    assert trainer.saver.saved == [4, 8, 11] and outcome.step == 11
    assert outcome.reason == "training.stop_after: 10 minutes"


def test_the_clock_leaves_pauses_out():
    hands = Hands()
    clock = Clock(hands)
    hands.time = 5
    with clock.pause():
        hands.time = 9
    with clock.data():
        hands.time = 10
    assert clock.lap() == (6.0, 1.0)
    hands.time = 12
    assert clock.lap() == (2.0, 0.0) and clock.total == 12


def test_speed_mfu_and_eta(tmp_path):
    """With a clock of 2 s per step: 32 tokens in 2 s, 1000 operations each, a peak of 1e-6 TFLOP/s."""
    hands = Hands()
    trainer = toy_trainer(
        config(tmp_path, logging={"peak_tflops": 1e-6}, evaluation={"every": 1}),
        more=[Act(step, lambda _: setattr(hands, "time", hands.time + 2)) for step in range(10)],
    )
    trainer.clock = Clock(hands)
    run(trainer)
    training = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    for line in training:
        assert line["tokens_per_second"] == 16 and line["step_seconds"] == 2
        assert line["tflops"] == pytest.approx(16e-9) and line["mfu"] == pytest.approx(0.016)
        assert line["peak_tflops"] == 1e-6
    assert training[0]["eta_seconds"] is None and training[3]["eta_seconds"] == pytest.approx(2 * 6)


def test_samples_are_printed_and_kept(tmp_path, capsys):
    asked = []

    def generate(prompts, options, step):
        asked.append((prompts, options.tokens, step))
        return [prompt.upper() for prompt in prompts]

    samples = {"every": 4, "prompts": ["once", "def f("], "tokens": 9}
    run(toy_trainer(config(tmp_path, logging={"console": "plain"}, evaluation={"samples": samples}), generate=generate))
    assert asked == [(["once", "def f("], 9, 4), (["once", "def f("], 9, 8)]
    kept = list(read_lines(tmp_path / "run" / "samples.jsonl"))
    assert kept[3] == {"step": 8, "prompt": "def f(", "text": "DEF F("} and len(kept) == 4
    assert "sample after 4 steps: once|ONCE" in capsys.readouterr().out


def test_a_window_of_steps_is_profiled(tmp_path):
    trainer = toy_trainer(
        config(tmp_path, logging={"profile": {"start": 2, "steps": 3}}),
        more=[Act(step, lambda _, step=step: torch.ones(step + 1).cumsum(0)) for step in range(10)],
    )
    run(trainer)
    events = json.loads((tmp_path / "run" / "profile" / "trace_rank0.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::cumsum" for event in events) == 3


def test_hashes_survive_the_exchange(tmp_path):
    trainer = toy_trainer(config(tmp_path))
    for code in (0, 1, 2**64 - 1, 0x0123456789ABCDEF):
        report = trainer.exchange.report(0, 0.1, StepResult(2.0, 5.0), code, {"save"})
        assert report.batch_hash == code and report.loss == 2.0 and report.requests == {"save"}
    assert math.isnan(trainer.exchange.report(0, 0.1, StepResult(math.nan, 0.0), 0, ()).loss)
    run(trainer)


def test_unknown_requests_are_refused(tmp_path):
    trainer = toy_trainer(config(tmp_path, steps=1))
    with pytest.raises(ValueError, match="unknown request 'tea'"):
        trainer.request("tea")
    run(trainer)


def test_the_engine_may_report_on_some_ranks_only():
    """Ranks without labels add nothing, even if their loss is no number (a pipeline's first stage has none)."""
    from megatron.parallel.layout.mesh import Mesh

    exchange = Exchange(Mesh.single())
    report = exchange.report(0, 0.1, StepResult(torch.tensor(math.nan), torch.tensor(0.0)), 0, ())
    assert report.sums[:2].tolist() == [0.0, 0.0]


def test_log_needs_no_flops(tmp_path):
    trainer = toy_trainer(config(tmp_path, steps=2))
    trainer.hooks = [LogHook(HookContext(trainer.config))]
    run(trainer)
    assert all("tflops" not in line for line in read_lines(tmp_path / "run" / "metrics.jsonl"))


def test_an_error_has_the_step_of_its_message_in_the_ledger(tmp_path):
    for name, late in (("now", False), ("late", True)):
        trainer = toy_trainer(config(tmp_path, run={"dir": str(tmp_path / name)}, logging={"every": 100}))
        if late:
            elsewhere(trainer)
        trainer.engine.poison = {3: math.nan}
        with pytest.raises(NonFinite, match="at step 3 "):
            run(trainer)
        entry = read_ledger(tmp_path / name / "ledger.jsonl")[-1]
        assert (entry["event"], entry["step"]) == ("error", 3) and "at step 3 " in entry["error"]


def test_a_broken_state_is_not_saved(tmp_path):
    trainer = toy_trainer(
        config(tmp_path, checkpoint={"every": 3}), inspect=lambda _: ["head (master)"] if trainer.completed > 3 else []
    )
    with pytest.raises(NonFinite, match=r"after 6 updates is broken on 1 of 1 rank.*head \(master\).*update 5"):
        run(trainer)
    assert trainer.saver.saved == [3]
    assert read_ledger(tmp_path / "run" / "ledger.jsonl")[-1]["step"] == 5


def test_a_step_without_a_label_is_told_and_passes(tmp_path, capsys):
    trainer = toy_trainer(config(tmp_path, logging={"console": "plain"}))
    whole = trainer.engine.step
    trainer.engine.step = lambda batch, lr, look=None: (
        StepResult(0.0, 0.0, None, unlabelled=True) if batch.step == 4 else whole(batch, lr)
    )
    assert run(trainer).finished
    line = list(read_lines(tmp_path / "run" / "metrics.jsonl"))[4]
    assert line["unlabelled"] is True and line["loss"] is None and line["grad_norm"] is None and line["tokens"] == 160
    assert "step 4: no label of its batch counts (samples 16 to 19)" in capsys.readouterr().out


class BackFrom(Hook):
    """Asks to go back when it reads the numbers of a step, and drops the step after it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_numbers(self, trainer, report):
        if report.step == self.step:
            trainer.go_back(RollBack(report.step, "a spike", lambda *_: None))

    def run_step(self, trainer, run, batch, lr, look):
        if trainer.at == self.step + 1:
            raise StepDropped({"SIGTERM"}, 0.1, 60.0)
        return run(batch, lr, look)


def test_a_run_that_drops_a_step_ends_and_does_not_go_back(tmp_path):
    """An engine that dropped a step makes no other. Without a checkpoint of the bad step, the next start comes to it
    again."""
    trainer = toy_trainer(config(tmp_path, steps=5), more=[BackFrom(2)])
    elsewhere(trainer)
    outcome = run(trainer)
    assert (outcome.step, outcome.reason, outcome.back) == (3, "signal SIGTERM", None)
    assert trainer.saver.saved == []


class BackAndStop(Hook):
    def after_step(self, trainer, step, report):
        if step == 2:
            trainer.go_back(RollBack(step, "a spike", lambda *_: None))
            trainer.stop("signal SIGTERM")


def test_a_run_that_has_to_stop_does_not_go_back(tmp_path):
    """A host that is about to end would otherwise be killed within the steps that are repeated."""
    trainer = toy_trainer(config(tmp_path, steps=5), more=[BackAndStop()])
    elsewhere(trainer)
    outcome = run(trainer)
    assert (outcome.step, outcome.reason, outcome.back, outcome.finished) == (3, "signal SIGTERM", None, False)
    assert trainer.saver.saved == []
