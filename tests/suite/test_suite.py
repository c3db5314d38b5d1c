"""Suites: what their files mean, a suite trained for real, and what its tool says of it."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.config import ConfigError, load
from megatron.model.costs.describe import totals
from megatron.suite.members import State, agreement, data_group, read_suite, state_of
from tests.paths import ROOT
from tools.suite import main

BASE = """
model: {layers: "attention/mlp", hidden_size: 16, vocab_size: 64, attention: {heads: 2}}
training: {steps: 4, sequence_length: 16, global_batch_size: 2}
data: {synthetic: copy}
evaluation: {every: 2, batches: 1}
logging: {console: quiet, curve: false}
"""
SUITE = """
name: small
ranks: 1
files: [base.yml]
set: {optimizer.lr: 1.0e-2, schedule: {type: constant}}
axes:
  width:
    w16: {}
    w32: {model: {hidden_size: 32, attention.heads: 4}}
  seed:
    s1: {training.seed: 1}
    s2: {training.seed: 2}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("base.yml").write_text(BASE)
    Path("small.yml").write_text(SUITE)
    return tmp_path


def write(member, batches: list[str], losses: list[float], end: str = "end") -> None:
    """The files of a run that has made these steps."""
    member.folder.mkdir(parents=True, exist_ok=True)
    events = [{"event": "start", "step": 0}, {"event": "batches", "first_step": 0, "hashes": batches}]
    events += [{"event": end, "step": len(batches)}]
    (member.folder / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    lines += [{"step": 4, "validation": {"validation": {"loss": losses[-1] + 1}}}]
    (member.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_every_combination_is_a_run(folder):
    suite = read_suite(Path("small.yml"))
    assert [member.name for member in suite.members] == ["w16-s1", "w16-s2", "w32-s1", "w32-s2"]
    assert [dict(member.values) for member in suite.members] == [
        {"width": width, "seed": seed} for width, seed in itertools.product(("w16", "w32"), ("s1", "s2"))
    ]
    found = {name: resolved.config for name, resolved in suite.resolved().items()}
    assert [config.model.hidden_size for config in found.values()] == [16, 16, 32, 32]
    assert [config.model.attention.heads for config in found.values()] == [2, 2, 4, 4]
    assert [config.training.seed for config in found.values()] == [1, 2, 1, 2]
    assert {config.schedule.type for config in found.values()} == {"constant"}
    assert found["w32-s1"].run.dir == "runs/small/w32-s1" and found["w32-s1"].run.name == "small-w32-s1"
    groups = [data_group(config) for config in found.values()]
    assert groups[0] == groups[2] != groups[1] == groups[3]


def test_files_lists_and_later_axes_win(folder):
    Path("inner").mkdir()
    Path("inner/large.yml").write_text("model: {hidden_size: 64}\noptimizer: {lr: 0.5}\n")
    text = """
files: [../base.yml]
set: {checkpoint: {steps: [1, 2]}, model.hidden_size: 32}
axes:
  size: {large: {files: [large.yml], set: {optimizer.betas: [0.8, 0.9]}}}
  recipe: {a: {checkpoint.steps: [3]}, b: {}}
"""
    Path("inner/suite.yml").write_text(text)
    a, b = (each.config for each in read_suite(Path("inner/suite.yml")).resolved().values())
    assert (a.checkpoint.steps, b.checkpoint.steps) == ([3], [1, 2])
    assert (a.model.hidden_size, a.optimizer.lr, list(a.optimizer.betas)) == (32, 0.5, [0.8, 0.9])


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", ["must be a mapping"]),
        ("axes: {}", ["must name at least one axis"]),
        ("axes: {seed: {s1: 3}}\nsizes: 4\nranks: 0", [f"small.yml:{line}" for line in (1, 2, 3)]),
        ("axes: {seed: {'../x': {}}}", ["must be a name of letters"]),
        ("axes: {seed: {s1: {run.dir: x}}}", ["must not set run.dir"]),
        ("axes: {seed: {s1: {files: [nothing.yml]}}}", ["'nothing.yml' does not"]),
        ("files: [small]\naxes: {seed: {s1: {}}}", ["'small' is this suite"]),
        ("axes: {seed: {s1: {}}}\ndir: [3]", ["must be the path of a folder"]),
        ("axes: {a: {x: {}, x: {}}}", ["small.yml:1"]),
        ("axes: {a: {x: {}}}", ["must name at least one configuration file"]),
        ("a: [", ["small.yml"]),
    ],
)
def test_mistakes_in_the_file(folder, capsys, text, rules):
    Path("small.yml").write_text(text)
    assert main(["small.yml", "plan"]) == 2
    said = capsys.readouterr().err
    assert all(rule in said for rule in rules), said


