"""Commands of a first user, and the messages about mistakes: names, options, keys, help and manifests."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
import yaml

from megatron.command.main import main
from megatron.config import ConfigError, load
from megatron.config.problems import UserError
from megatron.config.schema import lookup
from megatron.config.source.structure import ELSEWHERE
from megatron.installation import configuration_names
from megatron.launch import command_line, options
from megatron.worker.job import read_job
from tests.data.make import write_sizes
from tests.paths import ROOT

WITHOUT_SIZE = ("layouts/", "continual/", "test/tiny")  # parts, and models that read the vocabulary from a file
TINY = ["test/tiny_llama", "data.synthetic=copy", "launch.device=cpu"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["train", "llama3"], "llama/llama3_8b"),
        (["train", "nothinglikeit"], "deepy list"),
        (["train", "--gpus", "2", *TINY], "did you mean --ranks?"),
        (["train", *TINY, "--gpus", "2", "run.name=x"], "train.py has no option --gpus: did you mean --ranks?"),
        (["train", "--rank", "2", *TINY], "did you mean --ranks?"),
        (["train", "--nproc_per_node=2", *TINY], "did you mean --ranks?"),
        (["train", *TINY, "parallel.data=2"], "ranks / (tensor * pipeline * context)"),
        (["train", *TINY, "optimizer.learning_rate=1"], "did you mean optimizer.lr?"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_mistakes_name_what_was_meant(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(words)
    except SystemExit as end:  # argparse's own way
        status = end.code
    assert status == 2 and said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_names_of_others_stand_for_keys_and_options():
    for meant in ELSEWHERE.values():
        assert all(lookup(tuple(each.split("."))) for each in meant.split(" or ")), meant
    assert set(options.ELSEWHERE.values()) <= set(options.NAMES)


def test_list_has_every_ready_configuration(capsys):
    assert main(["list", "--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    left_out = {name for name in configuration_names() if name.rpartition("/")[2] in ("family", "suite")}
    assert found.keys() == set(configuration_names()) - left_out
    assert found["llama/llama3_8b"]["parameters"] == "8.03B"  # published as 8.03 billion
    assert all(row["parameters"] for name, row in found.items() if "/" in name and not name.startswith(WITHOUT_SIZE))
    assert main(["list", "llama3"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^llama/llama3_8b +8\.03B +119\.7 GiB +Llama 3 8B", shown, re.MULTILINE) and "pythia" not in shown
    assert main(["list", "nothinglikeit"]) == 2


@pytest.mark.parametrize("name", ["pythia/160m", "mixtral/8x7b", "rwkv7/0.1b"])
def test_sizes_of_the_list_are_what_the_layers_count(name, capsys):
    words = ["data.train=null", "data.synthetic=copy", "--json"]
    assert main(["config", "layers", name, *words]) == 0
    counted = json.loads(capsys.readouterr().out)["parameters"]
    assert json.loads((ROOT / "configs/sizes.json").read_text())[name] == counted


@pytest.mark.parametrize(
    ("which", "name", "column"),
    [
        ("optimizers", "lion", "4 bytes a parameter"),
        ("kinds", "moe", "ffn"),
        ("devices", "h100", "79.1 GiB"),
        ("tasks", "deepy_cloze", ""),
        ("runners", "slurm", ""),
    ],
)
def test_list_has_what_a_configuration_can_name(which, name, column, capsys):
    assert main(["list", which, name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("name") and lines[1].split()[0] == name and column in lines[1]
    assert main(["list", which, "--json"]) == 0
    assert name in {row["name"] for row in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("text", ["- a\n- b\n", "7\n", "training\n"])
def test_a_file_that_is_no_mapping_is_one_problem(tmp_path, text):
    (tmp_path / "a.yml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load([str(tmp_path / "a.yml")], [], ranks=1)
    assert [each.rule for each in caught.value.problems] == ["a configuration file is a mapping of sections"]


@pytest.mark.parametrize("name, option", [("evaluate", "--tasks"), ("extract", "--steps")])
def test_help_of_a_script_has_its_own_options(name, option, capsys):
    assert command_line.main([str(ROOT / f"{name}.py"), "--help"]) == 0
    assert option in capsys.readouterr().out
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert option in shown and "--hostfile" in shown


@pytest.mark.parametrize("name, option", [("train.py", "usage: python train.py a.yml"), ("evaluate.py", "--tasks")])
def test_help_of_a_script_that_is_a_rank_itself(name, option, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / name), "--help"])
    with pytest.raises(SystemExit) as end:
        read_job(environment={})
    assert end.value.code == 0 and option in capsys.readouterr().out
    with pytest.raises(UserError, match=f"no configuration file: usage: python {name} a.yml"):
        read_job([], {})


def test_a_rehearsal_without_torch_says_so(capsys, monkeypatch):
    monkeypatch.setattr("megatron.launch.command_line.find_spec", lambda name: None)
    assert main(["train", "--rehearse", "--ranks", "2", *TINY]) == 2
    assert "has no torch" in capsys.readouterr().err


def test_a_suite_takes_verb_and_file_in_either_order(capsys, tmp_path):
    files = {"files": [str(ROOT / "configs/test/tiny_llama.yml")], "axes": {"seed": {"a": {"training": {"seed": 1}}}}}
    (tmp_path / "s.yml").write_text(yaml.safe_dump({**files, "set": {"data.synthetic": "copy"}}))
    shown = []
    for words in (["plan", str(tmp_path / "s.yml")], [str(tmp_path / "s.yml"), "plan"]):
        main(["suite", *words])
        shown.append(capsys.readouterr())
    assert shown[0] == shown[1] and shown[0].out


def _manifest(capsys, *words: str) -> tuple[str, dict]:
    assert main(["train", "--ranks", "2", "--print", "k8s", *words, "launch.batch.nodes=2"]) == 0
    text = capsys.readouterr().out
    return text, list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"]


def test_a_manifest_runs_in_the_projects_image(capsys, tmp_path, monkeypatch):
    """The image has the code and the command. The volume has what the run reads and takes what it writes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yml").write_text(f"extends: {ROOT}/configs/test/tiny_llama.yml\nlaunch: {{device: cpu}}\n")
    write_sizes(tmp_path / "data" / "mine", [40] * 50)
    text, pod = _manifest(capsys, "my.yml", "data.synthetic=none", "data.train=[data/mine]")
    (ranks,) = pod["containers"]
    command = shlex.split(ranks["command"][2])
    assert command[command.index("--no-python") :][:4] == ["--no-python", "deepy", "train", "my.yml"]
    assert str(ROOT) not in text and ranks["workingDir"] == str(tmp_path)
    notes = [line for line in text.splitlines() if line.startswith("#")]
    assert any('"my.yml"' in line for line in notes) and any("data/mine.bin and .idx" in line for line in notes)
    assert {"mountPath": str(tmp_path), "name": "work"} in ranks["volumeMounts"] and pod["securityContext"]["fsGroup"]
    _, pod = _manifest(capsys, "test/tiny_llama", "data.synthetic=copy")
    assert " test/tiny_llama " in pod["containers"][0]["command"][2]


def test_a_printed_job_script_writes_where_a_folder_is(capsys, tmp_path, monkeypatch):
    """Slurm opens the output before the script runs."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--ranks", "2", "--print", "sbatch", *TINY]) == 0
    assert f"#SBATCH --output={tmp_path}/slurm-%j.out" in capsys.readouterr().out
