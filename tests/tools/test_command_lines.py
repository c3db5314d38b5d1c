"""Unread words of a command line, and impossible numbers: a sentence, status 2, nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.scripts import script

TINY = ROOT / "configs" / "test" / "tiny_llama.yml"
HUGE = 5000 * "9"  # more digits than Python reads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("command_lines")
    (made / "run").mkdir()
    (made / "suite.yml").write_text(f"name: few\nconfigs: [{TINY}]\n")
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 16}
    steps = {"max_position_embeddings": 16, "train_iters": 1, "train_micro_batch_size_per_gpu": 1}
    flat = {**sizes, **steps, "optimizer": {"type": "Adam", "params": {"lr": 0.001}}}
    (made / "flat.yml").write_text(json.dumps(flat))
    (made / "points.csv").write_text("run,parameters,tokens,loss\n")
    markers = [f"<!-- {name} --> <!-- /{name} -->" for name in ("support summary", "support table")]
    (made / "README.md").write_text(" ".join(markers))
    return made


CASES = {
    "checkpoint/diff.py": [(["a", "b", "--tolerance", "nan"], "--tolerance must be 0 or more")],
    "checkpoint/to_hf.py": [
        (["run", "out", "--shard-size", "nan"], "--shard-size must be"),
        (["run", "out", "--shard-size", "0"], "--shard-size must be"),
    ],
    "data/batch.py": [
        (["run", "--step", "3", "--to", "2"], "3 to 2 are no steps"),
        (["run", "--step", "-1"], "-1 to -1 are no steps"),
    ],
    "data/curate.py": [
        (["fineweb", "--source", "web", "--check"], "'web' is not NAME=PATH"),
        (["fineweb", "--source", "web=x", "--workers", "0", "--check"], "workers must be a whole number of at least 1"),
    ],
    "data/mixture.py": [
        (["show", "run", "--cap", "2"], "--cap must be omitted: show does not read it"),
        (["show", "run", "other"], "it takes one name, not 2"),
        (["weigh", "web=web", "--temperature", "nan"], "--temperature: it must be a number above 0"),
        (["weigh", "web"], "must be different names with values"),
        (["propose", "web=web", "--count", "0"], "--count: it must be a number above 0"),
        (["fit", "nowhere.yml"], "nowhere.yml"),
    ],
    "data/prepare.py": [(["english", "--limit", "0"], "0 is no number of documents")],
    "data/train_tokenizer.py": [
        (["--input", "flat.yml", "--output", "t.json", "--limit", "nan"], "nan is no number of bytes"),
        (["--input", "flat.yml", "--output", "t.json", "--limit", "0"], "0 is no number of bytes"),
    ],
    "moe/trace.py": [
        (["run", "--samples", "0"], "--samples at least 1"),
        (["run", "--step", "-1"], "--step must be"),
        (["run", "--hosts", "2"], "--hosts needs"),
    ],
    "canaries.py": [
        (["out", "--texts", "0"], "--texts must be from 1 to"),
        (["out", "--texts", "10" + "0" * 9], "--texts must be from 1 to"),
        (["out", "--texts", HUGE], "--texts"),
        (["out", "extra"], "extra"),
    ],
    "chaos.py": [
        ([TINY, "--minutes", "nan"], "--minutes must be"),
        ([TINY, "--steps", "0"], "--steps at least three times"),
        ([TINY, "--ranks", "-1"], "--ranks must be at least 1"),
        ([TINY, "--only", "nothing"], "must be one of"),
        ([TINY, "extra"], "extra"),
    ],
    "communication.py": [
        ([TINY, "--ranks", "2", "--step", "3"], "--step must be omitted: a prediction does not read it"),
        ([TINY, "--ranks", "2", "--output", "x.png"], "--output must be omitted"),
        ([TINY, "--ranks", "0"], "--ranks must be from 1"),
        ([TINY, "--ranks", HUGE], "--ranks"),
        (["run", "--ranks", "2"], "--ranks must be omitted: the account of a run does not read it"),
    ],
    "compare.py": [(["run", "other", "--output", ""], "no metrics"), (["run"], "two or more")],
    "config.py": [
        (["docs", "extra"], "unrecognized"),
        (["check", TINY, "extra"], "extra"),
        (["check", "--ranks", "0", TINY], "number of ranks"),
        (["convert", "flat.yml", "-o", "run"], "it must be a file"),
        (["coordinate-check", TINY, "--widths", "64,64"], "two different sizes"),
        (["show", TINY, "--widths", "64,128"], "unrecognized"),
    ],
    "continual.py": [
        (["--divide", "0"], "must be a whole number of at least 1"),
        (["--divide", "-2"], "--divide"),
        (["--documents", "0"], "must be a whole number of at least 1"),
        (["--seeds", "1,1"], "must be different whole numbers"),
        (["--seeds", ""], "must be different whole numbers"),
        (["--seeds", "nan"], "must be different whole numbers"),
    ],
    "doctor.py": [(["--timeout", "nan"], "--timeout must be"), (["--ssh-port", "0"], "--ssh-port"), (["x"], "x")],
    "fork.py": [
        (["run", "--at", "0", "--steps", "1"], "at least 1"),
        (["run", "--at", "5", "--steps", "nan"], "--steps"),
        (["run", "--at", "5", "--steps", "5", "x"], "x"),
    ],
    "memorisation.py": [(["run", "--predict"], "at least two"), (["run"], "error")],
    "profile.py": [(["run", "extra"], "extra"), (["run", "--output", ""], "run")],
    "quickstart.py": [
        (["--vocabulary", "0"], "at least 1"),
        (["--validation", "nan"], "between 0 and 1"),
        (["--validation", "1"], "between 0 and 1"),
        (["--documents", "-1"], "at least 1"),
        (["extra"], "must be key.path=value"),
        (["training.stepz=5", "--data", "new"], "stepz"),
    ],
    "report.py": [(["run", "--nothing"], "--nothing"), (["nowhere"], "nowhere")],
    "suite.py": [
        (["suite.yml", "plan", "--jobs", "2"], "--jobs must be omitted: plan does not read it"),
        (["suite.yml", "launch", "--json"], "--json must be omitted"),
        (["suite.yml", "launch", "--sbatch=--x"], "--sbatch must be omitted: launch without --slurm"),
        (["suite.yml", "launch", "--slurm", "--index", "1"], "--index must be omitted: launch --slurm"),
        (["suite.yml", "launch", "--jobs", "0"], "--jobs must be at least 1"),
        (["suite.yml", "fit", "--resamples", "1" + "0" * 12], "--resamples must be from 0 to"),
        (["points.csv", "fit", "--validation", "x"], "--validation must be omitted: fit of a table"),
        (["points.csv", "fit", "--picture", "points.csv"], "written over"),
        (["suite.yml", "train"], "invalid choice"),
    ],
    "support_table.py": [(["README.md", "nowhere.md"], "nowhere.md"), (["--help-me"], "--help-me")],
    "verify_resume.py": [
        ([TINY, "--ranks", "0"], "--ranks must be at least 1"),
        ([TINY, "--at", "-1"], "--at from 1"),
        ([TINY, "--other", ""], "must begin with a number"),
        ([TINY, "extra"], "extra"),
    ],
}


@pytest.mark.parametrize(
    ("tool", "words", "said"), [(tool, words, said) for tool, cases in CASES.items() for words, said in cases]
)
def test_nothing_is_left_out_without_a_word(folder: Path, tool: str, words: list, said: str):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = script(tool, *words, folder=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
