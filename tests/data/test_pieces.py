"""Samples cut into shorter ones, against batches that were read with that length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.data.loader import build_loader, cut_samples
from tests.data.make import configuration, write_documents


@pytest.mark.parametrize("length", [64, 16, 32, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_as_read_with_that_length(length: int, ranks: int, tmp_path) -> None:
    """In a file's own order the tokens of a batch are the same whatever its samples' length: everything is equal."""
    draw = np.random.default_rng(length)
    documents = [[*draw.integers(1, 90, size).tolist(), 0] for size in draw.integers(1, 150, 120)]
    write_documents(tmp_path / "text", documents)
    data = {
        "train": str(tmp_path / "text"),
        "order": "sequential",
        "reset_attention_at_eod": True,
        "mask_loss_at_eod": True,
    }
    more, known = 64 // length, {"tokenizer": {"type": "none", "eod_id": 0}}
    short = {"sequence_length": length, "global_batch_size": 8 * more, "micro_batch_size": 2 * more, "steps": 10}
    long = {"global_batch_size": 8, "micro_batch_size": 2, "steps": 10}
    for rank in range(ranks):
        place = {"data_rank": rank, "data_ranks": ranks}
        ours = build_loader(configuration(data, ranks, training=long, **known), **place)
        theirs = build_loader(configuration(data, ranks, training=short, **known), **place)
        for step in (0, 3, 9):
            found, expected = cut_samples(ours.read(step), length, ours.indices(step)), theirs.read(step)
            assert found.hash == expected.hash and found.step == expected.step
            for name in ("tokens", "sample_ids", "loss_mask", "documents", "positions"):
                one, other = getattr(found, name), getattr(expected, name)
                assert one.dtype == other.dtype and torch.equal(one, other), name
