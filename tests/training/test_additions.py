"""A package from outside gives a run its optimizer, schedule, hook and sink, with no edit inside."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.config.problems import UserError
from megatron.launch.command_line import main
from tests.paths import ROOT
from tests.training.test_run import job
from tests.workers import run as on_ranks

CONFIG = str(ROOT / "configs" / "test" / "tiny_neox.yml")
PACKAGE = '''
import json
import torch
from megatron.training.hook import Hook

class Average(torch.optim.Optimizer):
    """Steps along a running mean of the gradients."""

    def __init__(self, groups, rate):
        super().__init__(groups, {"lr": 0.0, "rate": rate})

    @classmethod
    def build(cls, config, groups):
        return cls(groups, config.optimizer.options["rate"])

    def state_names(self, group):
        return ("mean",)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.sub_(mean.lerp_(p.grad, group["rate"]), alpha=group["lr"])

def halving(n, peak, span, options):
    return peak * 0.5 ** (n / options.options["steps"])

class Probe(Hook):
    def __init__(self, file):
        self.file, self.seen = file, []

    def after_step(self, trainer, step, report):
        self.seen.append([step, report.loss])

    def on_end(self, trainer):
        if trainer.mesh.rank == 0:
            with open(self.file, "w") as file:
                json.dump(self.seen, file)

class Lines:
    def __init__(self, folder):
        self.file = open(folder / "mine.txt", "a")

    def write(self, record):
        self.file.write(f"{record['step']} {record.get('loss')}\\n")

    def close(self):
        self.file.close()

NO_HOOK = object
'''


@pytest.fixture
def lab(tmp_path, monkeypatch):
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "guest.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with guests(str(tmp_path)):
        yield tmp_path


@contextlib.contextmanager
def guests(lab: str) -> Iterator[None]:
    """The package can be imported, and is forgotten afterwards: the next test has one of the same name."""
    sys.path.insert(0, lab)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(lab)
        for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
            del sys.modules[name]


def train(lab: str, run: str, ranks: int, *words: str) -> str:
    """On every rank: the run, without a launcher. Why it was refused, if it was."""
    with guests(lab):
        try:
            job(run, ranks, f"run.dir={run}", *words)
        except UserError as error:
            return str(error)
    return ""


def start(lab: Path, run: Path, ranks: int, *words: str) -> list[str]:
    run.mkdir(exist_ok=True)
    (run / "tiny.yml").write_text(f"extends: {CONFIG}\nlaunch: {{device: cpu}}\n")
    return on_ranks(ranks, train, str(lab), str(run), ranks, *words)


def recipe(run: Path) -> list[str]:
    return [
        "optimizer.type=lab.guest:Average",
        "optimizer.options={rate: 0.5}",
        "optimizer.lr=0.5",
        "schedule={type: lab.guest:halving, warmup_steps: 0, options: {steps: 2}}",
        f"hooks=[{{type: lab.guest:Probe, options: {{file: {run}.json}}}}]",
        "logging.sinks=lab.guest:Lines",
        "training.steps=4",
    ]


def lines(run: Path) -> list[dict]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record]


@pytest.mark.tour
def test_a_run_made_of_guests_is_resumed_on_another_layout(lab):
    """The whole run is started by deepy.py, whose ranks find the package by PYTHONPATH."""
    straight, broken = lab / "straight", lab / "broken"
    command = [sys.executable, "deepy.py", "train.py", CONFIG, "launch.device=cpu", "launch.ranks=1"]
    command += [f"run.dir={straight}", *recipe(straight)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr + done.stdout
    whole = lines(straight)
    assert [line["lr"] for line in whole] == pytest.approx([0.5 * 0.5 ** (n / 2) for n in range(4)])
    probed = json.loads(Path(f"{straight}.json").read_text())
    assert probed == [[n, line["loss"]] for n, line in enumerate(whole)]
    told = [line.split() for line in (straight / "mine.txt").read_text().splitlines()]
    assert [float(loss) for _, loss in told if loss != "None"] == [line["loss"] for line in whole]
    assert start(lab, broken, 1, *recipe(broken), "training.stop_at_step=2") == [""]
    assert start(lab, broken, 2, *recipe(broken), "zero.stage=1") == ["", ""]
    for one, two in zip(whole, lines(broken), strict=True):
        assert one["batch_hash"] == two["batch_hash"]
        assert math.isclose(one["loss"], two["loss"], rel_tol=1e-5)
        assert math.isclose(one["grad_norm"], two["grad_norm"], rel_tol=1e-4)


@pytest.mark.parametrize(
    "word, rule",
    [
        ("optimizer.type=lab.guests:Average", "module lab.guests must be found by Python"),
        ("optimizer.type=lab.guest:Avarage", "must define Avarage"),
        ("schedule.type=lab.guest.halving", "or an import path (package.module:name)"),
        ("hooks=[lab.guest:Prob]", "must define Prob"),
        ("logging.sinks=[tensorboard]", "tensorboard must be turned on by keys of its own"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_starts(lab, word, rule, capsys):
    words = [CONFIG, "launch.device=cpu", f"run.dir={lab / 'run'}", "launch.ranks=1", word]
    assert main([str(ROOT / "train.py"), *words]) == 2
    assert rule in capsys.readouterr().err and not (lab / "run").exists()


@pytest.mark.parametrize(
    "word, rule",
    [
        ("optimizer.type=lab.guest:Lines", "must have build, state_names, step"),
        ("hooks=[lab.guest:NO_HOOK]", "must make a megatron.training.hook.Hook"),
        ("hooks=[lab.guest:Probe]", "hooks.0.options do not suit lab.guest:Probe: missing a required argument: 'file'"),
    ],
)
def test_what_breaks_its_contract_is_refused_as_a_mistake_of_the_user(lab, word, rule):
    """So a rank ends with status 2 and this text, without a traceback (`guarded`)."""
    (said,) = start(lab, lab / "run", 1, word)
    assert rule in said
