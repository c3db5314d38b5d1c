"""A package from outside gives a run its optimizer, schedule, hook and sink, with no edit inside."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

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
    return tmp_path


def start(lab: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess:
    command = [sys.executable, "deepy.py", "train.py", "configs/test/tiny_neox.yml", "launch.device=cpu", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert not check or done.returncode == 0, done.stderr + done.stdout
    return done


def recipe(run: Path) -> list[str]:
    return [
        f"run.dir={run}",
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


def test_a_run_made_of_guests_is_resumed_on_another_layout(lab):
    straight, broken = lab / "straight", lab / "broken"
    start(lab, *recipe(straight), "launch.ranks=1")
    whole = lines(straight)
    assert [line["lr"] for line in whole] == pytest.approx([0.5 * 0.5 ** (n / 2) for n in range(4)])
    probed = json.loads(Path(f"{straight}.json").read_text())
    assert probed == [[n, line["loss"]] for n, line in enumerate(whole)]
    told = [line.split() for line in (straight / "mine.txt").read_text().splitlines()]
    assert [float(loss) for _, loss in told if loss != "None"] == [line["loss"] for line in whole]
    start(lab, *recipe(broken), "launch.ranks=1", "training.stop_at_step=2")
    start(lab, *recipe(broken), "launch.ranks=2", "zero.stage=1")
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
def test_what_is_not_there_is_refused_before_anything_starts(lab, word, rule):
    done = start(lab, f"run.dir={lab / 'run'}", "launch.ranks=1", word, check=False)
    assert done.returncode == 2 and rule in done.stderr and not (lab / "run").exists()


@pytest.mark.parametrize(
    "word, rule",
    [
        ("optimizer.type=lab.guest:Lines", "must have build, state_names, step"),
        ("hooks=[lab.guest:NO_HOOK]", "must make a megatron.training.hook.Hook"),
        ("hooks=[lab.guest:Probe]", "hooks.0.options do not suit lab.guest:Probe: missing a required argument: 'file'"),
    ],
)
def test_what_breaks_its_contract_is_refused_without_a_traceback(lab, word, rule):
    done = start(lab, f"run.dir={lab / 'run'}", "launch.ranks=1", word, check=False)
    assert done.returncode == 2 and rule in done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout
