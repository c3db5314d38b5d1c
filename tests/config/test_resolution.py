"""Derived keys against their formulas worked out by hand, freezing, and that no input breaks the checker itself."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron.config import Config, ConfigError, load, resolve
from megatron.config.derive import AT_START, derivations
from megatron.config.resolution import combine
from megatron.config.schema import ANY, catalog
from megatron.config.source.layers import ConfigSource
from megatron.config.variants import options_of
from tests.config.test_merge import BASE


def changed(**sections) -> dict:
    values = copy.deepcopy(BASE)
    for name, section in sections.items():
        base = {} if name == "data" else values.get(name, {})
        values[name] = {**base, **section} if isinstance(section, dict) else section
    return values


def test_derived_keys_stand_behind_what_they_read():
    rules = derivations(Config)
    places = {rule.key: place for place, rule in enumerate(rules)}
    known = {key.name for key in catalog().values()}
    assert {rule.key for rule in rules} | set(AT_START) == {key.name for key in catalog().values() if key.derived}
    assert not set(places) & set(AT_START)
    either = {"training.global_batch_size", "training.accumulation"}  # whichever is given leads to the other
    for rule in rules:
        assert set(rule.keys) <= known, rule.key
        assert all(places.get(name, -1) < places[rule.key] for name in rule.keys if {name, rule.key} != either)


def test_origins_are_found_when_one_is_read(tmp_path):
    """They are the same whenever that is, and another process gets them."""
    (tmp_path / "a.yml").write_text(yaml.safe_dump(BASE))
    first, second = (load([tmp_path / "a.yml"], ranks=1, check_inputs=False) for _ in range(2))
    assert "_found" not in vars(first.origins)
    sent = pickle.loads(pickle.dumps(first.origins))
    assert sent == first.origins == second.origins and str(sent["training.seed"]) == "default"
    assert str(sent["model.hidden_size"]).startswith(str(tmp_path / "a.yml"))


@pytest.mark.parametrize(
    "ranks, training, expected",
    [
        (1, {}, (1, 1)),
        (4, {}, (4, 1)),
        (4, {"micro_batch_size": 2}, (8, 1)),
        (2, {"accumulation": 3}, (6, 3)),
        (2, {"global_batch_size": 8}, (8, 4)),
        (2, {"global_batch_size": 8, "micro_batch_size": 4}, (8, 1)),
        (2, {"global_batch_size": 8, "micro_batch_size": 2, "accumulation": 2}, (8, 2)),
        (None, {"global_batch_size": 8}, (8, None)),
        (None, {"accumulation": 2}, (None, 2)),
        (None, {}, (None, 1)),
    ],
)
def test_batch_sizes(ranks, training, expected):
    found = resolve(changed(training={**BASE["training"], **training}), ranks=ranks).training
    assert (found.global_batch_size, found.accumulation) == expected


def test_ranks_of_the_launch_section_count():
    resolved = combine([ConfigSource(changed(launch={"ranks": 4}, parallel={"tensor": 2}))], ranks=None)
    assert resolved.ranks == 4 and resolved.config.training.global_batch_size == 2
    several = combine([ConfigSource(changed(launch={"ranks": 4, "hostfile": "hosts"}))], ranks=None, check_inputs=False)
    assert several.ranks is None, "launch.ranks counts each host's"


def test_data_parallel_size_leaves_out_the_model_parallel_ranks():
    config = resolve(
        changed(parallel={"tensor": 2, "pipeline": 2}, training={**BASE["training"], "global_batch_size": 24}), ranks=8
    )
    assert config.training.accumulation == 12


@pytest.mark.parametrize(
    "gated, width, expected",
    [(False, 64, 256), (True, 64, 256), (True, 768, 2048), (True, 4096, 11008), (True, 5120, 13824)],
)
def test_mlp_width(gated, width, expected):
    """Gated widths equal the widths of Llama 7B and 13B."""
    model = {**BASE["model"], "hidden_size": width, "mlp": {"gated": gated}}
    assert resolve(changed(model=model)).model.mlp.hidden_size == expected


def test_attention():
    attention = resolve(changed()).model.attention
    assert (attention.kv_heads, attention.head_dim, attention.scale) == (4, 16, 0.25)
    assert attention.rotary.scaling.attention_factor is None
    yarn = {"heads": 4, "rotary": {"scaling": {"type": "yarn", "factor": 8.0, "original_length": 16}}}
    scaling = resolve(changed(model={**BASE["model"], "attention": yarn})).model.attention.rotary.scaling
    assert scaling.attention_factor == 0.1 * math.log(8.0) + 1


def test_the_rest():
    config = resolve(
        changed(
            data={"train": "a/b/web.bin"},
            model={**BASE["model"], "embedding": {"position": "learned"}},
            schedule={"type": "wsd"},
            optimizer={"weight_decay": 0.3, "groups": {"head": {"lr_scale": 0.5}}},
        )
    )
    assert (
        config.run.dir == "runs/run"
        and config.checkpoint.dir == "runs/run/checkpoints"
        and config.data.cache == "runs/run/cache"
    )
    assert config.data.train[0].name == "web" and config.data.seed == 1234
    assert (
        config.model.embedding.max_positions == 16
        and config.model.init.layers == 2
        and config.model.init.head == "normal"
    )
    assert config.schedule.steps == 10 and config.schedule.decay_steps == 1
    assert config.optimizer.groups["head"].weight_decay == 0.3 and config.optimizer.groups["bias"].weight_decay == 0.0
    assert resolve(changed(schedule={"type": "cosine"})).schedule.decay_steps is None
    assert resolve(changed(training={**BASE["training"], "steps": 0})).schedule.steps == 1


def test_sets_may_have_any_name():
    names = {"web.v1": "a/b", "2024": "c", "0": "d", "": "e", "no": "f", "007": "g", "²": "h"}
    config = resolve(changed(data={"train": "x", "validation": names}))
    assert {name: members[0].name for name, members in config.data.validation.items()} == {
        "web.v1": "b",
        "2024": "c",
        "0": "d",
        "": "e",
        "no": "f",
        "007": "g",
        "²": "h",
    }
    with pytest.raises(ConfigError) as error:
        resolve(changed(data={"train": "x", "validation": names}), check_inputs=True)
    assert "data.validation.web.v1.0.path = 'a/b'" in str(error.value) and len(error.value.problems) == 8


def test_variants_are_completed():
    model = {
        **BASE["model"],
        "layers": "attention@few/mlp attention@wide/mlp attention/mlp@thin",
        "variants": {
            "few": {"heads": 2, "rotary": {"base": 500.0}},
            "wide": {"head_dim": 64},
            "thin": {"hidden_size": 8},
        },
    }
    config = resolve(changed(model=model))
    first, second, third = config.model.blocks
    few, wide, plain = (options_of(config.model, block.mixer) for block in (first, second, third))
    assert (few.heads, few.kv_heads, few.head_dim, few.scale) == (2, 2, 32, 32**-0.5)
    assert few.rotary.base == 500.0 and few.rotary.fraction == 1.0
    assert (wide.heads, wide.kv_heads, wide.head_dim, wide.scale) == (4, 4, 64, 0.125)
    assert plain == config.model.attention
    assert (
        options_of(config.model, third.ffn).hidden_size == 8 and options_of(config.model, first.ffn).hidden_size == 256
    )
    given = {**model, "attention": {"heads": 4, "kv_heads": 1, "scale": 0.5}}
    few = options_of(resolve(changed(model=given)).model, first.mixer)
    assert (few.kv_heads, few.scale) == (1, 0.5), "what the base says holds for its variants"


def test_a_variant_is_merged_in_one_way():
    """An emptied mapping adds nothing, and what rules and model see of a variant is one thing."""
    model = {**BASE["model"], "layers": "attention@odd/mlp", "attention": {"heads": 4, "rotary": {"base": 777.0}}}
    for own in ({"rotary": {}}, {"rotary": {"scaling": {}}}, {"rotary": {"fraction": 0.5}}):
        config = resolve(changed(model={**model, "variants": {"odd": own}}))
        (block,) = config.model.blocks
        found = options_of(config.model, block.mixer)
        assert found.rotary.base == 777.0 and found.heads == 4
        assert found.rotary.fraction == own["rotary"].get("fraction", 1.0)
        assert found.rotary.scaling == config.model.attention.rotary.scaling


@pytest.mark.parametrize(
    "file, name",
    [
        ("my.yml", "my"),
        ("configs/quickstart.yml", "quickstart"),
        ("configs/mistral/7b.yml", "mistral-7b"),
        ("./configs/llama/7b.yml", "llama-7b"),
        ("FOLDER/configs/llama/7b.yml", "llama-7b"),
        ("FOLDER/my.yml", "my"),
    ],
)
def test_a_run_is_called_after_its_file_and_folder(file, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path(file.replace("FOLDER", str(tmp_path)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(BASE))
    assert load([path], check_inputs=False).config.run.dir == f"runs/{name}"


def test_nothing_changes_afterwards():
    config = resolve(
        changed(data={"train": ["a"]}, deepspeed={"x": {"y": [1]}}, model={**BASE["model"], "variants": {}})
    )
    with pytest.raises(ValidationError):
        config.training.steps = 5
    for mutate in (
        lambda: config.data.train.append(1),
        lambda: config.deepspeed.update(z=1),
        lambda: config.deepspeed["x"].pop("y"),
        lambda: config.deepspeed["x"]["y"].append(2),
        lambda: config.optimizer.groups.clear(),
        lambda: config.data.train.__setitem__(0, None),
        lambda: config.deepspeed.__delitem__("x"),
        lambda: config.data.train.sort(),
        lambda: config.deepspeed.__ior__({"a": 1}),
    ):
        with pytest.raises(TypeError, match="frozen"):
            mutate()
    assert config == resolve(changed(data={"train": ["a"]}, deepspeed={"x": {"y": [1]}}))


def test_copies_travel_to_workers():
    config = resolve(changed(deepspeed={"x": {"y": [1]}}))
    for other in (
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
        Config.model_validate(config.model_dump()),
    ):
        assert other == config
        with pytest.raises(TypeError, match="frozen"):
            other.deepspeed["x"]["y"].append(1)
    error = pickle.loads(pickle.dumps(_error(training={"steps": "x"})))
    assert "training.steps = 'x'" in str(error)


def _error(**sections) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(changed(**sections))
    return caught.value


def test_the_callers_values_are_left_alone():
    values = changed(precision="bf16", data={"train": "x"})
    before = copy.deepcopy(values)
    resolve(values)
    assert values == before


def test_a_tool_does_not_ask_for_data():
    values = changed(data={"train": "not/there"}, checkpoint={"initialize_from": "nor/this"})
    resolve(values)
    with pytest.raises(ConfigError, match="no file not/there.bin"):
        resolve(values, check_inputs=True)


def test_follow_up_problems_are_not_invented():
    """heads is wrong, so nothing is said about what follows from it."""
    problems = _error(
        model={**BASE["model"], "attention": {"heads": "many", "kv_heads": 3}}, parallel={"tensor": 3}
    ).problems
    assert [each.key for each in problems if "attention" in each.key] == ["model.attention.heads"]


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70000),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.sampled_from([
        "none",
        "auto",
        "bf16",
        "wsd",
        "muon",
        "cpu",
        "learned",
        "attention@x/mlp",
        "yarn",
        "infinite",
        "llama3",
    ]),
    st.lists(st.integers(-1, 9), max_size=3),
    st.dictionaries(st.sampled_from(["a", "path", "heads", "x"]), st.integers(-1, 9), max_size=2),
    st.just([{"path": "p"}]),
    st.just({"x": {"heads": 3, "rotary": {"base": 1}, "hidden_size": 7}}),
)
names = st.sampled_from([tuple(key.path) for key in catalog().values() if ANY not in key.path])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(names, junk), min_size=1, max_size=4), st.sampled_from([None, 1, 2, 6]))
@example([(("logging", "noise_scale"), 1)], None)
@example([(("align", "prompts"), "")], None)
def test_no_input_breaks_the_checker(pairs, ranks):
    """Whatever stands at any key: a frozen configuration or a ConfigError, never another exception."""
    values = copy.deepcopy(BASE)
    for path, value in pairs:
        inner = values
        for part in path[:-1]:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else {}
        if isinstance(inner, dict):
            inner[path[-1]] = copy.deepcopy(value)
    try:
        config = resolve(values, ranks=ranks, check_inputs=True)
    except ConfigError as error:
        assert error.problems and all(each.rule and each.fix for each in error.problems)
    else:
        assert Config.model_validate(config.model_dump()) == config
