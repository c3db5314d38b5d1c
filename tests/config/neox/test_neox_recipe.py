"""GPT-NeoX's keys of batches, optimizer, learning rate, precision and data."""

from __future__ import annotations

import math

import pytest

from megatron.config import resolve
from megatron.training.schedule import Schedule
from tests.config.neox.neox_cases import at, flat, noted, problem_of

ADAM = {"type": "Adam", "params": {"lr": 0.001}}
PATHS = {f"{name}_data_paths": [f"{name}/a"] for name in ("train", "valid", "test")}


# --- batches ---


@pytest.mark.parametrize(
    "total, micro, steps, gpus, expected",
    [
        (None, 4, None, None, {"micro_batch_size": 4, "accumulation": 1}),
        (None, 4, 8, None, {"micro_batch_size": 4, "accumulation": 8}),
        (64, 4, None, None, {"micro_batch_size": 4, "global_batch_size": 64}),  # accumulation is derived, repaired
        (64, 4, 2, None, {"micro_batch_size": 4, "global_batch_size": 64, "accumulation": 2}),
        (64, None, None, None, {"micro_batch_size": 1, "global_batch_size": 64}),
        (64, None, None, 8, {"micro_batch_size": 16, "global_batch_size": 64}),  # 8 GPUs / tensor 2 = 4 data ranks
        (64, None, 4, 8, {"micro_batch_size": 4, "global_batch_size": 64}),
        (63, None, None, 8, {"micro_batch_size": 1, "global_batch_size": 63}),
    ],
)
def test_batch_rule(total, micro, steps, gpus, expected):
    translation = flat(
        train_batch_size=total,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=steps,
        global_num_gpus=gpus,
        model_parallel_size=2,
    )
    assert translation.problems == []
    training = translation.values["training"]
    assert {key: training[key] for key in training if "batch" in key or key == "accumulation"} == expected


def test_batch_rule_multiplies_out_when_resolved():
    values = flat(train_batch_size=64, train_micro_batch_size_per_gpu=4).values
    values["model"]["vocab_size"] = 128
    training = resolve(values, ranks=4).training
    assert (training.micro_batch_size, training.accumulation, training.global_batch_size) == (4, 4, 64)


def test_a_batch_size_is_needed():
    assert problem_of(flat(train_micro_batch_size_per_gpu=None), "train_micro_batch_size_per_gpu")


def test_gas_is_accepted_where_it_says_what_holds():
    one, two = flat(gas=1), flat(gas=2, gradient_accumulation_steps=2)
    assert one.problems == two.problems == []
    assert at(one, "training.accumulation") == 1 and at(two, "training.accumulation") == 2
    assert noted(one, "gas (GPT-NeoX always derived it)")
    for changes in ({"gas": 4}, {"gas": 4, "gradient_accumulation_steps": 2}):
        assert "never had an effect" in problem_of(flat(**changes), "gas").rule


# --- optimizer ---


def test_adam_options():
    params = {"lr": "3e-4", "betas": [0.9, 0.95], "eps": 1e-6, "adam_w_mode": True}
    optimizer = flat(optimizer={"type": "Adam", "params": params}, weight_decay=0.2, gradient_clipping=0).values[
        "optimizer"
    ]
    assert optimizer == {
        "type": "adamw",
        "lr": 3e-4,
        "betas": [0.9, 0.95],
        "epsilon": 1e-6,
        "weight_decay": 0.2,
        "gradient_clipping": 0.0,
    }


def test_optimizer_defaults_are_those_of_the_classes():
    assert flat(optimizer={"type": "Adam", "params": {}}).values["optimizer"] == {
        "type": "adamw",
        "lr": 0.001,
        "betas": [0.9, 0.999],
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "gradient_clipping": 1.0,
    }
    assert flat(optimizer={"type": "Lion", "params": {}}).values["optimizer"]["betas"] == [0.9, 0.99]
    sgd = flat(optimizer={"type": "SGD", "params": {"lr": 0.1}}).values["optimizer"]
    assert (sgd["momentum"], sgd["nesterov"]) == (0.0, False)


