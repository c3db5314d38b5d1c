"""Ranks that are slow are named, and no others."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import pytest

from megatron.report.ledger import read_ledger
from megatron.training.hook import Hook
from megatron.training.hooks.slow import PARTS, Comparison, median_of_others, parts_of
from megatron.training.trainer import Trainer
from megatron.worker.beacon import BACKWARD, DATA, FORWARD, NAMES
from tests.paths import ROOT
from tests.training.test_run import job
from tests.workers import run

TINY = """
model: {layers: "(attention/mlp) x2", hidden_size: 16, vocab_size: 64, attention: {heads: 2}}
training: {sequence_length: 16, micro_batch_size: 2, global_batch_size: 4}
optimizer: {lr: 1e-3}
schedule: {warmup_steps: 0}
data: {synthetic: copy}
tokenizer: {type: none}
evaluation: {at_end: false}
checkpoint: {at_end: false}
logging: {console: quiet, curve: false, every: 1}
"""


def windows(draw: random.Random, ranks: int, slow: dict[int, tuple[int, float]], count: int) -> Comparison:
    """Windows of ten steps with noise. `slow` has the window from which on a rank takes how many times as long."""
    comparison = Comparison([0] * ranks, 1.5, 3)
    for number in range(count):
        seconds = []
        for rank in range(ranks):
            begin, times = slow.get(rank, (count, 1.0))
            usual = [draw.gauss(1.0, 0.1) for _ in PARTS]
            usual[1] *= 1 if number < begin else 1 + (times - 1) * len(PARTS)  # all of it in forward and backward
            seconds.append(usual)
        comparison.window(10 * number, 10 * number + 9, seconds)
    return comparison


@pytest.mark.parametrize("seed", range(20))
def test_the_slow_rank_alone_is_named_within_fifty_steps(seed):
    draw = random.Random(seed)
    ranks = draw.randrange(2, 9)
    rank, begin = draw.randrange(ranks), draw.randrange(2, 20)
    comparison = windows(draw, ranks, {rank: (begin, draw.uniform(1.8, 4.0))}, begin + 4)
    assert list(comparison.slow) == [rank] and not comparison.ended
    assert comparison.slow[rank].part == "forward and backward" and comparison.slow[rank].since == 10 * begin
    assert comparison.slow[rank].others > 1.5 and comparison.slow[rank].past > 1.5
    assert comparison.slowest[0] == rank


def test_nobody_is_named_where_all_are_alike_and_a_rank_that_recovers_is_told():
    assert not windows(random.Random(0), 8, {}, 100).slow
    comparison = Comparison([0] * 3, 1.5, 3)
    for number in range(10):
        _, over = comparison.window(number, number, [[1.0], [1.0], [3.0 if 2 <= number < 7 else 1.0]])
        assert [each.rank for each in over] == ([2] if number == 7 else [])
    (was,) = comparison.ended
    assert (was.since, was.until, was.others) == (2, 7, 3.0) and not comparison.slow


def test_a_rank_without_peers_is_compared_with_its_past():
    comparison = Comparison([0, 1], 1.5, 2)
    for number in range(6):
        comparison.window(number, number, [[9.0], [1.0 if number < 3 else 2.0]])
    assert list(comparison.slow) == [1], "stages have different work: that of rank 0 is simply more"


@pytest.mark.parametrize("count", range(2, 8))
def test_the_median_of_the_others(count):
    values = [float(value) for value in random.Random(count).choices(range(6), k=count)]
    ordered = sorted(values)
    for place in range(count):
        assert median_of_others(ordered, place) == median(ordered[:place] + ordered[place + 1 :])


def test_ranks_are_compared_within_their_stages():
    """Stages take turns in the order of ranks, the second has twice the work of the first, and rank 2 of the first
    takes as long as those."""
    comparison = Comparison([0, 1] * 3, 1.5, 1)
    (begun,), _ = comparison.window(0, 9, [[1.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    assert (begun.rank, begun.others, begun.part) == (2, 2.0, "forward and backward")
    assert comparison.slowest[:2] == (2, 2.0)


def test_ranks_that_tell_forward_and_backward_apart_or_together_are_compared_by_their_sum():
    """Three ranks. Two of them find their micro-batches too brief to be reported one by one."""
    apart, together, slow = [0.0] * len(NAMES), [0.0] * len(NAMES), [0.0] * len(NAMES)
    apart[DATA], together[DATA], slow[DATA] = 1.0, 1.0, 2.0
    apart[FORWARD], apart[BACKWARD], together[FORWARD], slow[FORWARD] = 1.0, 2.0, 3.0, 3.1
    assert parts_of(apart) == parts_of(together)
    for others in ([apart, together], [apart, apart], [together, together]):
        comparison = Comparison([0] * 3, 1.2, 1)
        (begun,), _ = comparison.window(0, 9, [*map(parts_of, others), parts_of(slow)])
        assert (begun.rank, begun.part) == (2, "data")


class Late(Hook):
    """Rank 1 takes longer before its forward pass, from a step on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def on_start(self, trainer: Trainer) -> None:
        if trainer.mesh.rank == 1:
            trainer.engine.module.register_forward_pre_hook(lambda *_: time.sleep(0.5 * (trainer.at >= self.first)))


