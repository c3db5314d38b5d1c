"""Chains: the example, shrunken, with its manifests and the trace of a text, and mistakes in files of stages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.checkpoint.save import store
from megatron.config.problems import ConfigError, UserError
from megatron.data.hashing import file_hash
from megatron.suite.stages import Chain, read_chain
from megatron.worker.writer_lock import take
from tests.paths import ROOT

SMALL = {"model.hidden_size": 32, "training.global_batch_size": 16, "training.micro_batch_size": 16}
SMALL |= {"training.steps": 2, "schedule.warmup_steps": 1, "align.evaluate": 1, "align.problems": 4, "align.workers": 1}


def deepy(folder: Path, *words: str) -> str:
    start = "import sys; from megatron.command.main import main; sys.exit(main())"
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", start, *words], cwd=folder, capture_output=True, text=True, env=own)
    logs = "".join(each.read_text()[-3000:] for each in folder.rglob("*.out")) if done.returncode else ""
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return done.stdout


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Path:
    """The folder in which the example was run, with fewer texts, steps and parameters, and one seed."""
    folder = tmp_path_factory.mktemp("chain")
    shutil.copytree(ROOT / "examples/chain", folder / "files")
    file = folder / "files/chain.yml"
    values = yaml.safe_load(file.read_text())
    values["stages"]["corpus"]["run"] = "python files/texts.py {here} 300"
    del values["stages"]["rl_2"], values["stages"]["rl_3"]
    for stage in values["stages"].values():
        if "files" in stage:
            keys = {key: each for key, each in SMALL.items() if not key.startswith("align") or "verb" in stage}
            stage["set"] = {**stage["set"], **keys}
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    deepy(folder, "suite", "files/chain.yml", "launch")
    return folder


@pytest.mark.tour
def test_each_stage_names_its_parents(chain: Path):
    manifests = json.loads(deepy(chain, "suite", "files/chain.yml", "manifest"))
    assert list(manifests)[-2:] == ["evaluate", "export"] and len(manifests) == 15
    for name, manifest in manifests.items():
        for parent, digest in manifest["parents"].items():
            assert digest == file_hash(chain / "runs/chain" / parent / "stage.json")
        for path, digest in manifest["outputs"].items():
            assert digest == file_hash(chain / "runs/chain" / name / path)
    assert set(manifests["dpo"]["parents"]) == {"sft", "tokenizer", "chosen", "rejected", "reference"}
    assert "rollouts/round-000001.jsonl" in manifests["rl_1"]["outputs"]
    assert manifests["evaluate"]["outputs"].keys() == {"results.json"}
    before = {path: path.stat().st_mtime_ns for path in chain.rglob("stage.json")}
    deepy(chain, "suite", "files/chain.yml", "launch")  # which has nothing to do
    assert before == {path: path.stat().st_mtime_ns for path in chain.rglob("stage.json")}


@pytest.mark.tour
def test_a_text_is_traced_through_all_stages(chain: Path):
    rows = [json.loads(line) for line in (chain / "runs/chain/corpus/sums.jsonl").read_text().splitlines()]
    found = json.loads(deepy(chain, "data", "where", "runs/chain", "--text", rows[7]["text"], "--json"))["stages"]
    place = next(each for each in found["pretrain"]["places"] if each["document"] == 7)
    assert place["input"].endswith("sums.jsonl") and place["unit"] == "bytes"
    assert found["pretrain"]["then"] == ["midtrain", "sft", "reference", "dpo", "rl_1", "evaluate", "export"]
    run, seen = chain / "runs/chain/rl_1", set()
    for number in range(2):
        lines = (run / f"rollouts/round-{number:06d}.jsonl").read_text().splitlines()[1:]
        seen |= {(number, place) for place, line in enumerate(lines) if json.loads(line)["prompt"] == _first(run)}
    text = _text(run, _first(run))
    places = json.loads(deepy(chain, "data", "where", str(run), "--text", text, "--json"))["places"]
    assert {(each["step"], each["index"]) for each in places[0]["seen"]} == seen
    shown = deepy(chain, "data", "where", "runs/chain", "--text", text)
    assert f"rl_1: seen by {len(seen)} sequences" in shown and "its weights are in evaluate, export" in shown


def _first(run: Path) -> list[int]:
    ids: list[int] = json.loads((run / "rollouts/round-000000.jsonl").read_text().splitlines()[1])["prompt"]
    return ids


def _text(run: Path, ids: list[int]) -> str:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(run.parent / "tokenizer/tokenizer.json"))
    text: str = tokenizer.decode(ids)
    return text


# -- files -------------------------------------------------------------------------------------------------------------


def written(folder: Path, stages: dict[str, Any], **more: Any) -> Path:
    (folder / "base.yml").write_text(yaml.safe_dump({"model": {"layers": "attention/mlp x1", "hidden_size": 16}}))
    path = folder / "chain.yml"
    path.write_text(yaml.safe_dump({"dir": str(folder / "out"), "stages": stages, **more}, sort_keys=False))
    return path


@pytest.mark.parametrize(
    "stages, rule",
    [
        ({}, "must be a mapping of names"),
        ({"a": {}}, "must have either run or files"),
        ({"a": {"run": "plan", "files": "base.yml"}}, "must have either run or files"),
        ({"a": {"run": "data tokenize {b}"}, "b": {"run": "plan"}}, "must refer to an earlier stage"),
        ({"a": {"run": "data tokenize {"}}, "must refer to an earlier stage"),
        ({"a": {"files": "base.yml", "from": "b"}}, "must come from earlier stages"),
        ({"a": {"files": "none.yml"}}, "must name configuration files that exist"),
        ({"a": {"files": "base.yml", "verb": "extract"}}, "verb must be train or align"),
        ({"a": {"run": "plan", "set": {"seed": 1}}}, "no set, from or verb"),
        ({"dir": {"run": "plan"}}, "must be a name of letters"),
        ({"a": {"run": "plan 'x"}}, "run must be a command: No closing quotation"),
        ({"a": {"run": ["plan"]}}, "must have a command in run"),
        ({"a": {"run": "plan {here!r}"}}, "must refer to an earlier stage"),
        ({"a": {"run": "plan", "after": 3}}, "names of earlier stages in from and after"),
        ({"a": {"run": "plan", "after": [["b"]]}}, "names of earlier stages in from and after"),
        ({"a": {"files": 3}}, "files must be a configuration file"),
        ({"a": {"files": []}}, "files must be a configuration file"),
        ({"a": {"files": "base.yml", "set": 3}}, "set must be a mapping"),
        ({"a": {"files": "base.yml", "set": {"run": {"dir": "x"}}}}, "must not set run.dir"),
        (
            {
                "a": {"files": "base.yml"},
                "b": {"files": "base.yml", "from": "a", "set": {"checkpoint.initialize_from": 1}},
            },
            "must not set checkpoint.initialize_from",
        ),
        ({"a": {"files": "base.yml", "set": {"run.title": "x}"}}}, "double braces that are text"),
    ],
)
def test_mistakes_have_their_place(tmp_path, stages, rule):
    with pytest.raises(ConfigError, match=rule):
        read_chain(written(tmp_path, stages))


def test_the_example_is_a_chain():
    chain = read_chain(ROOT / "examples/chain/chain.yml")
    assert chain is not None and len(chain.stages) == 17
    chain.check()


def test_configurations_are_checked_before_the_first_stage(tmp_path):
    stages = {"a": {"run": "python x.py"}, "b": {"files": "base.yml", "set": {"training.stepz": 3}, "after": "a"}}
    chain = read_chain(written(tmp_path, stages))
    assert chain is not None
    with pytest.raises(ConfigError, match="stepz"):
        chain.launch(print)
    assert not chain.folder.exists()


def test_stages_are_done_once_and_from_what_they_name(tmp_path):
    """A stage that fails leaves no manifest, and begins again. One that was made from something else is refused."""
    script = tmp_path / "step.py"
    script.write_text(
        "import sys, pathlib as p\np.Path(sys.argv[1], 'a').write_text(p.Path(sys.argv[2]).read_text())\n"
    )
    stages = {"one": {"run": f"python {script} {{here}} {tmp_path}/input"}}
    stages["two"] = {"run": f"python {script} {{here}} {{one}}/a"}
    chain = read_chain(written(tmp_path, stages))
    assert chain is not None and chain.stages[1].parents == ("one",)
    lines: list[str] = []
    (chain.folder / "one").mkdir(parents=True)
    (chain.folder / "one/mine").write_text("not a stage's")
    with pytest.raises(UserError, match="must not exist: no stage has made it"):
        chain.launch(lines.append)
    shutil.rmtree(chain.folder)
    assert chain.launch(lines.append) == "one" and "failed with status 1" in lines[-1]
    assert chain.state(chain.stages[0]) == "begun"
    (tmp_path / "input").write_text("x")
    assert chain.launch(lines.append) is None and (chain.folder / "two/a").read_text() == "x"
    count = len(lines)
    assert chain.launch(lines.append) is None and len(lines) == count
    (chain.folder / "one/stage.json").write_text(json.dumps(json.loads(chain.stages[0].manifest.read_text())))
    with pytest.raises(UserError, match="was made with other parents"):
        chain.launch(lines.append)
    shutil.rmtree(chain.folder / "one")
    shutil.rmtree(chain.folder / "two")
    assert chain.launch(lines.append) is None
    shutil.rmtree(chain.folder / "two")
    (chain.folder / "one/a").write_text("y")
    with pytest.raises(UserError, match="one/a must be as .* says, and has changed since"):
        chain.launch(lines.append)
    other = read_chain(written(tmp_path, {"one": {"run": f"python {script} {{here}} /etc/hostname"}}))
    assert other is not None
    with pytest.raises(UserError, match="was made with other command"):
        other.launch(lines.append)


def test_a_training_that_stopped_is_no_parent_and_does_not_resume_after_a_change(tmp_path, monkeypatch):
    """`training.stop_after` ends a run with status 0. Its folder has the facts that it began with."""
    keys = {"training.sequence_length": 8, "model.attention.heads": 2, "model.vocab_size": 64, "training.steps": 3}
    keys |= {"data.synthetic": "copy"}
    chain = read_chain(written(tmp_path, {"a": {"files": "base.yml", "set": keys}}))
    assert chain is not None
    lines, step = list[str](), 1
    monkeypatch.setattr(Chain, "_run", lambda *_: 0)
    monkeypatch.setattr(store, "find_checkpoint", lambda _: Path(f"step_{step:08d}"))
    assert chain.launch(lines.append) == "a" and "has stopped after 1 of 3 steps" in lines[-1]
    assert chain.state(chain.stages[0]) == "begun"
    other = read_chain(written(tmp_path, {"a": {"files": "base.yml", "set": {**keys, "training.steps": 2}}}))
    assert other is not None
    with pytest.raises(UserError, match="was made with other command"):
        other.launch(lines.append)
    step = 3
    (chain.folder / "a/config.yml").touch()
    assert chain.launch(lines.append) is None and chain.state(chain.stages[0]) == "done"


def test_one_process_does_the_stages_of_a_folder(tmp_path):
    chain = read_chain(written(tmp_path, {"a": {"run": "python -c pass"}}))
    assert chain is not None
    handle, _ = take(chain.folder / ".launch")
    assert handle is not None
    with pytest.raises(UserError, match=f"is in use by process {os.getpid()}"):
        chain.launch(print)
    os.close(handle)
    assert chain.launch(print) is None
