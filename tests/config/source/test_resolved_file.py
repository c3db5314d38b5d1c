"""The resolved configuration as a file: exact to the last digit, honest about origins, and closed to edits."""

from __future__ import annotations

import copy
import hashlib
import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import Config, ConfigError, config_hash, load, read_resolved, resolve, save_resolved, to_yaml
from megatron.config.resolution import combine
from megatron.config.source.layers import ConfigSource
from megatron.config.source.resolved_file import scalar
from megatron.config.source.yaml_source import parse
from tests.config.test_merge import BASE


def resolved(**sections):
    return combine([ConfigSource({**copy.deepcopy(BASE), **sections})], ranks=2, check_inputs=False)


def test_round_trip(tmp_path):
    one = resolved(
        optimizer={"lr": 0.1 + 0.2, "epsilon": 1e-8, "betas": [0.9, 0.999999999999]},
        run={"notes": "a: b # c\n\t\x07é"},
        deepspeed={"a b": [1, {"y": None, "no": "no", "1e3": [[], {}, [1, [2]]]}], "empty": {}},
        checkpoint={"steps": [1, 2]},
        data={"synthetic": "copy", "validation": {"yes": [{"path": "x y", "weight": 1e-20}]}},
    )
    save_resolved(one, tmp_path / "deep" / "config.yml")
    assert read_resolved(tmp_path / "deep" / "config.yml") == one.config
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["config.yml"], "no temporary file stays"
    assert yaml.safe_load((tmp_path / "deep" / "config.yml").read_text()) == _plain(one.config.model_dump()), (
        "YAML 1.1 reads the same"
    )


def _plain(value):
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def test_origins_stand_beside_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yml").write_text(
        "model: {layers: attention/mlp, hidden_size: 8, vocab_size: 9, attention: {heads: 2}}\n"
        "training: {steps: 3,\n  sequence_length: 4}\ndata: {synthetic: copy}\n"
    )
    text = to_yaml(load(["a.yml"], ["zero.stage=0"], ranks=1))
    lines = {line.split("  #")[0].strip(): line.split("  # ")[1] for line in text.splitlines() if "  # " in line}
    assert lines["sequence_length: 4"] == "a.yml:3" and lines["stage: 0"] == "argument zero.stage=0"
    assert lines["head_dim: 4"] == "derived: model.hidden_size / model.attention.heads" and lines["seed: 1234"]
    assert lines["micro_batch_size: 1"] == "default" and text.startswith("# Resolved for 1 rank. ")


def test_every_leaf_has_its_origin():
    one = resolved(data={"train": ["a", "b"], "validation": {"v": "c"}})
    body = [line for line in to_yaml(one).splitlines() if not line.startswith("#")]
    leaf = [line for line in body if not line.rstrip().endswith(":")]
    assert leaf and all("  # " in line for line in leaf)


def test_an_edit_is_noticed(tmp_path):
    path = tmp_path / "config.yml"
    save_resolved(resolved(), path)
    text = path.read_text()
    path.write_text(text.replace("lr: 0.0003", "lr: 0.0004"))
    with pytest.raises(ConfigError, match="values do not give its hash"):
        read_resolved(path)
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("# hash")))
    with pytest.raises(ConfigError, match="its hash is missing"):
        read_resolved(path)
    path.write_text(text[: len(text) // 2])
    with pytest.raises(ConfigError):
        read_resolved(path)
    path.unlink()
    with pytest.raises(ConfigError, match="no such file"):
        read_resolved(path)


def test_a_resolved_file_is_a_configuration_too(tmp_path):
    """It can be given again, with what should change taken back."""
    one = resolved()
    save_resolved(one, tmp_path / "config.yml")
    assert load([str(tmp_path / "config.yml")], ranks=2).config == one.config
    other = load([str(tmp_path / "config.yml")], ["training.accumulation=null"], ranks=1).config
    assert (other.training.global_batch_size, other.training.accumulation) == (2, 2)


def test_hash_is_of_values_alone():
    one, two = (
        resolved(),
        combine([ConfigSource({"optimizer": {"lr": 3e-4}}), ConfigSource(copy.deepcopy(BASE))], ranks=2),
    )
    assert config_hash(one.config) == config_hash(two.config)
    assert config_hash(one.config) != config_hash(
        resolve({**BASE, "optimizer": {"lr": 3.0000000000000004e-4}}, ranks=2)
    )
    assert len(config_hash(one.config)) == 64


@settings(max_examples=300)
@given(
    st.one_of(
        st.text(),
        st.floats(allow_nan=False),
        st.integers(),
        st.booleans(),
        st.none(),
        st.lists(st.text(max_size=4), max_size=3),
    )
)
def test_any_scalar_reads_back(value):
    found, _, problems = parse(f"k: {scalar(value)}  # comment", lambda line: None)
    assert not problems and found["k"] == value and type(found["k"]) is type(value)


RATES = st.floats(min_value=0, max_value=1000, exclude_min=True, allow_subnormal=True)


@settings(max_examples=10)
@given(RATES, st.lists(RATES, min_size=10, max_size=10))
def test_any_rate_reads_back(tmp_path_factory, rate, weights):
    train = [{"path": f"corpus{number}", "weight": weight} for number, weight in enumerate(weights)]
    one = resolved(optimizer={"lr": rate}, data={"synthetic": "none", "train": train})
    path = tmp_path_factory.mktemp("rate") / "c.yml"
    save_resolved(one, path)
    read = read_resolved(path)
    assert read.optimizer.lr == rate and [each.weight for each in read.data.train] == weights


def test_defaults_are_valid_values():
    """`validate_default` is off for speed: the schema's defaults pass the schema all the same."""
    config = resolve(BASE)
    assert Config.model_validate(config.model_dump()) == config


def test_a_file_from_before_a_key_existed_is_read_and_one_that_lost_a_key_is_not(tmp_path):
    path, config = tmp_path / "config.yml", resolved(optimizer={"lr": 0.25}).config
    content = _plain(config.model_dump())
    del content["optimizer"]["options"]  # as the version before wrote it, with the hash of that
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    head = f"# hash: {hashlib.sha256(text.encode()).hexdigest()}\n"
    path.write_text(head + yaml.safe_dump(content))
    assert read_resolved(path) == config
    del content["optimizer"]["epsilon"]
    path.write_text(head + yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="its values do not give its hash"):
        read_resolved(path)


def test_files_with_keys_that_are_gone_stay_readable(tmp_path):
    """A file of a former version: its hash is of all of its values."""
    former = {"upload": "s3://bucket/run", "upload_every": 10, "upload_keep_last": None}
    one = resolved()
    lines = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in former.items())
    text = to_yaml(one).replace("checkpoint:\n", f"checkpoint:\n{lines}", 1)
    for value, readable in ((10, True), (20, False)):
        values = yaml.safe_load(text)
        values["checkpoint"]["upload_every"] = value
        content = json.dumps(values, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        hashed = hashlib.sha256(content.encode()).hexdigest()
        (tmp_path / "config.yml").write_text(text.replace(config_hash(one.config), hashed))
        if readable:
            assert read_resolved(tmp_path / "config.yml") == one.config
        else:
            with pytest.raises(ConfigError, match="its values do not give its hash"):
                read_resolved(tmp_path / "config.yml")