def test_adam_of_bitsandbytes():
    translation = flat(use_bnb_optimizer=True, pos_emb="rotary")
    assert at(translation, "optimizer.type") == "adamw_8bit" and noted(translation, "bitsandbytes")
    assert at(flat(use_bnb_optimizer=False), "optimizer.type") == "adamw"
    lion = flat(use_bnb_optimizer=True, pos_emb="rotary", optimizer={"type": "Lion", "params": {"lr": 1e-3}})
    assert at(lion, "optimizer.type") == "lion" and noted(lion, "no effect on lion")


@pytest.mark.parametrize(
    "optimizer, word",
    [
        ({"type": "OneBitAdam", "params": {}}, "1-bit"),
        ({"type": "sm3", "params": {}}, "Adam"),
        ({"type": "Adam", "params": {"lr": 1e-3, "epz": 1e-8}}, "eps"),
        ({"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}}, "remove"),
        ({"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9]}}, "[0.9, 0.999]"),
        ({"type": "Adam", "params": {"lr": 1e-3}, "legacy_fusion": True}, "legacy_fusion"),
    ],
)
def test_optimizers_that_cannot_be_had(optimizer, word):
    assert word in problem_of(flat(optimizer=optimizer), "optimizer").fix


def test_weight_decay_stands_once():
    inside = {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.01}}
    assert at(flat(optimizer=inside), "optimizer.weight_decay") == 0.01  # GPT-NeoX fails here
    assert flat(optimizer=inside, weight_decay=0.01).problems == []
    assert problem_of(flat(optimizer=inside, weight_decay=0.1), "weight_decay")


def test_sgd_with_momentum_and_decay_is_another_algorithm():
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    assert "decoupled" in problem_of(flat(optimizer=sgd), "weight_decay").rule
    assert flat(optimizer=sgd, weight_decay=0).problems == []


# --- learning rate ---


@pytest.mark.parametrize(
    "iters, fraction, steps", [(None, None, 100), (80, None, 80), (None, 0.5, 50), (80, 0.5, 80), (None, 0.555, 55)]
)
def test_length_of_the_schedule(iters, fraction, steps):
    assert at(flat(lr_decay_iters=iters, lr_decay_fraction=fraction), "schedule.steps") == steps


def test_lowest_rate_is_a_share_of_the_peak():
    assert at(
        flat(min_lr=1e-4, optimizer={"type": "Adam", "params": {"lr": 1e-3}}), "schedule.min_lr_ratio"
    ) == pytest.approx(0.1)
    assert "peak" in problem_of(flat(min_lr=1e-2), "min_lr").rule


@pytest.mark.parametrize("keys", [{}, {"gas": 1}, {"rope_fusion": False}, {"lr_decay_style": "linear"}])
def test_learning_rates_are_todays_and_the_summary_names_the_other_choice(keys):
    """Nothing in a file says which version it is of: the default is today's, and one key takes the other."""
    translation = flat(**keys)
    assert at(translation, "schedule.compat") == "neox"
    assert noted(translation, "schedule.compat: neox,", "today", "schedule.compat=neox-v1", "Pythia")
    rises = flat(lr_decay_style="cosine", lr_decay_iters=50)
    assert noted(rises, "after lr_decay_iters they stay") and not noted(flat(), "after lr_decay_iters")


@pytest.mark.parametrize("step", [0, 1, 5, 10, 11, 50, 89, 90, 91, 99])
@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
def test_learning_rates_of_version_1_in_its_own_words(style, step):
    """GPT-NeoX 1.0's AnnealingLR written out: 100 steps, 10 of warmup, 1 down to 0.1."""
    values = flat(
        lr_decay_style=style, warmup=0.1, min_lr=0.1, optimizer={"type": "Adam", "params": {"lr": 1.0}}
    ).values
    values["model"]["vocab_size"] = 128
    values["schedule"]["compat"] = "neox-v1"
    end, warmup = 100, 10
    n = min(step, end - warmup)
    if n <= warmup and step <= warmup:
        expected = n / warmup
    else:
        n -= warmup
        expected = max(
            0.1, {"cosine": (math.cos(math.pi * n / end) + 1) / 2, "linear": (end - n) / end, "constant": 1.0}[style]
        )
    assert Schedule(resolve(values)).lr(step) == pytest.approx(expected, rel=1e-12)


# --- precision ---


@pytest.mark.parametrize(
    "changes, compute",
    [
        ({}, "fp32"),
        ({"precision": "fp32"}, "fp32"),
        ({"precision": "bfloat16"}, "bf16"),
        ({"precision": "fp16"}, "fp16"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"fp16": {"fp16": True, "enabled": True}}, "fp16"),
        ({"fp16": {"enabled": False}}, "fp32"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bf16": {"bf16": True, "enabled": True, "loss_scale": 0}}, "bf16"),
        ({"fp16": {"enabled": True, "type": "bfloat16", "auto_cast": True}}, "bf16"),
        ({"precision": "bfloat16", "bf16": {"enabled": True}}, "bf16"),
        ({"precision": "bfloat16", "bf16": {}}, "bf16"),
        ({"precision": "bfloat16", "fp16": {"enabled": False}}, "bf16"),
    ],
)
def test_one_precision(changes, compute):
    translation = flat(**changes)
    assert translation.problems == []
    assert at(translation, "precision.compute") == compute
    assert (at(translation, "precision.accumulate"), at(translation, "precision.reduce")) == ("fp32", "fp32")


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"precision": "fp16", "bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16"),
        ({"precision": "fp32", "fp16": {"enabled": True}}, "fp16"),
        ({"fp16": {"fp16": True}}, "fp16"),
        ({"bf16": {}}, "bf16"),
        ({"precision": "fp8"}, "precision"),
        ({"fp16": {"enabled": True, "loss_scale_windows": 3}}, "fp16"),
    ],
)
def test_precisions_that_contradict_each_other(changes, key):
    assert problem_of(flat(**changes), key)


