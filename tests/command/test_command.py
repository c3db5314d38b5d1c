"""The command `deepy` next to the scripts that it stands for: the same output, status and options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.command.verbs import find, verbs
from megatron.installation import configuration_file, configuration_names
from tests.paths import ROOT

RUN = "import sys; sys.argv[0] = 'deepy'; from megatron.command.main import main; sys.exit(main())"
TINY = ["test/tiny_llama"]


def python(*words: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def deepy(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
    return python("-c", RUN, *words, folder=folder)


def completed(line: str, folder: Path) -> list[str]:
    """Words that a shell may complete at the end of a line."""
    done = subprocess.run(
        ["bash", "-c", f'exec "{sys.executable}" -c "{RUN}" 8>&1 9>/dev/null >/dev/null'],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        },
    )
    assert done.stderr == ""
    return [word.strip() for word in done.stdout.split("\n")]


def test_every_tool_with_a_command_line_is_a_verb():
    scripts = {verb.script for verb in verbs() if verb.script}
    for path in (ROOT / "tools").rglob("*.py"):
        assert (path in scripts) == ('if __name__ == "__main__":' in path.read_text()), path
    assert {verb.name for verb in verbs()} >= {
        "train",
        "generate",
        "config",
        "doctor",
        "data tokenize",
        "checkpoint to-hf",
    }
    assert find(["checkpoint", "to_hf", "x"]) == find(["checkpoint", "to-hf"])  # as the file is called, too


def test_help_names_every_verb_and_shows_each_ones_options():
    done = deepy("--help")
    assert done.returncode == 0 and done.stderr == ""
    for verb in verbs():
        assert verb.words[-1] in done.stdout and len(verb.help) > 20
    assert deepy().returncode == 2
    shown = deepy("data", "tokenize", "--help")
    assert shown.returncode == 0 and shown.stdout.startswith("usage: deepy data tokenize ")
    shown = deepy("train", "--help")
    assert shown.stdout.startswith("usage: deepy train [options] a.yml") and "--hostfile" in shown.stdout
    assert "to-native" in deepy("checkpoint", "--help").stdout
    assert "only the same number of ranks can read them" in deepy("checkpoint", "to-native", "--help").stdout
    measuring = deepy("bench", "communication", "--help").stdout
    assert "--hosts" in measuring and "in the process groups of a run" in measuring


@pytest.mark.tour
def test_a_tool_does_the_same_under_both_names(tmp_path):
    words = ["layers", str(ROOT / "configs" / "pythia" / "70m.yml"), "tokenizer.type=none", "--json"]
    ours, script = deepy("config", *words, folder=tmp_path), python(str(ROOT / "tools" / "config.py"), *words)
    assert ours.returncode == script.returncode == 0
    assert ours.stdout == script.stdout and '"parameters": 70426624' in ours.stdout  # the published model's
    wrong = deepy("config", "check", "model.layers=attention", folder=tmp_path)
    assert wrong.returncode == 2 and "name one: a.yml" in wrong.stderr
    missing = deepy("checkpoint", "inspect", "nowhere", folder=tmp_path)
    assert missing.returncode == python(str(ROOT / "tools/checkpoint/inspect.py"), "nowhere").returncode != 0


@pytest.mark.parametrize(
    "words, told",
    [
        (["trian"], "did you mean 'train'?"),
        (["data", "tokenise"], "did you mean 'tokenize'?"),
        (["train", "pythia/70n"], "did you mean pythia/70m?"),
        (["train"], "no configuration file"),
        (["completion", "csh"], "bash|zsh|fish"),
    ],
)
def test_mistakes(words, told):
    done = deepy(*words)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


@pytest.mark.tour
def test_train_is_what_train_py_does(tmp_path):
    """A ready configuration by its name, options behind it, from another folder. The losses are equal to train.py's."""
    few = ["training.stop_at_step=3", "launch.device=cpu"]
    ours = deepy("train", *TINY, *few, "--ranks", "1", "run.dir=runs/a", folder=tmp_path)
    assert ours.returncode == 0, ours.stdout + ours.stderr
    file = str(ROOT / "configs" / "test" / "tiny_llama.yml")
    theirs = python(str(ROOT / "train.py"), file, *few, "run.dir=runs/b", folder=tmp_path)
    assert theirs.returncode == 0, theirs.stdout + theirs.stderr
    names = [tmp_path / "runs" / name / "metrics.jsonl" for name in "ab"]
    assert _losses(names[0]) == _losses(names[1]) and len(_losses(names[0])) == 3
    logs = deepy("logs", "runs/a", folder=tmp_path)
    assert logs.returncode == 0 and "[" in logs.stdout


def _losses(path: Path) -> list[str]:
    import json

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_configurations_are_found_by_name(tmp_path, monkeypatch):
    shipped = ROOT / "configs" / "pythia" / "70m.yml"
    monkeypatch.chdir(tmp_path)
    for word in ("pythia/70m", "pythia/70m.yml", "configs/pythia/70m.yml", "configs/pythia/70m"):
        assert configuration_file(word) == str(shipped)
    for word in ("pythia", "../pythia/70m", "/pythia/70m", "nothing", "", "."):
        assert configuration_file(word) is None
    (tmp_path / "pythia").mkdir()
    (tmp_path / "pythia" / "70m.yml").write_text("run: {name: mine}")
    assert configuration_file("pythia/70m") == "pythia/70m.yml"  # what is here comes first
    assert {"pythia/70m", "llama/3.1-8b", "layouts/bf16", "quickstart"} & set(configuration_names()) >= {"pythia/70m"}
    assert all(configuration_file(name) for name in configuration_names())


def test_completion(tmp_path):
    assert {"train", "config", "data", "checkpoint", "completion"} <= set(completed("deepy ", tmp_path))
    assert completed("deepy data tok", tmp_path) == ["tokenize"]
    assert completed("deepy data tokenize --inp", tmp_path) == ["--input"]
    assert completed("deepy train --hostf", tmp_path) == ["--hostfile"]
    assert completed("deepy config ch", tmp_path) == ["check"]
    assert "pythia/160m" in completed("deepy train pythia/1", tmp_path)
    assert "optimizer.lr=" in completed("deepy config check a.yml optimizer.l", tmp_path)
    (tmp_path / "mine.yml").write_text("")
    assert completed("deepy train mine", tmp_path) == ["mine.yml"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_register_the_command(shell):
    done = deepy("completion", shell)
    assert done.returncode == 0 and "deepy" in done.stdout and "_ARGCOMPLETE" in done.stdout


def test_help_loads_neither_torch_nor_the_configuration():
    """A shell calls `deepy` at every press of the tabulator."""
    code = f"{RUN.replace('sys.exit(main())', 'main()')}; print(sorted(sys.modules), file=sys.stderr)"
    for words in (["--help"], ["report", "--help"], ["status", "nowhere"]):
        loaded = python("-c", code, *words).stderr
        for name in ("torch", "deepspeed", "numpy", "pydantic", "yaml", "transformers"):
            assert f"'{name}'" not in loaded
    code = f"{RUN.replace('sys.exit(main())', 'main()')}; print('torch' in sys.modules, file=sys.stderr)"
    done = python("-c", code, "config", "check", *TINY)
    assert done.stderr.splitlines()[-1] == "False", done.stderr
    assert deepy("--help").returncode == 0
