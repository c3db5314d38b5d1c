"""Stages of sequence length in whole runs: against runs of one length each, and one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.format.fragment import FragmentSpec
from megatron.checkpoint.read.reader import config_of
from megatron.data.provenance import Provenance, run_config, step_hash
from megatron.testing.runs import train_on_ranks
from tests.data.make import write_documents
from tests.selection import toured
from tests.training.matrix import merged

YARN = {"type": "yarn", "factor": 2.0, "original_length": 16}
STEPS, ENDS = 6, (2, 4)
SCHEDULE = [
    {"until": 2, "sequence_length": 16, "rotary": {"attention": {"base": 500.0}}},
    {"until": 4, "sequence_length": 32, "rotary": {"attention": {"base": 500.0, "scaling": YARN}}},
]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 ZeRO 3": (2, {"zero": {"stage": 3, "persistent_size": 0}}),
    "tp2": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "cp2 by ring": (2, {"parallel": {"context": 2, "context_method": "ring"}, "zero": {"stage": 1}}),
    "pp2 cp2": (4, {"parallel": {"pipeline": 2, "context": 2}}),
    "cp2 in chunks": (2, {"parallel": {"context": 2}, "training": {"sequence_chunks": 4}}),
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    draw = np.random.default_rng(3)
    documents = [[*draw.integers(1, 90, size).tolist(), 0] for size in draw.integers(5, 90, 60)]
    write_documents(folder / "text", documents)
    return folder / "text"


def values(tokens: Path, folder: Path, **training: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder)},
        "model": {
            "layers": "(attention/mlp) x2",
            "hidden_size": 32,
            "vocab_size": 90,
            "dropout": 0.1,
            "norm": {"type": "rmsnorm"},
            "mlp": {"gated": True, "activation": "silu"},
            "attention": {"heads": 4, "rotary": {"base": 20000.0}},
        },
        "training": {
            "steps": STEPS,
            "sequence_length": 64,
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "sequence_schedule": SCHEDULE,
            **training,
        },
        "optimizer": {"lr": 1e-2, "gradient_clipping": 0.5},
        "schedule": {"warmup_steps": 2},
        "data": {
            "train": str(tokens),
            "validation": {"same": str(tokens)},
            "order": "sequential",
            "reset_attention_at_eod": True,
            "mask_loss_at_eod": True,
        },
        "tokenizer": {"type": "none", "eod_id": 0},
        "evaluation": {"every": 2, "batches": 1, "breakdown": ["position", "source"]},
        "checkpoint": {"every": 2},
        "logging": {"console": "quiet", "curve": False},
    }


def losses(lines: list[dict]) -> list[float]:
    return [line["loss"] if "loss" in line else line["validation"]["same"]["loss"] for line in lines]


def weights(folder: Path, step: int = STEPS) -> dict[tuple[str, str], torch.Tensor]:
    checkpoint = open_checkpoint(folder / "checkpoints" / f"step_{step:08d}", verify="checksums")
    return {
        (name, state): checkpoint.read(FragmentSpec.whole(checkpoint.tensors[name], state)).data
        for name, state in checkpoint.stored
    }


@pytest.fixture(scope="module")
def staged(tokens, tmp_path_factory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("staged")
    return folder, train_on_ranks(1, values(tokens, folder))


@pytest.fixture(scope="module")
def by_hand(tokens, tmp_path_factory) -> tuple[Path, list[dict]]:
    """Three runs of one length each, in the same folder: each continues with weights and optimizer of the one
    before."""
    folder, lines = tmp_path_factory.mktemp("by_hand"), []
    for end, length, rotary in (
        (2, 16, {"base": 500.0}),
        (4, 32, {"base": 500.0, "scaling": YARN}),
        (6, 64, {"base": 20000.0}),
    ):
        more = 64 // length
        one = values(
            tokens,
            folder,
            sequence_length=length,
            micro_batch_size=more,
            global_batch_size=4 * more,
            sequence_schedule=[],
            stop_at_step=end,
        )
        one["model"]["attention"]["rotary"] = rotary
        one["checkpoint"]["allow_changes"] = ["model.attention.rotary"]
        lines = train_on_ranks(1, one)
    return folder, lines


def test_as_runs_of_one_length_each(staged, by_hand) -> None:
    """Bit for bit: losses, batches, validation by position and source, weights and states of the optimizer."""
    (ours, found), (theirs, expected) = staged, by_hand
    assert losses(found) == losses(expected) and len(found) == STEPS + 3
    for key in ("batch_hash", "grad_norm", "lr", "tokens"):
        assert [line.get(key) for line in found] == [line.get(key) for line in expected], key
    for one, other in zip(found, expected):
        if "validation" in one:
            told = dict(one["validation"]["same"])
            assert told.pop("sequence_length") == {2: 16, 4: 32, 6: 64}[one["step"]]
            assert told == other["validation"]["same"] and len(told["by_position"]) >= 5
    for step in (2, 4, 6):
        one, other = weights(ours, step), weights(theirs, step)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    lengths = [line["sequence_length"] for line in found if "loss" in line]
    assert lengths == [16, 16, 32, 32, 64, 64]
    for key in ("tflops",):
        counted = [
            [line[key] / line["tokens_per_second"] for line in each if "loss" in line] for each in (found, expected)
        ]
        assert counted[0] == pytest.approx(counted[1]) and len(set(np.round(counted[0], 20))) == 3


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
    assert [(each["step"], each["sequence_length"]) for each in told if each["event"] == "stage"] == [
        (0, 16),
        (1, 16),
        (2, 32),
        (4, 64),
        (5, 64),
    ]


def test_the_same_tokens_as_without_stages(tokens, staged, tmp_path) -> None:
    """A step's tokens, with the label after the last, do not depend on the schedule. where.py and batch.py know it."""
    config = run_config(staged[0])
    plain = config.model_copy(update={"training": config.training.model_copy(update={"sequence_schedule": []})})
    ours, theirs = Provenance(config), Provenance(plain)
    for step in range(STEPS):
        pieces = [each.tokens for each in ours.step(step)]
        joined = np.concatenate([each[:-1] for each in pieces])
        assert np.array_equal(joined, np.concatenate([each.tokens[:-1] for each in theirs.step(step)]))
        told = next(line for line in staged[1] if line["step"] == step and "loss" in line)
        assert f"{step_hash(ours.step(step)):016x}" == told["batch_hash"]