def test_mistakes_in_the_runs_are_told_once_and_nothing_starts(folder, capsys):
    text = SUITE.replace("optimizer.lr", "optimizer.rl").replace("training.seed: 2", "training.seed: x")
    Path("small.yml").write_text(text)
    assert main(["small.yml", "launch"]) == 2
    said = capsys.readouterr().err
    assert (
        said.count("unknown key in optimizer") == 1
        and said.count("training.seed = 'x'") == 1
        and not Path("runs").exists()
    )
    with pytest.raises(ConfigError, match="must be a file of text"):
        read_suite(Path("none.yml"))


STORE = "[{{place: store, every: auto, url: '{}'}}]"


def test_runs_that_upload_to_one_place_are_refused(folder, capsys):
    shared = SUITE.replace("set: {", f"set: {{checkpoint.levels: {STORE.format('memory://bucket/')}, ")
    Path("small.yml").write_text(shared.replace("training.seed: 2", "training.seed: 2, checkpoint.levels: []"))
    assert main(["small.yml", "launch"]) == 2
    said = capsys.readouterr().err
    assert "checkpoint.levels" in said and "w16-s1, w32-s1 have memory://bucket" in said and not Path("runs").exists()
    assert "use url: memory://bucket/{run.name}" in said


def test_runs_upload_to_places_of_their_names(folder):
    level = STORE.format("memory://bucket/{run.name}")
    Path("small.yml").write_text(SUITE.replace("set: {", f"set: {{checkpoint.levels: {level}, "))
    found = read_suite(Path("small.yml")).resolved()
    uploads = {name: resolved.config.checkpoint.store.url for name, resolved in found.items()}
    assert len(uploads) == 4 and uploads == {name: f"memory://bucket/small-{name}" for name in uploads}


def test_a_state_is_read_from_the_files(folder):
    one, two, *_ = read_suite(Path("small.yml")).members
    assert state_of(one) == State()
    write(one, ["aa", "bb", "cc", "dd"], [4.0, 3.0, 2.0, 1.0], "stop")
    state = state_of(one)
    assert (state.word, state.step, state.loss, state.validation) == ("stopped", 4, 1.0, {"validation": 2.0})
    with open(one.folder / "ledger.jsonl", "a") as file:  # it went back to step 1, and read others from there
        file.write('{"event": "resume", "step": 1}\n{"event": "batches", "first_step": 1, "hashes": ["ee"]}\n')
    assert dict(state_of(one).batches)[0] == "aa" and dict(state_of(one).batches)[1] == "ee"
    assert state_of(one).word == "running"


def test_unlike_batches_are_found():
    def state(*hashes: str) -> State:
        return State("running", len(hashes), {}, dict(enumerate(hashes)))

    assert agreement({"a": state("x", "y"), "b": state("x", "y", "z"), "c": State()}).unlike is None
    assert agreement({"a": state("x", "y"), "b": state("x", "y", "z")}).steps == 2
    found = agreement({"a": state("x", "y", "z"), "b": state("x", "y", "q"), "c": state("x", "p", "z")})
    assert found.unlike == (1, "a", "c")