def test_loss_scale_and_accumulation():
    scale = {"enabled": True, "loss_scale": 128, "loss_scale_window": 500, "min_loss_scale": 0.5}
    translation = flat(fp16=scale, data_types={"grad_accum_dtype": "fp16"}, communication_data_type="fp16")
    assert translation.values["precision"] == {
        "compute": "fp16",
        "accumulate": "fp16",
        "reduce": "fp16",
        "loss_scale": {"static": 128.0, "window": 500, "minimum": 0.5},
    }


# --- data ---


def test_one_data_path_is_split_without_margin():
    data = flat(data_path="a/b").values["data"]
    assert data["train"] == [{"path": "a/b", "weight": 1.0}]
    assert (data["split"], data["margin"]) == ([969.0, 30.0, 1.0], 1.0)
    assert "validation" not in data


@pytest.mark.parametrize(
    "text, shares",
    [("995,4,1", [995, 4, 1]), ("8/1/1", [8, 1, 1]), ("9, 1", [9, 1, 0]), ("1", [1, 0, 0]), ("5,4,3,2", [5, 4, 3])],
)
def test_split(text, shares):
    assert at(flat(data_path="a", split=text), "data.split") == shares


def test_split_without_validation_switches_evaluation_off():
    assert flat(data_path="a", split="1,0,0").values["evaluation"] == {"at_end": False}
    assert flat(data_path="a").values["evaluation"] == {"at_end": True, "every": 1000, "batches": 100}


def test_weighted_sources():
    translation = flat(
        train_data_paths=["a", "b"], train_data_weights=[0.3, 2], valid_data_paths=["c"], test_data_paths=["d"]
    )
    data = translation.values["data"]
    assert translation.problems == []
    assert data["train"] == [{"path": "a", "weight": 0.3}, {"path": "b", "weight": 2.0}]
    assert data["validation"] == {"validation": [{"path": "c", "weight": 1.0}]}
    assert data["test"] == {"test": [{"path": "d", "weight": 1.0}]}
    assert data["margin"] == 1.005 and "split" not in data


