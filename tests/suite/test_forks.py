"""Branches in a suite: what its file may say of them, and trunks and branches trained, compared and continued with."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path

import pytest

from megatron.checkpoint.format.errors import CheckpointError
from megatron.config import load, to_yaml
from megatron.config.show import difference
from megatron.config.show.difference import described
from megatron.config.source.files import split_arguments
from megatron.report.jsonl import read_lines
from megatron.suite import queue
from megatron.suite.forks import make
from megatron.suite.members import Member, Suite, read_suite
from megatron.suite.scaling.points import points_of
from megatron.testing.runs import run_on_this_rank
from tests.workers import run as on_ranks
from tools.suite import main

BASE = """
model: {layers: "attention/mlp", hidden_size: 16, vocab_size: 64, attention: {heads: 2}}
training: {steps: 6, sequence_length: 16, global_batch_size: 2}
data: {synthetic: copy}
evaluation: {every: 2, batches: 1}
schedule: {type: constant, warmup_steps: 1}
checkpoint: {every: 3}
logging: {console: quiet, curve: false, predictions: false}
"""
SUITE = """
name: small
ranks: 1
files: [base.yml]
axes:
  width:
    w16: {}
    w32: {model: {hidden_size: 32, attention.heads: 4}}
forks: {at: [3, 6], steps: 0.34, set: {schedule.min_lr_ratio: 0}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("base.yml").write_text(BASE)
    Path("small.yml").write_text(SUITE)
    return tmp_path


def train(folder: str, words: list[str]) -> None:
    """Run a member's command, on the worker."""
    files, overrides = split_arguments(words)
    with contextlib.chdir(folder):
        run_on_this_rank(load(files, overrides, ranks=1), 1)


class Ended:
    """A process that has ended."""

    def __init__(self, status: int) -> None:
        self.status = status

    def poll(self) -> int:
        return self.status


@pytest.fixture
def started(folder, monkeypatch) -> list[str]:
    """The names of the runs that are started, which are trained by a worker at once."""
    names: list[str] = []

    def start(member: Member, suite: Suite) -> Ended:
        names.append(member.name)
        if member.name.startswith("w32") and Path("broken").exists():
            return Ended(1)
        on_ranks(1, train, str(folder), member.words)
        return Ended(0)

    monkeypatch.setattr(queue, "_start", start)
    monkeypatch.setattr(queue, "TICK", 0.0)
    return names


def events(run: str, name: str) -> list[dict]:
    return [event for event in read_lines(Path("runs/small") / run / "ledger.jsonl") if event["event"] == name]


def test_every_run_has_its_branches(folder, capsys):
    assert main(["small.yml", "plan", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["w16", "w32", "w16-from-3", "w16-from-6", "w32-from-3", "w32-from-6"]
    assert list(found["members"]) == names and found["axes"]["fork"] == ["-", "3+1", "6+2"]
    branch = found["members"]["w32-from-6"]
    assert (branch["trunk"], branch["first_step"], branch["steps"]) == ("w32", 6, 2)
    assert branch["tokens"] == 2 * 32 and branch["flops"] * 3 == found["members"]["w32"]["flops"]
    assert len({each["data"] for each in found["members"].values()}) == 1
    config = read_suite(Path("small.yml")).resolved()["w32-from-3"].config
    assert (config.model.hidden_size, config.schedule.min_lr_ratio, config.schedule.type) == (32, 0, "wsd")
    assert (config.training.steps, config.training.stop_at_step, config.run.dir) == (6, 4, "runs/small/w32-from-3")


@pytest.mark.tour
def test_trained_compared_and_gone_on_with(folder, started, capsys):
    """A run that fails takes its branches with it. Started again the rest is made. Each branch has read its trunk's
    batches, ends at the floor of the rate, and both ledgers know of it."""
    Path("broken").touch()
    assert main(["small.yml", "launch"]) == 1
    said = capsys.readouterr().out
    assert started == ["w16", "w32", "w16-from-3", "w16-from-6"]
    assert "w32-from-3: cannot begin: runs/small/w32 has no checkpoint of step 3" in said
    assert "3 of 6 runs are finished; failed: w32, w32-from-3, w32-from-6" in said
    Path("broken").unlink()
    before = Path("runs/small/w16-from-3/metrics.jsonl").read_bytes()
    assert main(["small.yml", "launch", "--jobs", "3"]) == 0
    assert started[4:] == ["w32", "w32-from-3", "w32-from-6"]
    assert Path("runs/small/w16-from-3/metrics.jsonl").read_bytes() == before
    capsys.readouterr()
    assert main(["small.yml", "status", "--json"]) == 0
    assert {each["state"] for each in json.loads(capsys.readouterr().out).values()} == {"finished"}
    for trunk, (at, steps) in itertools.product(("w16", "w32"), ((3, 1), (6, 2))):
        name = f"{trunk}-from-{at}"
        (told,) = [each for each in events(trunk, "fork") if each["branch"] == f"runs/small/{name}"]
        (own,) = events(name, "forked")
        assert told["step"] == own["step"] == at and own["decay_steps"] == steps
        assert own["trunk"] == f"runs/small/{trunk}" and Path(own["checkpoint"]).name == f"step_{at:08d}"
        lines = [line for line in read_lines(Path("runs/small") / name / "metrics.jsonl") if "loss" in line]
        assert [line["step"] for line in lines] == list(range(at, at + steps))
    assert main(["small.yml", "manifest"]) == 0
    found = json.loads(capsys.readouterr().out)
    (same,) = found["same_batches"].values()
    batches = {name: member["batches"] for name, member in found["members"].items()}
    assert same and batches["w16-from-3"] == batches["w32"][3:4] and len(batches["w32-from-6"]) == 2
    values = [each["values"] for each in found["results"]]
    assert {"width": "w32", "fork": "6+2"} in values and all(len(each["runs"]) == 1 for each in found["results"])
    suite = read_suite(Path("small.yml"))
    ends = points_of(suite, suite.resolved(), "end", None, embeddings=True)
    assert ends.names == ["w16-from-3", "w16-from-6", "w32-from-3", "w32-from-6"]
    assert list(ends.tokens) == [128, 256, 128, 256]
    Path("small.yml").write_text(SUITE.replace("0.34", "0.67"))
    assert main(["small.yml", "launch"]) == 2
    assert "runs/small/w16-from-3 has a run that was made with other values" in capsys.readouterr().err


def test_a_waiting_branch_reads_its_trunk_once(folder, monkeypatch):
    """It asks several times a second whether its checkpoint is there: only the folder is checked again."""
    reads, trunk = [], Path("runs/small/w16")
    monkeypatch.setattr(difference, "described", lambda *args: reads.append(args) or described(*args))
    branch = next(each for each in read_suite(Path("small.yml")).members if each.name == "w16-from-3")
    assert branch.fork is not None and not make(branch.fork, trunk, branch.folder) and not reads, "not begun"
    trunk.mkdir(parents=True)
    (trunk / "config.yml").write_text(to_yaml(load(["base.yml"], [f"run.dir={trunk}"], ranks=1)))
    for _ in range(5):
        assert not make(branch.fork, trunk, branch.folder)
    assert len(reads) == 1
    (trunk / "checkpoints" / "step_00000003").mkdir(parents=True)
    with pytest.raises(CheckpointError):  # it is found, and is no checkpoint
        make(branch.fork, trunk, branch.folder)


def test_jobs_of_slurm_for_branches_come_after_those_of_trunks(folder, started, capsys):
    assert main(["small.yml", "launch", "--slurm"]) == 0
    said = capsys.readouterr().out
    assert "sbatch --parsable runs/small/array.sh" in said and "afterany:$job runs/small/branches.sh" in said
    assert "#SBATCH --array=0-1\n" in Path("runs/small/array.sh").read_text()
    assert "#SBATCH --array=2-5\n" in Path("runs/small/branches.sh").read_text()
    assert main(["small.yml", "launch", "--index", "2"]) == 1
    assert "has no checkpoint of step 3" in capsys.readouterr().out and not started


@pytest.mark.parametrize(
    ("forks", "rules"),
    [
        ("3", ["must be a mapping of `at` and `steps`"]),
        ("{at: 0, steps: 2}", ["small.yml:9", "must be a step, or a list of steps"]),
        ("{at: [3], steps: 1.5}", ["must be a number of steps"]),
        ("{at: [3, 3], steps: 1, until: 4}", ["3 comes again", "must be one of at, set, steps"]),
        (
            "{at: 3, steps: 1, set: {training.steps: 4, schedule.type: wsd}}",
            ["set training.steps", "set schedule.type"],
        ),
        ("{at: 3, steps: 1, set: {optimizer.rl: 4}}", ["unknown key in optimizer"]),
        (
            "{at: [2, 7], steps: 1}",
            ["none is saved at 2", "checkpoint.steps: [2]", "the last step of the run, 6, and 7"],
        ),
        ("{at: 3, steps: 1}\nset: {checkpoint.keep_last: 1}", ["checkpoint.keep_last deletes 3"]),
        ("{at: 3, steps: 1}\nset: {schedule.type: cosine}", ["must begin at a constant learning rate"]),
        ("{at: 3, steps: 1}\nset: {schedule.warmup_steps: 4}", ["is moving at step 3"]),
    ],
)
def test_mistakes(folder, capsys, forks, rules):
    """Reported before anything starts."""
    Path("small.yml").write_text(SUITE.partition("forks:")[0] + f"forks: {forks}\n")
    assert main(["small.yml", "plan"]) == 2
    said = capsys.readouterr().err
    assert all(rule in said for rule in rules), said


def test_two_runs_never_share_a_folder(folder, capsys):
    axes = "axes: {a: {x-y: {}, x: {}}, b: {z: {}, y-z: {}}}"
    Path("small.yml").write_text(f"files: [base.yml]\n{axes}\n")
    assert main(["small.yml", "plan"]) == 2
    assert "a name of its own, and x-y-z is two" in capsys.readouterr().err
    Path("small.yml").write_text(SUITE.replace("width:", "fork:"))
    assert main(["small.yml", "plan"]) == 2
    assert "must not be called fork" in capsys.readouterr().err
