"""Files, bases, overrides: what wins, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import ConfigError, load, resolve, split_arguments
from megatron.config.variants import options_of

BASE = {
    "model": {"layers": "(attention/mlp) x2", "hidden_size": 64, "vocab_size": 100, "attention": {"heads": 4}},
    "training": {"steps": 10, "sequence_length": 16},
    "data": {"synthetic": "copy"},
}
BASE_TEXT = """\
model: {layers: (attention/mlp) x2, hidden_size: 64, vocab_size: 100, attention: {heads: 4}}
training:
  steps: 10
  sequence_length: 16
data: {synthetic: copy}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yml").write_text(BASE_TEXT)

    def writer(name: str, text: str) -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return name

    return writer


def test_later_files_win_and_overrides_last(write):
    write("b.yml", "training:\n  steps: 20\n  seed: 5\n")
    resolved = load(["base.yml", "b.yml"], ["training.seed=6"], ranks=1)
    training = resolved.config.training
    assert (training.steps, training.seed, training.sequence_length) == (20, 6, 16)
    assert {
        key: str(resolved.origins[key])
        for key in ("training.steps", "training.seed", "training.sequence_length", "zero.stage")
    } == {
        "training.steps": "b.yml:2",
        "training.seed": "argument training.seed=6",
        "training.sequence_length": "base.yml:4",
        "zero.stage": "default",
    }
    assert [str(each) for each in resolved.overridden] == [
        "training.steps = 20 (b.yml:2) over 10 (base.yml:3)",
        "training.seed = 6 (argument training.seed=6) over 5 (b.yml:3)",
    ]
    assert "override: training.steps = 20 (b.yml:2) over 10 (base.yml:3)" in resolved.summary()
    assert resolved.summary(short=True) == resolved.summary()
    many = load(["base.yml", "b.yml"], ["training.seed=6", "training.steps=21"], ranks=1)
    assert many.summary().count("override: ") == 3
    short = "3 values are overridden (training.steps, training.seed). deepy config show lists them"
    assert many.summary(short=True) == short


def test_the_same_value_again_is_no_loss(write):
    write("b.yml", "training: {steps: 10}")
    resolved = load(["base.yml", "b.yml"], ranks=1)
    assert resolved.overridden == () and str(resolved.origins["training.steps"]) == "b.yml:1"


def test_lists_replace_and_mappings_merge(write):
    write(
        "a.yml",
        "extends: base.yml\nlogging: {wandb: {tags: [a, b]}}\noptimizer: {groups: {embedding: {lr_scale: 2.0}}}\n"
        "model: {variants: {one: {window: 4}}, layers: attention@one/mlp attention@two/mlp}",
    )
    write(
        "b.yml",
        "logging: {wandb: {tags: [c]}}\noptimizer: {groups: {embedding: {weight_decay: 0.5}, norm: {lr_scale: 3.0}}}\n"
        "model: {variants: {two: {window: 8}}}",
    )
    config = load(["a.yml", "b.yml"], ranks=1).config
    assert config.logging.wandb.tags == ["c"]
    assert config.model.variants == {"one": {"window": 4}, "two": {"window": 8}}
    groups = config.optimizer.groups
    assert (groups["embedding"].lr_scale, groups["embedding"].weight_decay) == (2.0, 0.5)
    assert (groups["norm"].lr_scale, groups["norm"].weight_decay) == (3.0, 0.0), "the default of norm stays"
    assert set(groups) == {"embedding", "norm", "bias", "state", "decay"}


def test_bases_come_first_in_order(write):
    write("deep/one.yml", "extends: ../base.yml\ntraining: {steps: 1, seed: 1}")
    write("deep/two.yml", "training: {seed: 2, z_loss: 0.5}")
    write("a.yml", "extends: [deep/one.yml, deep/two.yml]\ntraining: {z_loss: 0.25}")
    resolved = load(["a.yml"], ranks=1)
    training = resolved.config.training
    assert (training.steps, training.seed, training.z_loss, training.sequence_length) == (1, 2, 0.25, 16)
    assert str(resolved.origins["training.seed"]) == "deep/two.yml:1"
    assert resolved.config.run.name == "a" and resolved.config.run.dir == "runs/a"