def test_label_files():
    translation = flat(**PATHS, train_label_data_paths=["l"])
    assert translation.problems == []
    assert [source["labels"] for source in translation.values["data"]["train"]] == ["l"]
    assert "labels" not in translation.values["data"]["validation"]["validation"][0]


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"train_data_paths": ["a"], "valid_data_paths": ["b"]}, "test_data_paths"),
        (PATHS | {"data_path": "x"}, "data_path"),
        (PATHS | {"train_data_weights": [1, 2]}, "train_data_weights"),
        (PATHS | {"train_data_weights": [0]}, "train_data_weights"),
        ({"data_path": "x", "valid_data_weights": [1]}, "valid_data_weights"),
        (PATHS | {"train_label_data_paths": ["l", "m"]}, "train_label_data_paths"),
        ({"data_path": "x", "train_label_data_paths": ["l"]}, "train_label_data_paths"),
        ({"data_path": "x", "split": "a,b"}, "split"),
        (PATHS | {"train_data_paths": [3]}, "train_data_paths"),
    ],
)
def test_data_that_cannot_be_read(changes, key):
    assert problem_of(flat(**changes), key)


@pytest.mark.parametrize(
    "changes, expected",
    [
        (
            {"tokenizer_type": "HFTokenizer", "vocab_file": "t.json"},
            {"type": "huggingface", "path": "t.json", "eod_token": "<|endoftext|>"},
        ),
        (
            {"vocab_file": "v.json", "merge_file": "m.txt"},
            {"type": "gpt2", "path": "v.json", "merges": "m.txt", "eod_token": "<|endoftext|>"},
        ),
        ({"tokenizer_type": "SPMTokenizer", "vocab_file": "t.model"}, {"type": "sentencepiece", "path": "t.model"}),
        ({"tokenizer_type": "HFGPT2Tokenizer"}, {"type": "huggingface", "path": "gpt2", "eod_token": "<|endoftext|>"}),
        ({"tokenizer_type": "CharLevelTokenizer"}, {"type": "characters"}),
    ],
)
def test_tokenizers(changes, expected):
    assert flat(**changes).values["tokenizer"] == expected


def test_weights_by_number_of_documents():
    paths = {f"{name}_data_paths": ["a", "b"] for name in ("train", "valid", "test")}
    found = flat(**paths, data_path=None, weight_by_num_documents=True, weighted_sampler_alpha=0.3)
    assert found.problems == [] and noted(found, "data.weighting: neox-documents", "replace those given")
    assert (at(found, "data.weighting"), at(found, "data.alpha")) == ("neox-documents", 0.3)
    plain = flat(**paths, data_path=None, weight_by_num_documents=False, weighted_sampler_alpha=0.3)
    assert "weighting" not in plain.values["data"] and plain.problems == []
    assert (
        "at least 0"
        in problem_of(
            flat(**paths, data_path=None, weight_by_num_documents=True, weighted_sampler_alpha=-1),
            "weighted_sampler_alpha",
        ).rule
    )


def test_pack_until_overflow():
    found = flat(data_path="a", pack_impl="pack_until_overflow", allow_chopped=False)
    assert found.problems == [] and noted(found, "data.packing: until_overflow", "training documents")
    assert (at(found, "data.packing"), at(found, "data.drop_long"), at(found, "data.order")) == (
        "until_overflow",
        True,
        "pythia",
    )
    plain = flat(data_path="a", pack_impl="packed", allow_chopped=False)
    assert plain.problems == [] and "packing" not in plain.values["data"] and noted(plain, "allow_chopped")
    apart = flat(data_path="a", pack_impl="unpacked", allow_chopped=False)
    assert apart.problems == [] and noted(apart, "data.packing: unpacked", "first token of the next document")
    assert [at(apart, f"data.{key}") for key in ("packing", "drop_long", "order")] == ["unpacked", True, "stream"]