@pytest.mark.parametrize("spikes", ["off", "report"])
def test_metrics_and_ledger_name_the_slow_rank_its_host_and_since_when(tmp_path, spikes):
    """Windows of two steps, sent with the numbers of the step behind them: before the update or after it."""
    hook = "hooks=[{type: 'tests.training.hooks.test_slow_ranks:Late', options: {first: 6}}]"
    words = ("watch.slow.every=2", "watch.slow.windows=2", "watch.slow.factor=3", f"spikes.action={spikes}", hook)
    (tmp_path / "tiny.yml").write_text(TINY)
    lines = run(2, job, str(tmp_path), 2, "training.steps=14", "zero.stage=0", *words)[0]
    ranks = {line["step"]: line["ranks"] for line in lines if "ranks" in line}
    (event,) = [each for each in read_ledger(tmp_path / "run" / "ledger.jsonl") if each["event"] == "slow"]
    assert (event["rank"], event["since"], event["step"]) == (1, 6, 10), "6 and 7, 8 and 9: heard of in the next step"
    assert event["host"] == ranks[13]["host"] == socket.gethostname() and event["times_others"] > 3
    assert (ranks[13]["slowest"], ranks[13]["since"]) == (1, 6) and ranks[13]["times_others"] > 3
    assert ranks[13]["times_past"] > 2
    assert "since" not in ranks[10] and min(ranks) == 5, "steps 2 and 3 are heard of in step 4"


@contextmanager
def stopped_and_continued(pid: int) -> Iterator[None]:
    """A process that is stopped for four fifths of the time."""
    over = threading.Event()

    def work() -> None:
        with suppress(ProcessLookupError):
            while not over.is_set():
                for number, seconds in ((signal.SIGSTOP, 0.08), (signal.SIGCONT, 0.02)):
                    os.kill(pid, number)
                    time.sleep(seconds)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def with_a_quota(pid: int) -> Iterator[None]:
    """A process that gets a tenth of a core, by the first or the second version of cgroups."""
    name = f"deepy-test-{os.getpid()}"
    for folder, file, text in (("cpu", "cpu.cfs_quota_us", "10000"), ("", "cpu.max", "10000 100000")):
        group = Path("/sys/fs/cgroup", folder, name)
        with suppress(OSError):
            group.mkdir()
        try:
            if (group / file).exists():
                (group / file).write_text(text)
                (group / "cgroup.procs").write_text(str(pid))
                try:
                    yield
                finally:
                    (group.parent / "cgroup.procs").write_text(str(pid))
                return
        finally:
            with suppress(OSError):
                group.rmdir()
    pytest.skip("no group of processes with a quota can be made here")


@pytest.mark.slow
@pytest.mark.parametrize("slowed_down", [stopped_and_continued, with_a_quota])
def test_a_rank_that_is_slowed_down_is_named(tmp_path, slowed_down):
    """From a step that is noted, on a real run of three ranks."""
    folder = tmp_path / "run"
    command = [sys.executable, str(ROOT / "deepy.py"), "--ranks", "3", str(ROOT / "train.py")]
    command += [str(ROOT / "configs/test/tiny_neox.yml"), f"run.dir={folder}", "training.steps=400"]
    command += ["training.global_batch_size=12", "checkpoint.every=null", "evaluation.every=null"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    try:
        while (begin := last_step(folder)) < 60:
            assert job.poll() is None, job.communicate()
            time.sleep(0.05)
        log = (folder / "logs" / "rank_0002.log").read_text()
        pid = int(log.split("started as process ")[-1].split(":")[0])
        end = time.monotonic() + 200
        with slowed_down(pid):
            while not (named := notes(folder)) and time.monotonic() < end and job.poll() is None:
                time.sleep(0.1)
    finally:
        job.terminate()
    out, _ = job.communicate(timeout=100)
    assert {each["rank"] for each in named} == {2}, (named, out)
    assert named[0]["step"] - begin <= 50 and named[0]["since"] >= begin - 20
    assert re.search(r"slow: rank 2 on \S+ takes \d+\.\d times as long as the median of the others", out)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = next(each["ranks"] for each in records if each["step"] > named[0]["step"])
    assert (told["slowest"], told["since"], told["host"]) == (2, named[0]["since"], named[0]["host"])


def last_step(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return json.loads(lines[-1]).get("step", -1) if lines and lines[-1].endswith("}") else -1


def notes(folder: Path) -> list[dict]:
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "slow"]
