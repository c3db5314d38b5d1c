"""`training.epochs`: steps counted before the start, and GPT-NeoX's train_epochs sample for sample."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from megatron.config import ConfigError, resolve
from megatron.config.neox.translate import translate
from megatron.config.source.layers import ConfigSource
from megatron.data.plan_builder import build_plan, set_names
from tests.data.make import write_documents, write_sizes
from tests.data.reference import blend, flat_samples, neox_weights

LENGTH = 16
SIZES = [[5, 70, 33, 12, 90, 41, 8], [30, 11, 64], [120, 19, 3, 55]]


def files(folder: Path, count: int) -> list[list[list[int]]]:
    """Token files 0 ... count-1. Their documents."""
    opened = [write_sizes(folder / str(number), SIZES[number], seed=number) for number in range(count)]
    return [[each[document].tolist() for document in range(len(each))] for each in opened]


def upstream(sources: list[list[list[int]]], micro: int, ranks: int, passes: int, epochs: int) -> list[list[list[int]]]:
    """The samples of each step of a GPT-NeoX run with train_epochs.

    Each data set is built for one epoch. A blend has the samples of its data sets together, all weights alike. The
    loader cuts them into batches of micro * ranks, skips the rest, and begins again and again. A step takes
    `passes` of them, and the run ends before a step would lack one.
    """
    sets = [flat_samples(documents, LENGTH, 1234, epochs=1) for documents in sources]
    total = sum(length for _, length in sets)
    chosen = zip(*blend(neox_weights([1.0] * len(sets)), total))
    samples = [sets[k][0][n if n < len(sets[k][0]) else n % sets[k][1]] for k, n in chosen]
    size = micro * ranks
    batches = [samples[at : at + size] for at in range(0, total - size + 1, size)]
    endless = itertools.cycle(batches)
    return [[sample for _ in range(passes) for sample in next(endless)] for _ in range(len(batches) * epochs // passes)]


def neox(**changes: Any) -> dict[str, Any]:
    """A GPT-NeoX file of a tiny model, translated."""
    own = {
        "pipe_parallel_size": 0, "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": LENGTH,
        "max_position_embeddings": LENGTH, "make_vocab_size_divisible_by": 1024, "tokenizer_type": "CharLevelTokenizer",
        "optimizer": {"type": "Adam", "params": {"lr": 0.001}}, "train_epochs": 3,
    }  # fmt: skip
    translation = translate([ConfigSource(own | changes)])
    assert not translation.problems, translation.problems
    return translation.values


@pytest.mark.parametrize("sources", [1, 2, 3])
@pytest.mark.parametrize("micro, ranks, passes, epochs", [(2, 1, 1, 1), (2, 1, 1, 3), (1, 2, 3, 3), (4, 1, 2, 5)])
def test_train_epochs_as_in_the_original(sources, micro, ranks, passes, epochs, tmp_path):
    documents = files(tmp_path, sources)
    paths = {f"{name}_data_paths": [str(tmp_path / str(k)) for k in range(sources)] for name in KINDS}
    values = neox(
        **paths, train_epochs=epochs, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=passes
    )
    values["data"]["cache"] = str(tmp_path / "cache")
    values["model"]["vocab_size"] = 1024
    config = resolve(values, ranks=ranks)
    expected = upstream(documents, micro, ranks, passes, epochs)
    assert config.training.steps == config.schedule.steps == len(expected) > 0
    plan, batch = build_plan(config), config.training.global_batch_size
    found = [[plan.sample(step * batch + n).tokens.tolist() for n in range(batch)] for step in range(len(expected))]
    assert found == expected
    # validation data are ordered for one epoch too
    (name,) = set_names(config, "validation")
    held = build_plan(config, "validation", name)
    first = upstream(documents, micro, ranks, passes, 2)[0]
    assert [held.sample(n).tokens.tolist() for n in range(batch)] == first


KINDS = ("train", "valid", "test")


def native(tmp_path: Path, data: dict[str, Any], **training: Any) -> dict[str, Any]:
    return {
        "model": {"layers": "attention/mlp", "hidden_size": 16, "vocab_size": 1024, "attention": {"heads": 2}},
        "training": {"sequence_length": LENGTH, "global_batch_size": 4, "epochs": 2} | training,
        "data": {"cache": str(tmp_path / "cache")} | data,
    }


@pytest.mark.parametrize("order", ["pythia", "stream", "sequential"])
def test_each_epoch_reads_what_the_order_has(order, tmp_path):
    """Whole batches. Only the stream order shuffles again, and therefore skips nothing between epochs."""
    files(tmp_path, 1)
    config = resolve(native(tmp_path, {"train": [{"path": str(tmp_path / "0")}], "order": order}))
    plan = build_plan(config)
    pieces = (sum(SIZES[0]) - 1) // LENGTH - (order == "pythia")
    assert plan.sources[0].order.length == pieces
    assert config.training.steps == (pieces * 2 // 4 if order == "stream" else pieces // 4 * 2)
    samples = [plan.sample(n).spans for n in range(config.training.steps * 4)]
    once = pieces // 4 * 4
    assert len({*samples[:once]}) == once
    if order == "stream":
        assert len({*samples[:pieces]}) == pieces and samples[:4] != samples[pieces : pieces + 4]
    else:
        assert samples[:once] == samples[once : 2 * once]


def test_rows_and_the_split(tmp_path):
    """Files of whole samples count as such. With data.split only the training documents do."""
    write_documents(tmp_path / "rows", [[7] * (LENGTH + 1)] * 9)
    rows = {"train": [{"path": str(tmp_path / "rows")}], "order": "sequential"}
    assert resolve(native(tmp_path, rows)).training.steps == 9 // 4 * 2
    write_sizes(tmp_path / "long", [LENGTH + 1] * 40 + [300] * 10)
    cut = {"train": [{"path": str(tmp_path / "long.bin")}], "split": [60, 20, 20]}
    pieces = (30 * (LENGTH + 1) - 1) // LENGTH - 1
    assert resolve(native(tmp_path, cut)).training.steps == pieces // 4 * 2 == 14


@pytest.mark.parametrize(
    "data, training, told",
    [
        ({}, {"global_batch_size": None}, "must go with a known batch"),
        ({"epoch_parts": 3}, {}, "must divide training.global_batch_size, which is 4"),
        ({"synthetic": "copy", "train": []}, {}, "must go with token files"),
        ({"packing": "until_overflow"}, {}, "must go with token files in data.train that are packed continuously"),
        ({}, {"global_batch_size": 4000}, "must make at least one step"),
        ({}, {"steps": 9}, "must be the 6 steps of training.epochs where both are given"),
        ({"train": [{"path": "nowhere"}]}, {}, "there is no such file"),
        ({}, {"epochs": None}, "training.steps is required"),
    ],
)
def test_what_cannot_be_counted_is_said(data, training, told, tmp_path):
    files(tmp_path, 1)
    values = native(tmp_path, {"train": [{"path": str(tmp_path / "0")}], **data}, **training)
    with pytest.raises(ConfigError) as error:
        resolve(values, ranks=None)
    assert told in str(error.value)


def test_steps_and_epochs_may_agree(tmp_path):
    """The resolved file of a run has both."""
    files(tmp_path, 1)
    values = native(tmp_path, {"train": [{"path": str(tmp_path / "0")}]})
    config = resolve(values)
    assert resolve(config.model_dump()) == config


@pytest.mark.parametrize(
    "key, value",
    [
        ("train_iters", 5),
        ("weight_by_num_documents", True),
        ("train_data_weights", [2.0]),
        ("pack_impl", "pack_until_overflow"),
        ("lr_decay_fraction", 0.5),
        ("checkpoint_scale", "log"),
    ],
)
def test_what_the_original_refuses_beside_it(key, value):
    """The last two are refused because the steps are not known while a file is translated."""
    own = {"train_epochs": 2, "seq_length": 8, "train_micro_batch_size_per_gpu": 1, "checkpoint_factor": 2}
    paths = {f"{name}_data_paths": ["a"] for name in KINDS}
    found = translate([ConfigSource(own | paths | {"save": "b", key: value})]).problems
    assert [each for each in found if each.key == key and len(each.fix) > 5], found


def test_passes_that_only_the_start_knows_are_told():
    """With both batch sizes and no accumulation, the number of GPUs decides where an epoch ends."""
    paths = {f"{name}_data_paths": ["a"] for name in KINDS}
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}
    own = {"train_epochs": 2, "seq_length": 8, **sizes, **paths}
    unknown = translate([ConfigSource(own)])
    assert any("gradient_accumulation_steps" in note for note in unknown.notes)
    known = translate([ConfigSource(own | {"global_num_gpus": 2})])
    assert known.values["data"]["epoch_parts"] == 4