def test_one_base_of_two_files_is_no_circle(write):
    write("one.yml", "extends: base.yml\ntraining: {seed: 1}")
    write("two.yml", "extends: base.yml\nzero: {stage: 0}")
    write("a.yml", "extends: [one.yml, two.yml]")
    config = load(["a.yml"], ranks=1).config
    assert config.training.seed == 1 and config.zero.stage == 0


@pytest.mark.parametrize(
    "text, says",
    [
        ("extends: 5", "extends must be a path"),
        ("extends: {a: b}", "extends must be a path"),
        ("extends: gone.yml", "a.yml:1: extends = 'gone.yml'"),
        ("zero: {stage: 1}\nextends: a.yml", "a.yml:2: extends = 'a.yml'"),
    ],
)
def test_bases_that_cannot_be(write, text, says):
    write("a.yml", text)
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        load(["base.yml", "a.yml"], ranks=1)


def test_a_circle_of_three(write):
    for name, base in (("a", "b"), ("b", "c"), ("c", "a")):
        write(f"{name}.yml", f"extends: {base}.yml")
    with pytest.raises(ConfigError) as error:
        load(["a.yml"], ranks=1)
    assert "circle: a.yml -> b.yml -> c.yml -> a.yml" in str(error.value)
    assert "is required" not in str(error.value), "what a file that was not read would say is not asked for"


def test_null_takes_back(write):
    write(
        "a.yml",
        "extends: base.yml\ntraining: {seed: 5}\nlogging: {wandb: {tags: [a]}}\n"
        "optimizer: {groups: {norm: {weight_decay: 0.1}}}\n"
        "model: {attention: {kv_heads: 2}}",
    )
    resolved = load(
        ["a.yml"],
        ["training.seed=null", "logging.wandb.tags=", "optimizer.groups=~", "model.attention.kv_heads=null"],
        ranks=1,
    )
    config = resolved.config
    assert config.training.seed == 1234 and config.logging.wandb.tags == []
    assert config.optimizer.groups["norm"].weight_decay == 0.0
    assert config.model.attention.kv_heads == 4
    assert str(resolved.origins["training.seed"]) == "default"
    assert str(resolved.origins["model.attention.kv_heads"]) == "derived: model.attention.heads"


def test_null_is_a_value_in_a_variant(write):
    """It replaces what the kind says. Before, it was dropped, and the kind's value held without a word."""
    write(
        "a.yml",
        "extends: base.yml\nmodel:\n  layers: attention@full/mlp attention@wide/mlp mla@direct/mlp\n"
        "  attention: {heads: 4, kv_heads: 1, window: 8}\n  mla: {heads: 4, query_rank: 12, rope_dim: 4}\n"
        "  variants: {full: {window: null, position: none}, direct: {query_rank: null}}\n",
    )
    config = load(["a.yml"], ["model.variants.wide.kv_heads=null"], ranks=1).config
    full, wide, direct = (options_of(config.model, block.mixer) for block in config.model.blocks)
    assert (full.window, full.position, full.kv_heads) == (None, "none", 1)
    assert (wide.window, wide.kv_heads) == (8, 4), "what is derived is derived anew"
    assert direct.query_rank is None and config.model.mla.query_rank == 12
    assert resolve(config.model_dump(), ranks=1) == config
    assert load(["a.yml"], ["model.variants.wide.window=3", "model.variants.direct.query_rank=5"], ranks=1).config
    with pytest.raises(ConfigError, match=r"a.yml:6: model.variants.full.position = null"):
        text = Path("a.yml").read_text().replace("position: none", "position: null")
        write("a.yml", text)
        load(["a.yml"], ["model.variants.wide.kv_heads=null"], ranks=1)


def test_an_empty_section_says_nothing(write):
    write("a.yml", "extends: base.yml\ntraining:\nzero:\n  offload_optimizer:\n")
    assert load(["a.yml"], ranks=1).config.training.steps == 10


def test_a_mapping_over_a_scalar_and_back(write):
    write("a.yml", "extends: base.yml\ndeepspeed: {x: 1, y: {z: 2}}")
    resolved = load(["a.yml"], ["deepspeed.x.w=3", "deepspeed.y=4"], ranks=1)
    assert resolved.config.deepspeed == {"x": {"w": 3}, "y": 4}
    assert str(resolved.overridden[0]) == "deepspeed.x = 'a mapping' (argument deepspeed.x.w=3) over 1 (a.yml:2)"


