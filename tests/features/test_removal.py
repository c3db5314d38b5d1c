"""A feature is removed as a folder and a line of the registry. Without these features a plain run is as before."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

from megatron.config import resolve
from megatron.config.features.feature import features_of
from megatron.config.registry import FEATURE, INSIDE
from megatron.config.show.reference import pages
from megatron.config.tree import thaw
from megatron.testing import train_on_ranks
from tests.paths import ROOT

# Of each feature a configuration that asks for it, and the key that is then unknown.
REMOVED = {
    "adapters": ("adapter: {type: lora}", "adapter"),
    "align": ("align: {environment: addition, rewards: [{type: exact}]}", "align"),
    "audit": ("training: {audit: 1}", "training.audit"),
    "hashes": ("training: {hashes: 1}", "training.hashes"),
    "multi_token": ("model: {multi_token_prediction: {depth: 1}}", "model.multi_token_prediction"),
    "noise_scale": ("logging: {noise_scale: 1}", "logging.noise_scale"),
    "peer_gradients": ("peers: {every: 1, algorithm: gradients}", "peers"),
    "peers": ("peers: {every: 2}", "peers"),
    "pruning": ("pruning: {keep: 0.1}", "pruning"),
    "spikes": ("spikes: {action: skip}", "spikes"),
    "statistics": ("logging: {statistics: 1}", "logging.statistics"),
}
REMOVED = {name: how for name, how in REMOVED.items() if name in INSIDE[FEATURE]}  # one may be gone for good
FOLDERS = {name: INSIDE[FEATURE][name].split(".")[2] for name in REMOVED}
NEEDS = {"integrity": ("spikes",), "noise_scale": ("spikes",)}  # folders that a feature imports
PLAIN = {
    "run": {"name": "plain", "dir": "runs/plain"},
    "model": {"layers": "(attention/mlp) x2", "hidden_size": 16, "vocab_size": 64, "attention": {"heads": 2}},
    "training": {"steps": 2, "sequence_length": 16, "global_batch_size": 2},
    "data": {"synthetic": "copy"},
    "logging": {"console": "quiet", "curve": False, "predictions": False},
    "evaluation": {"at_end": False},
}
WITHOUT = """
import json, os, sys
from pathlib import Path
import torch
from megatron.config import ConfigError, load
from megatron.config.show.reference import pages
from megatron.config.tree import thaw
from megatron.testing.runs import train_on_this_rank

folder = Path(sys.argv[1])
os.environ["LOCAL_RANK"] = "0"
plain = folder / "plain.json"
problems = {}
for more in sorted(folder.glob("asks_for_*.yml")):
    try:
        load([str(plain), str(more)], ranks=1)
    except ConfigError as error:
        problems[more.stem] = str(error)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
records = train_on_this_rank({**json.loads(plain.read_text()), "run": {"dir": str(folder / "run")}}, [], 1)
print(json.dumps({
    "problems": problems,
    "losses": [record["loss"] for record in records if "loss" in record],
    "pages": pages(),
    "resolved": thaw(load([str(plain)], ranks=1).config.model_dump(mode="json")),
}))
"""


def without_lines(text: str) -> str:
    """The registry without the lines of these features."""
    for name in REMOVED:
        text, count = re.subn(rf'^ +"{name}": "megatron\.features\.\w+\.options:\w+",\n', "", text, flags=re.M)
        assert count == 1, name
    return text


@pytest.fixture(scope="module")
def without(tmp_path_factory) -> dict:
    """Results of the package after these features were removed."""
    folder = tmp_path_factory.mktemp("without")
    shutil.copytree(ROOT / "megatron", folder / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "eval_tasks").symlink_to(ROOT / "eval_tasks")
    for name in set(FOLDERS.values()):
        shutil.rmtree(folder / "megatron/features" / name)
    for name in REMOVED:
        (folder / f"asks_for_{name}.yml").write_text(REMOVED[name][0])
    registry = folder / "megatron/config/registry.py"
    registry.write_text(without_lines(registry.read_text()))
    (folder / "plain.json").write_text(json.dumps(PLAIN))
    done = subprocess.run([sys.executable, "-c", WITHOUT, folder], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_plain_run_is_the_same(without, tmp_path):
    records = train_on_ranks(1, {**PLAIN, "run": {"dir": str(tmp_path)}})
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 2 and without["losses"] == losses


def test_only_their_keys_are_gone(without):
    whole = thaw(resolve(PLAIN, ranks=1).model_dump(mode="json"))
    for keys in (keys for name in REMOVED for keys in features_of()[name].keys):
        section = whole[keys.section] if keys.section else whole
        for name in keys.fields.model_fields:
            del section[name]
    assert json.dumps(whole) == json.dumps(without["resolved"])


def test_pages_of_the_reference_are_made_without_them(without):
    own = {name for each in REMOVED for keys in features_of()[each].keys if not keys.section
           for name in keys.fields.model_fields}  # fmt: skip
    whole, left = (re.findall(r"^## (\w+)$", "\n".join(made.values()), re.M) for made in (pages(), without["pages"]))
    assert own and left == [each for each in whole if each not in own]


@pytest.mark.parametrize("name", REMOVED)
def test_their_keys_are_ordinary_unknown_keys(without, name):
    line, key = REMOVED[name]
    found = without["problems"][f"asks_for_{name}"]
    assert found.startswith("1 problem in the configuration") and f"asks_for_{name}.yml:1: {key} = " in found
    section = key.rpartition(".")[0] or "the configuration"
    assert f"rule: unknown key in {section}\n" in found and "fix:" in found


def test_only_a_feature_and_its_tests_import_it():
    names = "|".join(set(FOLDERS.values()))
    imports = re.compile(rf"megatron[./]features[./]({names})\b")
    wrong = []
    for path in [
        *ROOT.glob("megatron/**/*.py"),
        *ROOT.glob("tests/**/*.py"),
        *ROOT.glob("tools/**/*.py"),
        *ROOT.glob("bench/**/*.py"),
    ]:
        own = path.relative_to(ROOT).parts
        inside = own[2] if own[1] == "features" else ""  # the folder of a feature, or of its tests
        for name in imports.findall(path.read_text(encoding="utf-8")):
            known = own[-1] == "registry.py" or name in (inside, *NEEDS.get(inside, ()))
            typed = own[1:3] == ("config", "sections")  # for type checkers
            measures = own[0] == "bench"
            wrong += [] if known or typed or measures else [f"{'/'.join(own)} imports {name}"]
    assert not wrong, "\n".join(wrong)


def test_every_feature_inside_is_removed_here():
    assert set(REMOVED) == set(features_of())
