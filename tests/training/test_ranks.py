"""The trainer on two data parallel ranks: one process's numbers, and decisions that all ranks make together."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config.schema import Config
from megatron.config.sections.output import SlowOptions
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.report.jsonl import read_lines
from megatron.report.ledger import batch_hashes, read_ledger
from megatron.training.hook import Hook
from megatron.training.hooks.slow import SlowRanksHook
from megatron.worker.beacon import FORWARD
from tests.training.settings import settings
from tests.training.toy import run, toy_trainer
from tests.workers import run as on_ranks


def config(folder, **sections) -> Config:
    return settings(
        8,
        run={"dir": str(folder), "name": "run"},
        logging={"console": "plain"},
        optimizer={"lr": 0.05},
        evaluation={"every": 4},
        **sections,
    )


class SignalOnRankOne(Hook):
    def before_step(self, trainer, step):
        if step == 2 and trainer.mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


def train(folder: str, more: tuple = (), **sections):
    trainer = toy_trainer(config(folder, **sections), mesh=Mesh.build(Layout(data=2)), more=more)
    outcome = run(trainer)
    return outcome, [p.detach() for p in trainer.engine.parameters], trainer.saver.saved, trainer.ledger is not None


def test_two_ranks_are_one_process(tmp_path):
    alone = toy_trainer(config(tmp_path / "one"))
    run(alone)
    results = on_ranks(2, train, str(tmp_path / "two"))
    for outcome, weights, saved, _ in results:
        assert outcome.finished and saved == [8]
        for ours, single in zip(weights, alone.engine.parameters, strict=True):
            torch.testing.assert_close(ours, single.detach(), rtol=1e-5, atol=1e-6)
    assert [keeps_ledger for *_, keeps_ledger in results] == [True, False]
    one, two = (list(read_lines(tmp_path / name / "metrics.jsonl")) for name in ("one", "two"))
    assert len(one) == len(two) == 10
    for a, b in zip(one, two, strict=True):
        for key in ("step", "batch_hash", "tokens"):
            assert a.get(key) == b.get(key)
        if "loss" in a:
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-5) and b["lr"] == a["lr"]
            assert b["tflops"] == pytest.approx(b["tokens_per_second"] * 1000 / 1e12 / 2)
        else:
            for name in ("a", "b"):
                assert b["validation"][name]["loss"] == pytest.approx(a["validation"][name]["loss"], rel=1e-5)
                assert b["validation"][name]["tokens"] == a["validation"][name]["tokens"]
    hashes = batch_hashes(tmp_path / "two" / "ledger.jsonl")
    assert hashes == batch_hashes(tmp_path / "one" / "ledger.jsonl") and len(set(hashes.values())) == 8


def test_a_signal_on_one_rank_stops_all_at_one_step(tmp_path):
    results = on_ranks(2, train, str(tmp_path), (SignalOnRankOne(),))
    for outcome, _, saved, _ in results:
        assert (outcome.step, outcome.reason, saved) == (4, "signal SIGUSR1", [4])


def spoken(folder: str) -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as heard:
        train(folder)
    return heard.getvalue()


def test_only_rank_0_speaks(tmp_path):
    first, second = on_ranks(2, spoken, str(tmp_path))
    assert "step 7" in first and "finished" in first and second == ""


class Takes(Hook):
    """Reports ten seconds in the forward phase of each step, and on rank 1 a hundred from a step on."""

    def __init__(self, since: int) -> None:
        self.since = since

    def before_step(self, trainer, step):
        trainer.beacon._spent[FORWARD] += 100.0 if trainer.mesh.rank == 1 and step >= self.since else 10.0


def test_a_larger_batch_is_no_slow_rank():
    """A single rank is compared with its own best: 1 s for 2 samples, and then 4 s for 8."""
    stages = [{"until": 2, "global_batch_size": 2}]
    grows = settings(training={"micro_batch_size": 1, "global_batch_size": 8, "batch_schedule": stages})
    slow, own = SlowRanksHook(SlowOptions(every=2), ["a"]), [0.0] * 20
    trainer: Any = SimpleNamespace(config=grows, beacon=SimpleNamespace(own=own))
    found = []
    for end, seconds in ((2, 2.0), (4, 8.0)):
        own[FORWARD] += seconds
        found.append(sum(slow._window(trainer, end)))
    assert found == [4.0, 4.0]


@pytest.mark.parametrize(("more", "since"), [((), 6), ((SignalOnRankOne(),), 2)], ids=["last step", "stopped"])
def test_the_last_window_is_compared_where_no_other_follows(tmp_path, more, since):
    """Windows of two steps, each sent with the step behind it: behind steps 6 and 7, or 2 and 3, there is none."""
    slow = SlowRanksHook(SlowOptions(every=2, factor=1.5, windows=1), ["a", "b"])
    on_ranks(2, train, str(tmp_path), (*more, slow, Takes(since)))
    noted = [each for each in read_ledger(tmp_path / "ledger.jsonl") if each["event"] == "slow"]
    assert [(each["rank"], each["host"], each["since"]) for each in noted] == [(1, "b", since)]