@pytest.mark.parametrize(
    "given, train",
    [
        ("tokens", [("tokens", 1.0)]),
        (["a", "b"], [("a", 1.0), ("b", 1.0)]),
        ({"path": "a", "weight": 0.5}, [("a", 0.5)]),
        ([{"path": "a", "weight": 3.0}, "b"], [("a", 3.0), ("b", 1.0)]),
    ],
)
def test_short_forms_of_sources(given, train):
    data = {"train": given, "validation": given, "test": {"web": given}, "phases": [{"start": 3, "sources": given}]}
    config = resolve({**BASE, "data": data})
    for found in (
        config.data.train,
        config.data.validation["validation"],
        config.data.test["web"],
        config.data.phases[0].sources,
    ):
        assert [(each.path, each.weight) for each in found] == train


def test_short_form_of_precision_merges(write):
    write("a.yml", "extends: base.yml\nprecision: bf16")
    resolved = load(["a.yml"], ["precision.reduce=bf16"], ranks=1)
    assert (resolved.config.precision.compute, resolved.config.precision.reduce) == ("bf16", "bf16")
    assert str(resolved.origins["precision.compute"]) == "a.yml:2"
    assert load(["a.yml"], ["precision=fp32"], ranks=1).config.precision.compute == "fp32"


def test_items_of_short_lists_have_their_lines(write):
    write("a.yml", "extends: base.yml\ndata:\n  synthetic: none\n  train:\n    - x\n    - path: y\n      weight: 2.0\n")
    origins = load(["a.yml"], ranks=1, check_inputs=False).origins
    assert str(origins["data.train.0.path"]) == "a.yml:5" and str(origins["data.train.1.weight"]) == "a.yml:7"
    assert str(origins["data.train.0.weight"]) == "default" and origins["data.train.1.name"].kind == "derived"


def test_arguments_are_split(write):
    write("x=y.yml", "")
    assert split_arguments(["a.yml", "k=v", "x=y.yml", "b.yml", "j.k=a b"]) == (
        ["a.yml", "x=y.yml", "b.yml"],
        ["k=v", "j.k=a b"],
    )


def test_flat_files_join(write):
    """A GPT-NeoX file next to a native one: translated, then merged in order, with its own lines as origins."""
    flat = write(
        "old.yml",
        '{\n  "num-layers": 2,\n  "hidden-size": 64,\n  "num-attention-heads": 4,\n  "seq-length": 16,\n'
        '  "max-position-embeddings": 16,\n  "train-iters": 7,\n  "train_micro_batch_size_per_gpu": 2,\n'
        '  "optimizer": {"type": "adam", "params": {"lr": 1e-3}}\n}\n',
    )
    native = write("new.yml", "model: {vocab_size: 100}\ndata: {train: null, synthetic: copy}\ntraining: {seed: 3}")
    resolved = load([flat, native], ["train_iters=9", "training.z_loss=0.5"], ranks=1, check_inputs=False)
    config = resolved.config
    assert (config.training.steps, config.training.seed, config.training.z_loss) == (9, 3, 0.5)
    assert config.model.hidden_size == 64 and str(resolved.origins["model.hidden_size"]).startswith("old.yml:3")
    assert resolved.origins["training.steps"].kind == "argument"
    with pytest.raises(ConfigError) as error:
        load([flat, native], ["zero.stage=9"], ranks=1)
    assert "argument zero.stage=9" in str(error.value)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("deepspeed: {comms_logger: {enabled: true, verbose: true}}", "counts"),
        ("deepspeed: {comms_logger: {enabled: false}}", "off"),
        ("deepspeed: {comms_logger: {enabled: true}}\nlogging: {communication: times}", "times"),
    ],
)
def test_deepspeeds_logger_of_communication_becomes_the_account(write, text, wanted):
    resolved = load(["base.yml", write("b.yml", text)], ranks=1, check_inputs=False)
    assert (resolved.config.logging.communication, resolved.config.deepspeed) == (wanted, {})
    assert not resolved.warnings
    quiet = load(["base.yml", "b.yml"], ["logging.communication=off"], ranks=1, check_inputs=False)
    assert quiet.config.logging.communication == "off"


def test_a_mistake_in_it_is_reported(write):
    with pytest.raises(ConfigError, match=r"b.yml:1: logging"):
        load(["base.yml", write("b.yml", "{logging: 3, deepspeed: {comms_logger: {enabled: true}}}")], ranks=1)
