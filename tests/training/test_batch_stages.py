"""Stages of batch size in whole runs: against runs of one batch size each, one process, and sums of batches."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data.hashing import batch_hash, sample_hash
from megatron.data.provenance import Provenance, run_config, step_hash
from megatron.testing.runs import train_on_ranks
from tests.data.make import write_documents
from tests.selection import toured
from tests.training.matrix import merged
from tests.training.test_sequence_stages import losses, weights

LENGTH, STEPS, SIZES = 32, 6, [2, 2, 4, 4, 8, 8]  # samples of each step
BEFORE = [0, *accumulate(SIZES)]
SCHEDULE = [{"until": 2, "global_batch_size": 2}, {"until_tokens": 11 * LENGTH, "global_batch_size": 4}]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 ZeRO 3": (2, {"zero": {"stage": 3, "persistent_size": 0}}),
    "dp2 ZeRO 2, sums once a step": (2, {"zero": {"stage": 2, "reduce": "step"}}),
    "tp2": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "pp2 dp2 ZeRO 1": (4, {"parallel": {"pipeline": 2}, "zero": {"stage": 1}}),
}


def documents() -> list[list[int]]:
    draw = np.random.default_rng(3)
    return [[*draw.integers(1, 90, size).tolist(), 0] for size in draw.integers(5, 90, 60)]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    prefix = tmp_path_factory.mktemp("tokens") / "text"
    write_documents(prefix, documents())
    return prefix


def values(tokens: Path, folder: Path, **training: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder)},
        "model": {
            "layers": "(attention/mlp) x2",
            "hidden_size": 32,
            "vocab_size": 90,
            "dropout": 0.1,
            "attention": {"heads": 4},
        },
        "training": {
            "steps": STEPS,
            "sequence_length": LENGTH,
            "micro_batch_size": 1,
            "global_batch_size": 8,
            "batch_schedule": SCHEDULE,
            **training,
        },
        "optimizer": {"lr": 1e-2, "gradient_clipping": 0.5},
        "schedule": {"warmup_steps": 3},
        "data": {
            "train": str(tokens),
            "validation": {"same": str(tokens)},
            "order": "sequential",
            "reset_attention_at_eod": True,
            "mask_loss_at_eod": True,
        },
        "tokenizer": {"type": "none", "eod_id": 0},
        "evaluation": {"every": 3, "batches": 1},
        "checkpoint": {"every": 2},
        "logging": {"console": "quiet", "curve": False},
    }


def without_dropout(values: dict[str, Any]) -> dict[str, Any]:
    return merged(values, {"model": {"dropout": 0.0}})


@pytest.fixture(scope="module")
def staged(tokens, tmp_path_factory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("staged")
    return folder, train_on_ranks(1, values(tokens, folder))


def test_as_runs_of_one_batch_size_each(tokens, tmp_path) -> None:
    """Bit for bit. Each run continues with the weights and states of the one before. Its step n reads from sample
    n * batch size on, so samples that no step reads are put before the steps' samples. Without dropout, whose draws
    depend on the sample's number."""
    staged, lines = train_on_ranks(1, without_dropout(values(tokens, tmp_path / "staged"))), list[dict]()
    for end, size in ((2, 2), (4, 4), (6, 8)):
        unread = (end - 2) * size - BEFORE[end - 2]
        write_documents(tmp_path / f"text{size}", [[1] * (LENGTH - 1) + [0]] * unread + documents())
        own = values(tmp_path / f"text{size}", tmp_path / "run", global_batch_size=size, batch_schedule=[])
        lines = train_on_ranks(1, without_dropout(own), [f"training.stop_at_step={end}"])
    found, lines = ([line for line in each if "loss" in line] for each in (staged, lines))
    for key in ("loss", "batch_hash", "grad_norm", "lr", "tokens"):
        assert [line[key] for line in found] == [line[key] for line in lines], key
    for step in (2, 4, 6):
        one, other = weights(tmp_path / "staged", step), weights(tmp_path / "run", step)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_sums_of_batches(tokens, staged) -> None:
    """Samples, tokens, hashes and rates in the records, the checkpoints and what `deepy data` finds."""
    found, config = [line for line in staged[1] if "loss" in line], run_config(staged[0])
    assert [line["global_batch_size"] for line in found] == SIZES
    assert [line["tokens"] for line in found] == [LENGTH * count for count in BEFORE[1:]]
    text, data = np.concatenate(documents()), Provenance(config)
    places: dict[int, tuple[int, int]] = {}
    for step, line in enumerate(found):
        numbers = range(BEFORE[step], BEFORE[step + 1])
        rows = [text[number * LENGTH : (number + 1) * LENGTH + 1] for number in numbers]
        wanted = batch_hash(sample_hash(index, row.astype(np.int64)) for index, row in enumerate(rows))
        assert f"{wanted:016x}" == line["batch_hash"] == f"{step_hash(data.step(step)):016x}"
        assert [each.number for each in data.step(step)] == list(numbers)
        places |= {number: (step, index) for index, number in enumerate(numbers)}
    read, begin = {}, 0  # the documents that each sequence has tokens of
    for number, document in enumerate(documents()):
        span = range(begin // LENGTH - (begin % LENGTH == 0), (begin + len(document) - 1) // LENGTH + 1)
        read[number] = sorted(places[sample] for sample in span if sample in places)
        begin += len(document)
    assert {number: data.seen(0, number) for number in read} == read
    told = [json.loads(line) for line in (staged[0] / "ledger.jsonl").read_text().splitlines()]
    changes = [(each["step"], each["samples_per_step"]) for each in told if each["event"] == "stage"]
    assert changes == [(0, 2), (2, 4), (4, 8)]


@pytest.mark.parametrize("name", toured(LAYOUTS))
def test_on_a_layout_that_changes_in_the_middle_of_a_stage(name, tokens, staged, tmp_path) -> None:
    """Three steps on one layout, the others on another: losses, norms and weights of one process."""
    ranks, cut = LAYOUTS[name]
    own = values(tokens, tmp_path)
    train_on_ranks(ranks, merged(own, cut), ["training.stop_at_step=3"])
    found = train_on_ranks(2, own | {"zero": {"stage": 2}})
    expected = staged[1]
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    assert [line.get("batch_hash") for line in found] == [line.get("batch_hash") for line in expected]
    norms = [[line["grad_norm"] for line in lines if "loss" in line] for lines in (found, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    ours, theirs = weights(tmp_path), weights(staged[0])
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-6)


def test_resumed_within_a_stage_to_the_last_bit(tokens, staged, tmp_path) -> None:
    own = values(tokens, tmp_path)
    for end in (1, 2, 5):
        train_on_ranks(1, own, [f"training.stop_at_step={end}"])
    found = train_on_ranks(1, own)
    assert losses(found) == losses(staged[1])
    ours, theirs = weights(tmp_path), weights(staged[0])
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    told = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert not any(each.get("changed") for each in told if each["event"] == "resume")


def test_with_shorter_sequences_at_first(tokens, tmp_path) -> None:
    """A batch has the same tokens whatever its length. In the file's own order, one run of each reads the same."""
    short = [{"until": 3, "sequence_length": LENGTH // 2}]
    both = values(tokens, tmp_path, sequence_schedule=short, steps=4)
    found = [line for line in train_on_ranks(1, both) if "loss" in line]
    assert [line["global_batch_size"] for line in found] == [4, 4, 8, 4]
    assert [line["sequence_length"] for line in found] == [LENGTH // 2] * 3 + [LENGTH]
    assert [line["tokens"] for line in found] == [LENGTH * count for count in BEFORE[1:5]]
    data = Provenance(run_config(tmp_path))
    assert [f"{step_hash(data.step(step)):016x}" for step in range(4)] == [line["batch_hash"] for line in found]
