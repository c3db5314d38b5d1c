"""GPT-NeoX's folder of checkpoints is recognised: neither taken for nothing, nor written into."""

from __future__ import annotations

import pytest

from megatron.checkpoint import CheckpointError
from megatron.checkpoint.save.store import Store
from megatron.config import ConfigError, load
from megatron.config.foreign import neox_checkpoint
from tests.paths import ROOT


def folder(path, *steps: int, latest: str | None = None):
    """Files that GPT-NeoX leaves, with and without a pipeline."""
    for number, step in enumerate(steps):
        inside = path / f"global_step{step}"
        (inside / "configs").mkdir(parents=True)
        name = "mp_rank_00_model_states.pt" if number % 2 else "layer_00-model_00-model_states.pt"
        (inside / name).write_bytes(b"x")
    if latest:
        (path / "latest").write_text(latest + "\n")
    return path


def test_what_is_recognised(tmp_path):
    assert neox_checkpoint(folder(tmp_path / "a", 9, 100)).name == "global_step100"
    assert neox_checkpoint(folder(tmp_path / "b", 9, 100, latest="global_step9")).name == "global_step9"
    assert neox_checkpoint(tmp_path / "a" / "global_step9").name == "global_step9"
    assert neox_checkpoint(folder(tmp_path / "c", 3, latest="../../etc")).name == "global_step3"
    (tmp_path / "d" / "global_step1").mkdir(parents=True)
    assert neox_checkpoint(tmp_path / "d") is None and neox_checkpoint(tmp_path / "nowhere") is None
    assert neox_checkpoint(tmp_path) is None


@pytest.mark.parametrize("how", ["auto", "none", "path"])
def test_a_store_there_is_refused_and_left_alone(tmp_path, how):
    path = folder(tmp_path / "neox", 7, latest="global_step7")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="GPT-NeoX.*global_step7.*from-neox"):
        Store(path if how != "path" else tmp_path / "own").resume(how if how != "path" else str(path))
    with pytest.raises(CheckpointError, match="from-neox"):
        Store(tmp_path / "own").weights(path / "global_step7")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "keys",
    [
        {"load": "neox", "save": "neox"},
        {"load": "neox"},
        {"load": "neox", "finetune": True, "save": "new"},
        {"load": "neox", "finetune": True, "save": "neox"},
        {"save": "neox"},
    ],
    ids=str,
)
def test_load_and_save_of_its_own_files(tmp_path, monkeypatch, keys):
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "neox", 7, latest="global_step7")
    more = {"save": keys.get("save"), "checkpoint_factor": 10} if "save" in keys else {}
    text = "".join(
        f'"{key}": {str(value).lower() if value is True else value!r},\n' for key, value in {**keys, **more}.items()
    )
    base = (ROOT / "tests" / "checkpoint" / "neox_small.yml").read_text()
    (tmp_path / "run.yml").write_text("{" + text + base)
    with pytest.raises(ConfigError) as error:
        load(["run.yml"], ranks=1)
    said = [
        each
        for each in error.value.problems
        if "must not hold GPT-NeoX checkpoints" in each.rule and "global_step7" in each.rule
    ]
    assert said and all("from-neox neox/global_step7 OUT --config run.yml" in each.fix for each in said)
    how = {"checkpoint.initialize_from": "--weights, then checkpoint.initialize_from=OUT"}
    assert all(how.get(each.key, "then checkpoint.resume=OUT") in each.fix for each in said)