def test_a_checkpoint_is_of_its_stage(staged) -> None:
    """Its own length and rotary options, in whatever is made of it."""
    from megatron.checkpoint.hf.config import hf_config

    for step, length, base, kind in ((2, 16, 500.0, "default"), (4, 32, 500.0, "yarn"), (6, 64, 20000.0, "default")):
        config = config_of(open_checkpoint(staged[0] / "checkpoints" / f"step_{step:08d}"))
        assert (config.training.sequence_length, config.training.global_batch_size) == (length, 256 // length)
        theirs = hf_config(config)[1]
        assert theirs.rope_parameters["rope_theta"] == base and theirs.rope_parameters["rope_type"] == kind
        assert theirs.max_position_embeddings == length


def test_a_run_gets_further_stages(tokens, tmp_path) -> None:
    """A finished run of 16 tokens continues with 64: the schedule says what it was, and nothing has to be allowed."""
    short = values(
        tokens, tmp_path, steps=3, sequence_length=16, micro_batch_size=4, global_batch_size=16, sequence_schedule=[]
    )
    short["model"]["attention"]["rotary"] = {"base": 500.0}
    train_on_ranks(1, short)
    longer = values(tokens, tmp_path, sequence_schedule=[SCHEDULE[0] | {"until": 3}])
    with pytest.raises(RuntimeError, match="model.attention.rotary.base: 500.0 -> 100.0"):
        other = {"until": 3, "sequence_length": 16, "rotary": {"attention": {"base": 100.0}}}
        train_on_ranks(1, values(tokens, tmp_path, sequence_schedule=[other]))
    found = train_on_ranks(1, longer)
    assert [line["sequence_length"] for line in found if line["step"] >= 3 and "loss" in line] == [64] * 3
    (resumed,) = [
        each
        for each in map(json.loads, (tmp_path / "ledger.jsonl").read_text().splitlines())
        if each["event"] == "resume"
    ]
    changed = [line.partition(":")[0] for line in resumed["changed"]]
    assert "training.sequence_schedule" in changed and "training.sequence_length" in changed
    assert not any(key.startswith("model.") for key in changed)


def test_operations_of_a_run_are_those_of_its_stages(staged) -> None:
    from megatron.model.costs.describe import totals, training_operations

    config, ends = run_config(staged[0]), {2: 16, 4: 32, 6: 64}
    parts = [config_of(open_checkpoint(staged[0] / "checkpoints" / f"step_{step:08d}")) for step in ends]
    assert [part.training.sequence_length for part in parts] == list(ends.values())
    each = [totals(part).training_flops * 2 * 256 for part in parts]
    assert len(set(each)) == 3
    for step, wanted in ((0, 0), (2, each[0]), (3, each[0] + each[1] // 2), (6, sum(each))):
        assert training_operations(config, step) == wanted
