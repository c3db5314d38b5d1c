"""The example of an outside package, copied out of the tree: its own tests pass, and it trains by the real commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from megatron.config import ConfigError, load, read_resolved, save_resolved
from megatron.config.show.reference import explain
from tests.paths import ROOT

pytestmark = pytest.mark.tour


@pytest.fixture
def package(tmp_path):
    """The package's folder, outside of the tree."""
    ignored = shutil.ignore_patterns("__pycache__", ".pytest_cache")
    return shutil.copytree(ROOT / "examples" / "plugin", tmp_path / "plugin", ignore=ignored)


def run(*command, package, found: bool = True) -> subprocess.CompletedProcess:
    path = [str(ROOT), *([str(package)] if found else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=package, env=environment, capture_output=True, text=True
    )


def test_its_own_tests_pass(package):
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", package=package)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_helper_sees_a_layout_that_differs(package):
    """The decays of heads numbered on each rank by itself instead of over all: tensor parallel ranks then differ."""
    layer = package / "my_lab" / "retention" / "layer.py"
    text = layer.read_text()
    assert "first = self.mesh.tensor.rank * self.heads" in text
    layer.write_text(text.replace("first = self.mesh.tensor.rank * self.heads", "first = 0"))
    done = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", "-k", "test_layouts and tensor", package=package
    )
    assert done.returncode == 1 and "the gradient's relative error is" in done.stdout, done.stdout


def test_commands_know_it(package, tmp_path):
    """A run with its layer, optimizer, hook and runner. Its checkpoint names the package. Tools know the options."""
    done = run(
        ROOT / "deepy.py", ROOT / "train.py", "retention.yml", f"run.dir={tmp_path / 'run'}", "launch.ranks=2",
        "parallel.tensor=2", "training.steps=3", "optimizer.type=qhadam", "optimizer.options={nu1: 0.8}",
        "hooks=[{type: weights, options: {parameters: ['*norm*'], every: 3}}]", "checkpoint.every=3",
        "tokenizer.type=bytes", "model.vocab_size=512", "launch.runner=nice", package=package,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runner nice (launch.runner says so)" in done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in records if "loss" in each] == [0, 1, 2]
    (sizes,) = [each for each in records if "weights" in each]
    assert sizes["step"] == 3 and all(each["largest"] > 0.5 for each in sizes["weights"].values())
    command = (ROOT / "generate.py", tmp_path / "run", "--prompt", "one", "--tokens", "4")
    refused = run(*command, package=package)
    assert refused.returncode == 2 and "--extensions my_lab" in refused.stderr, refused.stderr
    command = (*command, "--extensions", "my_lab")
    found = run(*command, package=package)
    assert found.returncode == 0, found.stderr
    lost = run(*command, package=package, found=False)
    assert lost.returncode != 0 and "module my_lab must be found by Python" in lost.stderr, lost.stderr + lost.stdout


def test_mistakes_are_told_before_anything_starts(package, tmp_path):
    """A package's rules, and its names in place of those inside, with one that is near."""
    words = ("model.retention.heads=5", "optimizer.type=qhadan", "hooks=[weight]", f"run.dir={tmp_path / 'run'}")
    done = run(ROOT / "deepy.py", ROOT / "train.py", "retention.yml", "launch.ranks=1", *words, package=package)
    assert done.returncode == 2 and not (tmp_path / "run").exists(), done.stderr
    for said in ("heads * head_dim must be model.hidden_size", "qhadam", "weights"):
        assert said in done.stderr


def test_the_tools_know_it(package):
    config = ROOT / "tools" / "config.py"
    layers = json.loads(run(config, "layers", "retention.yml", "--json", package=package).stdout)
    assert layers["parameters"] > 0
    key = run(config, "explain", "model.retention.head_dim", "retention.yml", package=package).stdout
    assert "= 8" in key and "derived: model.hidden_size / model.retention.heads" in key
    # Shown by a process that prints whether torch was imported: the package's options must not need it.
    script = "import runpy, sys; sys.argv = sys.argv[1:]\ntry: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    script += "finally: print('torch' in sys.modules)"
    words = ("optimizer.type=qhadam", "hooks=[weights]")
    shown = run("-c", script, config, "show", "retention.yml", *words, package=package).stdout
    assert "extensions: [my_lab]" in shown and "slowest: 5.0" in shown and "type: qhadam" in shown
    assert shown.endswith("False\n")


def test_an_installed_package_need_not_be_listed(package, monkeypatch):
    info = package / "my_lab-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-lab\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[deepy.kind]\nretention = my_lab\n")
    monkeypatch.syspath_prepend(package)
    text = (package / "retention.yml").read_text().replace("  extensions: [my_lab]\n", "")
    (package / "plain.yml").write_text(text)
    resolved = load([str(package / "plain.yml")], [], ranks=1, check_inputs=False)
    assert resolved.config.model.extensions == ["my_lab"] and resolved.config.model.retention.head_dim == 8
    assert "offer" in str(resolved.origins["model.extensions"])
    assert explain("model.retention.heads", resolved)[0].value == 4
    save_resolved(resolved, package / "resolved.yml")
    assert read_resolved(package / "resolved.yml") == resolved.config
    with pytest.raises(ConfigError, match="no such key"):
        explain("model.retention.heads", None)