def test_results_over_seeds(folder, capsys):
    suite = read_suite(Path("small.yml"))
    for number, member in enumerate(suite.members):
        write(member, ["aa", "bb"] if member.values["seed"] == "s1" else ["cc", "dd"], [5.0, 2.0 + number])
    assert main(["small.yml", "compare", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = (each["results"]["training loss"] for each in found["results"])
    assert first == {"mean": 2.5, "deviation": statistics.stdev([2.0, 3.0]), "runs": 2}
    assert second["mean"] == 4.5 and found["results"][1]["values"] == {"width": "w32"}
    write(suite.members[2], ["aa", "xx"], [5.0, 4.0])
    assert main(["small.yml", "compare"]) == 1
    said = capsys.readouterr().out
    assert "DIFFERENT batches at step 1: w16-s1 and w32-s1" in said and Path("runs/small/report.html").exists()


@pytest.mark.tour
def test_a_suite_trained_for_real(folder, capsys, monkeypatch):
    """One by a job of an array and the others here, two at a time. Then nothing is left to do, and another value is
    refused before anything starts.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    by_a_job_of_an_array(capsys)
    assert main(["small.yml", "launch", "--jobs", "2"]) == 0
    assert "4 of 4 runs are finished" in capsys.readouterr().out
    assert main(["small.yml", "manifest"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["same_batches"].values()) == [True, True]
    batches = {name: member["batches"] for name, member in found["members"].items()}
    assert batches["w16-s1"] == batches["w32-s1"] != batches["w16-s2"] == batches["w32-s2"]
    assert all(len(each) == 4 and None not in each for each in batches.values())
    assert found["members"]["w32-s2"]["checkpoints"] == ["step_00000004"]
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.jsonl")}
    assert main(["small.yml", "launch"]) == 0
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.jsonl")} == before
    Path("small.yml").write_text(SUITE.replace("1.0e-2", "2.0e-2"))
    assert main(["small.yml", "launch"]) == 2
    assert "was made with other values of optimizer.lr" in capsys.readouterr().err


def by_a_job_of_an_array(capsys):
    assert main(["small.yml", "launch", "--slurm", "--sbatch=--time=5:00"]) == 0
    capsys.readouterr()
    script = Path("runs/small/array.sh")
    assert "#SBATCH --array=0-3\n" in script.read_text() and "#SBATCH --time=5:00\n" in script.read_text()
    done = subprocess.run(
        ["bash", str(script)], env={**os.environ, "SLURM_ARRAY_TASK_ID": "2"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    trained = [path.name for path in Path("runs/small").glob("w*-s*") if path.is_dir()]
    assert "w32-s1: trained" in done.stdout and trained == ["w32-s1"]
    assert main(["small.yml", "launch", "--index", "4"]) == 2


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "suites").glob("*.yml")), ids=lambda path: path.stem)
def test_shipped_suites(path):
    """Each member is a configuration without a mistake, and all members of a seed read the same batches."""
    suite = read_suite(path)
    trunks = [member for member in suite.members if member.fork is None]
    branches = [member for member in suite.members if member.trunk is trunks[0]]
    assert len(suite.members) == len(trunks) * (1 + len(branches))
    suite = replace(suite, members=(*trunks, *branches))
    found = {name: resolved.config for name, resolved in suite.resolved().items()}
    seeds = {config.training.seed for config in found.values()}
    assert len({data_group(config) for config in found.values()}) == len(seeds)
    if path.stem == "pythia":
        for name, config in found.items():
            published = load([str(ROOT / "configs" / "pythia" / f"{name}.yml")], ranks=1, check_inputs=False).config
            assert config.model == published.model and config.checkpoint.log_spaced and config.checkpoint.every == 1000
    if path.stem == "gemstones":
        for name, config in found.items():
            assert totals(config).parameters == parameters_of_a_gemstone(*map(int, name.split("-")[0].split("x")))
    counts = {
        "pythia": (8, 0),
        "ladder": (12, 2),
        "gemstones": (22, 9),
        "optimizers": (54, 0),
        "optimizers_best": (45, 0),
    }
    assert (len(trunks), len(branches)) == counts[path.stem]


def parameters_of_a_gemstone(width: int, depth: int) -> int:
    """As their program counts them: two tables of 50,304 rows. Attention, a gated MLP and two norms. The last norm."""
    heads = width // 128
    block = width * (heads + 2 * (heads // 2)) * 128 + 128 * heads * width + 12 * width**2 + 2 * width
    return 2 * 50304 * width + depth * block + width
