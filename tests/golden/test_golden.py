"""Configurations, models and checkpoints are what they were: see `make.py` for what was written, and by what."""

from __future__ import annotations

import io
import json
import lzma
import subprocess
import sys
import tarfile

import pytest
import yaml

from megatron.config import read_resolved
from tests.golden import make
from tests.paths import ROOT

OTHER_DEFAULT = {"model.moe.losses.balance", "training.loss_chunk"}  # compared where somebody gives it
GONE = {f"checkpoint.{key}" for key in ("upload", "upload_every", "upload_keep_last")}  # a level of `checkpoint.levels`
NOW_DERIVED = {"parallel.context": "derived: parallel.folded"}  # defaults that follow from a key that came later
CASES, RESOLVED, MODELS = make.read("cases"), make.read("resolved"), make.read("models")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Cases name files of the quick start, and what is resolved depends on whether they are there."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", RESOLVED)
def test_resolved_configurations_are_equal(name):
    """In values, origins and order. Keys that came later are omitted."""
    wanted = [
        [key, value, NOW_DERIVED.get(key, origin) if origin == "default" else origin]
        for key, value, origin in RESOLVED[name]
        if key not in OTHER_DEFAULT | GONE or origin != "default"
    ]
    known = {line[0] for line in wanted}
    ranks = 1 if name in MODELS else None
    assert [line for line in make.resolved(CASES[name], ranks) if line[0] in known] == wanted


@pytest.mark.parametrize("name", MODELS)
def test_models_are_equal(name):
    """In names, order, shapes, roles, shards and types. Sums of initial values to six digits."""
    found, wanted = make.tensors(CASES[name]), MODELS[name]
    assert [tensor[:-1] for tensor in found] == [tensor[:-1] for tensor in wanted]
    for (tensor, *_, sums), (*_, old) in zip(found, wanted):
        assert sums == pytest.approx(old, rel=1e-6, abs=1e-6 * old[1]), tensor


@pytest.fixture
def old_run(tmp_path):
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress((make.FOLDER / "run.tar.xz").read_bytes()))) as archive:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not before Python 3.11.4
        archive.extractall(tmp_path / "run", **safe)
    return tmp_path / "run"


def test_an_old_resolved_configuration_is_read(old_run):
    config = read_resolved(old_run / "config.yml")
    assert config.model.gated_delta.key_dim == 4 and config.model.rwkv7_ffn.hidden_size == 12


def test_an_old_checkpoint_is_resumed(old_run, tmp_path):
    """Steps 3 to 5 from the checkpoint after step 2, against what the old code did. Every family of kinds is in it."""
    old = make.read("run")
    (tmp_path / "run.yml").write_text(yaml.safe_dump(old["values"]))
    command = [sys.executable, "deepy.py", "train.py", tmp_path / "run.yml", f"run.dir={old_run}", "launch.ranks=1"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [json.loads(line) for line in (old_run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [3, 4, 5]
    for found, wanted in zip(steps, old["steps"][3:]):
        assert found["batch_hash"] == wanted["batch_hash"] and found["lr"] == wanted["lr"]
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
