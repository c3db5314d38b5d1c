"""The GPT-NeoX reader as a whole: every key is in one class, published models come out as published."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys

import pytest
import yaml

from megatron.config import ConfigError, load
from megatron.config.neox import is_flat, to_native_yaml, translate
from megatron.config.neox.refused import NO_EFFECT, REASONS, REFUSED, RETIRED, RETIRED_READ
from megatron.config.neox.translate import NAMES, TRANSLATED
from megatron.config.schema import lookup, parse_path
from megatron.training.schedule import Schedule
from tests.config.neox.neox_cases import (
    BASE,
    FIXTURES,
    TOKENIZER_SIZE,
    at,
    document,
    fixture,
    flat,
    no_effect,
    parameters,
)
from tests.paths import shared

# GPT-NeoX's keys: name -> (default as Python writes it, state).
INVENTORY = {
    name: (default, state)
    for name, default, state in (
        line.split("\t") for line in (FIXTURES / "inventory.tsv").read_text().splitlines() if not line.startswith("#")
    )
}

# Published totals of the Hugging Face models.
PUBLISHED = {
    "14m": 14_067_712,
    "31m": 30_494_720,
    "70m": 70_426_624,
    "160m": 162_322_944,
    "410m": 405_334_016,
    "1b": 1_011_781_632,
    "1.4b": 1_414_647_808,
    "2.8b": 2_775_208_960,
    "6.9b": 6_857_302_016,
    "12b": 11_846_072_320,
}
# GPUs that each was trained on.
GPUS = {
    "14m": 32,
    "31m": 32,
    "70m": 32,
    "160m": 32,
    "410m": 32,
    "1b": 64,
    "1.4b": 64,
    "2.8b": 64,
    "6.9b": 128,
    "12b": 256,
}
ALL_FIXTURES = [*((f"pythia/{name}.yml",) for name in PUBLISHED), ("20b.yml", "20b_local.yml")]


def test_every_key_of_the_inventory_is_in_exactly_one_class():
    assert len(INVENTORY) == 321
    assert NAMES == INVENTORY.keys()
    for one, other in itertools.combinations((TRANSLATED, NO_EFFECT, REFUSED, RETIRED_READ, RETIRED), 2):
        assert not one.keys() & other.keys()
    assert sum(len(names.split()) for names in REASONS.values()) == len(NO_EFFECT)  # no key has two reasons


def test_defaults_of_translated_keys_are_those_of_gpt_neox():
    assert {name: repr(default) for name, default in TRANSLATED.items()} == {
        name: INVENTORY[name][0] for name in TRANSLATED
    }


def test_keys_that_gpt_neox_itself_ignores_have_no_effect():
    # global_num_gpus and such are PART. Only keys that never bear on a run are meant.
    ignored = {name for name, (_, state) in INVENTORY.items() if state in ("DEAD", "DERIVED")}
    assert ignored <= NO_EFFECT.keys()


def test_the_inventory_is_the_one_in_the_facts():
    path = shared("facts/neox_inventory.md")
    if path is None:
        pytest.skip("no shared folder")
    section = path.read_text().split("\n## 1. ")[1].split("\n## 2. ")[0]
    rows = re.findall(r"^\| `([a-z0-9_]+)` \| `(.*?)` \| .*? \| \**([A-Z]+)\** \|", section, re.MULTILINE)
    facts = {name: (default.replace("\\|", "|"), state) for name, default, state in rows}
    assert facts == INVENTORY


def test_a_file_that_spells_out_all_defaults_says_the_same_as_one_that_leaves_them_out():
    literals = {
        name: ast.literal_eval(default)
        for name, (default, _) in INVENTORY.items()
        if default not in ("None", "computed")
    }
    spelled, plain = flat(**(literals | BASE)), flat()
    assert spelled.problems == []
    assert spelled.values.pop("launch") == {"master_port": 29500}  # a port that is asked for is taken
    assert spelled.values == plain.values


@pytest.mark.parametrize("name", sorted(INVENTORY))
def test_no_key_is_dropped_in_silence(name):
    """An unusual value changes the result, is reported, or is listed as without effect."""
    default = ast.literal_eval(INVENTORY[name][0]) if INVENTORY[name][0] != "computed" else None
    unusual = {bool: not default, int: 7, float: 0.3125, str: "zzz", type(None): 7}[type(default)]
    base, changed = flat(**{name: None}), flat(**{name: unusual})
    differs = changed.values != base.values or changed.problems != base.problems
    listed = re.search(rf"[ ,]{name}[ ,]", no_effect(changed)) is not None
    assert differs or listed
    if listed:
        assert changed.values == base.values


@pytest.mark.parametrize("name", PUBLISHED)
def test_pythia_files_give_the_published_parameter_counts(name):
    translation = fixture(f"pythia/{name}.yml")
    assert translation.problems == []
    assert parameters(translation, TOKENIZER_SIZE) == PUBLISHED[name]


def test_two_files_give_neox_20b():
    translation = fixture("20b.yml", "20b_local.yml")
    assert translation.problems == []
    assert parameters(translation, TOKENIZER_SIZE) == 20_554_567_680
    assert translation.values["optimizer"] == {
        "type": "adamw",
        "lr": 0.97e-4,
        "betas": [0.9, 0.95],
        "epsilon": 1e-8,
        "weight_decay": 0.01,
        "gradient_clipping": 1.0,
    }
    assert translation.values["parallel"]["pipeline"] == 4
    assert at(translation, "data.train") == [
        {"path": "data/pile_20B_tokenizer/pile_20B_tokenizer_text_document", "weight": 1.0}
    ]
    assert at(translation, "data.split") == [995.0, 4.0, 1.0]
    assert at(translation, "data.margin") == 1.0  # one file is not blended
    assert at(translation, "checkpoint.dir") == "20B_checkpoints"
    assert at(translation, "checkpoint.resume") == "auto"
    assert at(translation, "zero.overlap") is False
    assert at(translation, "logging.wandb") == {"mode": "online", "project": "neox", "entity": "eleutherai"}


def test_pythia_recipe():
    values = fixture("pythia/160m.yml").values
    assert values["training"] == {
        "seed": 1234,
        "steps": 143000,
        "sequence_length": 2048,
        "micro_batch_size": 32,
        "accumulation": 1,
        "activation_checkpointing": {"mode": "full", "every": 1},
    }
    assert values["optimizer"] == {
        "type": "adamw",
        "lr": 6e-4,
        "betas": [0.9, 0.95],
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "gradient_clipping": 1.0,
    }
    assert values["schedule"] == {
        "type": "cosine",
        "warmup_fraction": 0.01,
        "steps": 143000,
        "min_lr_ratio": pytest.approx(0.1, rel=1e-15),
        "compat": "neox",
    }
    assert values["precision"]["compute"] == "fp16"
    assert values["precision"]["loss_scale"] == {
        "static": 0.0,
        "window": 1000,
        "hysteresis": 2,
        "minimum": 1.0,
        "initial_power": 12,
    }
    assert values["checkpoint"]["every"] == 1000
    assert values["checkpoint"]["steps"] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert values["evaluation"] == {"at_end": True, "every": 40000, "batches": 10}
    assert values["zero"]["stage"] == 1
    assert values["model"]["mlp"] == {"activation": "gelu_tanh", "gated": False, "bias": True, "hidden_size": 3072}
    assert values["model"]["residual"] == {"form": "parallel", "shared_norm": False}
    assert values["model"]["attention"]["rotary"] == {"fraction": 0.25, "base": 10000.0}
    assert values["model"]["init"] == {
        "embedding": "small_init",
        "hidden": "small_init",
        "head": "small_init",
        "output": "wang_init",
        "std": 0.02,
    }
    source = [{"path": "pile/pile_20B_tokenizer_text_document", "weight": 1.0}]
    assert values["data"] == {
        "order": "pythia",
        "reset_attention_at_eod": False,
        "workers": 1,
        "margin": 1.005,
        "train": source,
        "validation": {"validation": source},
        "test": {"test": source},
    }


@pytest.mark.parametrize("name, init", [("6.9b", "normal"), ("12b", "normal"), ("2.8b", "small_init")])
def test_files_without_init_methods_get_the_defaults(name, init):
    model = fixture(f"pythia/{name}.yml").values["model"]
    assert model["init"]["hidden"] == model["init"]["embedding"] == model["init"]["head"] == init
    assert model["init"]["output"] == ("wang_init" if init == "small_init" else "scaled_normal")


@pytest.mark.parametrize("name", PUBLISHED)
def test_pythia_files_resolve_on_their_gpus(name):
    """The loader takes the files as they are. With the suite's GPUs the global batch is 1024 samples."""
    tensor = {"6.9b": 2, "12b": 4}.get(name, 1)
    padded = -(-TOKENIZER_SIZE // (128 * tensor)) * 128 * tensor
    resolved = load(
        [FIXTURES / "pythia" / f"{name}.yml"], [f"model.vocab_size={padded}"], ranks=GPUS[name], check_inputs=False
    )
    assert resolved.config.training.global_batch_size == 1024
    assert resolved.config.parallel.tensor == tensor
    assert len(resolved.notes) >= 3


def test_pythia_learning_rates_of_both_versions():
    """One key takes those with which Pythia was trained. Without it they are what GPT-NeoX makes of the file today."""
    pythia, common = [FIXTURES / "pythia" / "160m.yml"], ["model.vocab_size=50304"]
    today = Schedule(load(pythia, common, ranks=32, check_inputs=False).config)
    assert today.lr(0) == today.lr(1) == pytest.approx(6e-4 / 1430)
    assert today.lr(71_500) == pytest.approx(3.3428e-4, rel=2e-5)
    resolved = load(pythia, [*common, "schedule.compat=neox-v1"], ranks=32, check_inputs=False)
    schedule = Schedule(resolved.config)
    assert schedule.lr(0) == 0.0
    assert schedule.lr(71_500) == pytest.approx(3.0942e-4, rel=2e-5)
    assert schedule.lr(115_200) == schedule.lr(142_999) == pytest.approx(6e-5)
    assert schedule.lr(115_000) > 6e-5


@pytest.mark.parametrize(
    "found, replaced, line, words",
    [
        # Two published files are broken: layers and heads swapped, and a comma omitted.
        (
            '"num-attention-heads": 8',
            '"num-attention-heads": 9',
            '"num-attention-heads"',
            ["model.attention.heads = 9", "8"],
        ),
        ('"bias-gelu-fusion": true,', '"bias-gelu-fusion": true', '"init_method"', ["not YAML", "','"]),
        ('"num-layers"', '"nun-layers"', '"nun-layers"', ["num_layers"]),
        ('"gas": 1', '"gas": 3', '"gas"', ["gradient_accumulation_steps"]),
    ],
)
def test_broken_files_are_reported_with_their_lines(tmp_path, found, replaced, line, words):
    text = (FIXTURES / "pythia" / "70m.yml").read_text()
    assert text.count(found) == 1
    broken = tmp_path / "broken.yml"
    broken.write_text(text.replace(found, replaced))
    number = next(n for n, each in enumerate(broken.read_text().splitlines(), 1) if each.strip().startswith(line))
    with pytest.raises(ConfigError) as error:
        load([broken], ["model.vocab_size=50304"], ranks=1, check_inputs=False)
    assert f"broken.yml:{number}" in str(error.value)
    assert all(word in str(error.value) for word in words)


def test_origins_name_file_line_and_spelling():
    translation = fixture("pythia/70m.yml")
    lines = (FIXTURES / "pythia" / "70m.yml").read_text().splitlines()
    origin = translation.origins["model.attention.rotary.fraction"]
    assert (origin.file, origin.text) == ("pythia/70m.yml", "rotary-pct")
    assert '"rotary-pct"' in lines[origin.line - 1]
    assert translation.origins["optimizer.lr"].text == "optimizer.params.lr"
    assert str(translation.origins["training.seed"]) == "default (GPT-NeoX's seed)"
    assert set(translation.origins) == {".".join(path) for path in _leaves(translation.values, translation.origins)}


def _leaves(tree, origins, above=()):
    for name, value in tree.items():
        path = (*above, name)
        if isinstance(value, dict) and ".".join(path) not in origins:
            yield from _leaves(value, origins, path)
        else:
            yield path


@pytest.mark.parametrize("names", ALL_FIXTURES, ids=lambda names: names[0])
def test_native_keys_exist_and_the_converted_yaml_says_the_same(names, tmp_path):
    translation = fixture(*names)
    for key in translation.origins:
        assert lookup(parse_path(key)) is not None or key.startswith("deepspeed."), key
    text = to_native_yaml(translation)
    assert yaml.safe_load(text) == translation.values  # YAML 1.1 reads it like 1.2
    native = tmp_path / f"{names[0].split('/')[-1]}"
    native.write_text(text)
    overrides = ["model.vocab_size=51200", "run.name=same"]  # each file has its own
    converted = load([native], overrides, ranks=256, check_inputs=False)
    direct = load([FIXTURES / name for name in names], overrides, ranks=256, check_inputs=False)
    assert converted.config == direct.config
    assert converted.notes == ()


def test_converted_yaml_says_where_values_came_from():
    text = to_native_yaml(fixture("pythia/70m.yml"))
    assert re.search(r"fraction: 0\.25 +# rotary-pct, pythia/70m\.yml:\d+$", text, re.MULTILINE)
    assert re.search(r"seed: 1234 +# GPT-NeoX's default \(seed\)$", text, re.MULTILINE)
    assert text.count("# - ") == len(fixture("pythia/70m.yml").notes)


@pytest.mark.parametrize(
    "values, expected",
    [
        ({"num-layers": 2, "hidden_size": 64}, True),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}, True),
        ({"optimizer": {"type": "adamw", "lr": 1e-3}}, False),
        ({"precision": "bfloat16"}, True),
        ({"precision": "bf16"}, False),
        ({"deepspeed": True, "precision": "fp16"}, True),
        ({"deepspeed": {"wall_clock_breakdown": True}}, False),
        ({"checkpoint": {"every": 10}}, False),
        ({"model": {"hidden_size": 64}, "training": {"steps": 1}}, False),
        ({"training.steps": 5}, False),
        ({"extends": "base.yml"}, False),
        ({"num_layer": 2}, True),  # a slip in a flat key is still a flat key
        ({"modle": {"hidden_size": 2}}, False),
        ({"save-interval": 10}, True),
        ({}, False),
        ({"num_layers": 2, "hidden_size": 8, "schedule": {"type": "cosine"}}, True),
        ({"model": {}, "data": {}, "seed": 3}, False),
    ],
)
def test_flat_documents_are_recognised(values, expected):
    assert is_flat(values) is expected


def test_the_reader_needs_no_torch():
    code = "import sys, megatron.config.neox; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_documents_given_together_are_read_together():
    model = {name: BASE[name] for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length")}
    rest = {name: value for name, value in BASE.items() if name not in model}
    parts = [document("model.yml", model), document("rest.yml", rest)]
    assert translate(parts).values == translate(parts[::-1]).values == flat().values
    assert {problem.key for problem in translate(parts[:1]).problems} >= {"train_iters", "optimizer"}
