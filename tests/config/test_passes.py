"""Steps against data: how often a run reads its files, before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron.config import ConfigError, load
from tests.data.make import write_documents
from tests.paths import ROOT

BATCH = ["training.global_batch_size=8", "training.micro_batch_size=1", "training.sequence_length=128"]


@pytest.fixture
def files(tmp_path):
    """A configuration that reads 1,024 tokens and 512 tokens."""
    for name, documents in (("a", 16), ("b", 8)):
        write_documents(tmp_path / name, [list(range(64))] * documents)
    (tmp_path / "a.yml").write_text(
        "extends: " + str(ROOT / "configs/test/tiny_llama.yml") + "\n"
        f"data: {{synthetic: none, train: [{{path: {tmp_path}/a, weight: 3}}, {{path: {tmp_path}/b, weight: 1}}]}}\n"
        "checkpoint: {every: null}\nevaluation: {every: null}\nlaunch: {device: cpu}\n"
        f"run: {{dir: {tmp_path}/run}}\n"
    )
    return tmp_path


def resolved(files, steps, **options):
    return load([files / "a.yml"], [*BATCH, f"training.steps={steps}"], ranks=1, **options)


@pytest.mark.parametrize("steps, warned", [(10, False), (53, False), (60, True)])
def test_many_passes_are_a_warning(files, steps, warned):
    """A step reads 1,024 tokens, 768 of them of the file of 1,024: 40 passes are 53.3 steps."""
    found = [each for each in resolved(files, steps).warnings if each.key == "training.steps"]
    assert bool(found) == warned
    if found:
        assert "45 passes over the source that is read most often" in found[0].rule and "5 steps" in found[0].fix


def test_absurdly_many_are_refused_wherever_a_run_is_prepared(files):
    with pytest.raises(ConfigError, match="tokens must not be .* passes"):
        resolved(files, 2_000_000)
    with pytest.raises(ConfigError, match="tokens must not be .* passes"):
        resolved(files, 2_000_000, here=False)
    resolved(files, 2_000_000, check_inputs=False)
    for words in (["--dry-run"], ["--ranks", "1", "--sbatch"]):
        done = subprocess.run(
            [sys.executable, "deepy.py", *words, "train.py", str(files / "a.yml"), *BATCH, "training.steps=2000000"],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 2 and "must not be" in done.stderr and not done.stdout


def test_phases_are_counted_by_their_steps(files):
    phase = f"data.phases=[{{start: 10, sources: [{files}/b]}}]"
    found = load([files / "a.yml"], [*BATCH, "training.steps=40", phase], ranks=1).warnings
    assert "60 passes: data.phases.0.sources has 512 tokens" in " ".join(each.rule for each in found)


def test_check_says_passes_and_device_hours(files):
    command = [sys.executable, "tools/config.py", "check", str(files / "a.yml"), *BATCH, "training.steps=20"]
    done = subprocess.run([*command, "--ranks", "1"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "20 steps = 20,480 tokens = 15 passes over the training data" in done.stdout
    document = subprocess.run(
        [*command, "--ranks", "64", "--gpu", "h100", "launch.device=auto", "training.global_batch_size=64", "--json"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(document.stdout)
    assert found["tokens"] == 20 * 64 * 128 and found["passes"] == pytest.approx(120)
    assert found["gpu_hours"] == pytest.approx(found["seconds"] * 64 / 3600) and found["seconds"] > 0
