"""The quick start as a user has it, scaled down: what it makes, what it keeps, what it says, and that it can fail."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron.config import load
from megatron.data.corpus.registry import prepare
from megatron.model.costs.describe import totals
from tests.data.make import write_documents
from tests.paths import ROOT
from tools.quickstart import MODELS, Record, digest, unigram_entropy

SMALL = [
    "--documents",
    "300",
    "--vocabulary",
    "1024",
    "--validation",
    "0.3",
    "training.sequence_length=128",
    "model.hidden_size=64",
    "optimizer.lr=1e-2",
    "evaluation.every=null",
    "evaluation.batches=20",
    "checkpoint.every=null",
    "logging.every=20",
]


LAYERS = {
    "pythia": "(attention/mlp) x2",
    "rwkv7": "(rwkv7/rwkv7_ffn) x2",
    "mamba2": "mamba2 x2",
    "hybrid": "rwkv7/mlp attention@local/mlp",
}


def quickstart(folder: Path, *words: str, model: str = "pythia") -> subprocess.CompletedProcess:
    places = ["--data", folder / "data", f"run.dir={folder / 'run'}", "--model", model, f"model.layers={LAYERS[model]}"]
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "quickstart.py", *places, *SMALL, *words],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=900,
    )


@pytest.mark.tour
def test_quickstart(tmp_path):
    """Another stack, too few steps: it fails and says why. More: data and the old run are kept. Again: nothing is
    repeated.
    """
    short = quickstart(tmp_path, "training.steps=2", model="rwkv7")
    assert short.returncode == 1 and "NOT far below" in short.stdout and "What next?" not in short.stdout, short.stderr
    assert "configs/quickstart_rwkv7.yml" in short.stdout
    run = tmp_path / "run"
    assert (run / "checkpoints" / "step_00000002").is_dir()

    learned = quickstart(tmp_path, "training.steps=200")
    assert learned.returncode == 0, learned.stdout + learned.stderr
    assert learned.stdout.count("done before") == 4 and "prepare.py" not in learned.stdout
    assert (tmp_path / "run.1" / "checkpoints" / "step_00000002").is_dir()  # moved aside, not lost
    assert "data 2, ZeRO 1" in learned.stdout or "1 x " in learned.stdout
    assert "--- sample 4" in learned.stdout and "What next?" in learned.stdout
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"report            {run}/report.html" in learned.stdout and (run / "report.html").stat().st_size > 10**5
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = [each["validation"]["validation"]["loss"] for each in records if "validation" in each][-1]
    entropy = min(independent_entropy(tmp_path / "data" / part) for part in ("train", "validation"))
    assert loss < 0.8 * entropy
    assert f"validation loss   {loss:.4f}" in learned.stdout

    stamp = (run / "metrics.jsonl").stat().st_mtime_ns
    again = quickstart(tmp_path, "training.steps=200")
    assert again.returncode == 0 and again.stdout.count("done before") == 5 and "\n$ " not in again.stdout
    assert (run / "metrics.jsonl").stat().st_mtime_ns == stamp
    assert _written(again.stdout) == _written(learned.stdout)


@pytest.mark.slow  # `test_quickstart` starts it, and that it learns what one process does is seen on every layout
def test_another_stack_learns(tmp_path):
    done = quickstart(tmp_path, "training.steps=120", model="rwkv7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "configs/quickstart_rwkv7.yml" in done.stdout and "--- sample 4" in done.stdout


@pytest.mark.parametrize("model", MODELS)
def test_every_stack_is_a_configuration(model: str):
    path = ROOT / "configs" / f"{MODELS[model]}.yml"
    config = load([path], ["model.vocab_size=4096"], ranks=2, check_inputs=False).config
    assert 1.5e6 < totals(config).parameters < 6e6 and config.run.dir == f"runs/{path.stem}"
    kinds = {"pythia": ["attention"], "hybrid": ["rwkv7", "attention"]}.get(model, [model])
    assert all(kind in config.model.layers for kind in kinds)


def test_one_line_makes_it_another_model():
    for layers in ("(rwkv7/rwkv7_ffn) x6", "mamba2 x6", "(rwkv7/mlp) x6"):
        changes = [f"model.layers={layers}", "model.vocab_size=4096"]
        resolved = load([ROOT / "configs" / "quickstart.yml"], changes, ranks=2, check_inputs=False)
        assert totals(resolved.config).parameters > 1e6 and not resolved.warnings


def _written(output: str) -> str:
    """The samples that were shown."""
    shown = output[output.index("--- sample 1") : output.index("\nResult")]
    return shown.partition("\n$ ")[0].rstrip()  # the first time a report is made after them


def independent_entropy(prefix: Path) -> float:
    """The entropy in nats per token, by counting in plain Python."""
    counts = Counter(np.fromfile(f"{prefix}.bin", dtype=np.uint16).tolist())
    total = sum(counts.values())
    return math.log(total) - sum(count * math.log(count) for count in counts.values()) / total


def test_entropy_of_known_tokens(tmp_path):
    write_documents(tmp_path / "even", [[0, 1, 2, 3], [3, 2, 1, 0]])
    assert unigram_entropy(tmp_path / "even") == pytest.approx(math.log(4), rel=1e-12)
    write_documents(tmp_path / "one", [[7, 7, 7]])
    assert unigram_entropy(tmp_path / "one") == 0


def test_validation_texts_are_not_in_the_training_texts(tmp_path):
    """A documentation text is part of its module's source: both have to be on one side."""
    files = prepare("stdlib", tmp_path, 0.3, limit=200)["files"]
    sides = {part: [json.loads(line) for line in open(file["path"], encoding="utf-8")] for part, file in files.items()}
    modules = {part: {each["name"].partition(":")[0] for each in records} for part, records in sides.items()}
    assert len(modules["train"]) > 10 and len(modules["validation"]) > 5
    assert not modules["train"] & modules["validation"]
    assert any(":" in each["name"] for each in sides["validation"])


def test_a_step_is_done_again_when_something_changed(tmp_path):
    output, given = tmp_path / "out", tmp_path / "in"
    output.write_text("abc")
    given.write_text("1")
    Record(tmp_path / "steps.json").put("step", digest("command", given), [output])
    record = Record.load(tmp_path / "steps.json")
    assert record.holds("step", digest("command", given), [output])
    assert not record.holds("step", digest("other command", given), [output])
    given.write_text("2")
    assert not record.holds("step", digest("command", given), [output])
    given.write_text("1")
    output.write_text("cut off"[:2])
    assert not record.holds("step", digest("command", given), [output])
    output.unlink()
    assert not record.holds("step", digest("command", given), [output])
