"""Hashes and audits where ranks have several stages of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.report.ledger import read_ledger
from megatron.testing import train_on_ranks

VALUES: dict[str, Any] = {
    "model": {"layers": "(attention/mlp) x4", "hidden_size": 32, "vocab_size": 61, "attention": {"heads": 4}},
    "training": {"steps": 3, "sequence_length": 16, "micro_batch_size": 1, "global_batch_size": 8},
    "precision": {"compute": "fp32"},
    "data": {"synthetic": "copy"},
    "evaluation": {"every": None},
    "logging": {"every": 1},
}


def test_hashes_and_audits_of_a_table(tmp_path: Path):
    """The same batches and losses as one process, equal states of replicas (else the run ends), and equal audits."""

    def run(name: str, ranks: int, *overrides: str) -> list[dict[str, Any]]:
        records = train_on_ranks(ranks, {**VALUES, "run": {"dir": str(tmp_path / name)}}, overrides)
        events = read_ledger(tmp_path / name / "ledger.jsonl")
        assert [each["equal"] for each in events if each["event"] == "audit"] == [True] * 3
        return [each for each in records if "loss" in each]

    watched = ("training.hashes=1", "training.hashes_at_rest=always", "training.audit=1", "zero.stage=1")
    one = run("one", 1, *watched)
    table = ("parallel.pipeline=2", "parallel.stages_per_rank=2", "parallel.schedule=zbv")
    found = run("table", 4, *watched, *table)
    assert [each["batch_hash"] for each in found] == [each["batch_hash"] for each in one] and len(one) == 3
    assert [each["loss"] for each in found] == pytest.approx([each["loss"] for each in one], rel=1e-5)
