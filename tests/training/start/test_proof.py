"""checkpoint.prove: a run continues if what it reads computes what was saved, and not otherwise."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron.engine.state import EngineState
from megatron.report.ledger import read_ledger
from tests.training.test_run import job, losses, start
from tests.workers import run as on_ranks

PROVE = ("checkpoint.prove=true", "training.steps=4")


def proofs(folder: Path) -> list[dict]:
    return [each["proof"] for each in read_ledger(folder / "run" / "ledger.jsonl") if each["event"] == "resume"]


def test_a_checkpoint_proves_itself_on_this_layout_and_on_others(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = start(tmp_path / "whole", 2, "training.steps=4")
    start(tmp_path, 2, *PROVE, "training.stop_at_step=2")
    start(tmp_path, 2, *PROVE, "training.stop_at_step=3")
    found = start(tmp_path, 2, *PROVE, "parallel.tensor=2", "training.stop_at_step=4")
    same, other = proofs(tmp_path)
    assert (same["step"], same["exact"], same["difference"]) == (1, True, 0.0)
    assert (other["step"], other["exact"]) == (2, False) and other["difference"] < 1e-6
    assert losses(found) == pytest.approx(losses(whole), rel=1e-5), "proving changes nothing"


def read_wrongly(folder: str, ranks: int, *overrides: str) -> str:
    """Resume with weights other than the checkpoint's: one bit more in one of them."""
    refresh = EngineState.refresh

    def refreshed(state: EngineState) -> None:
        with torch.no_grad():
            next(iter(state.masters())).data.view(-1)[0] += 1e-3
        refresh(state)

    with patch.object(EngineState, "refresh", refreshed):
        try:
            job(folder, ranks, *overrides)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "it went on"


def test_what_is_read_wrongly_is_not_gone_on_with(tmp_path: Path) -> None:
    start(tmp_path, 1, *PROVE, "training.stop_at_step=2")
    before = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (said,) = on_ranks(1, read_wrongly, str(tmp_path), 1, *PROVE)
    assert said.startswith("StartError: checkpoint.prove: the weights of") and "Nothing was trained" in said
    (said,) = on_ranks(
        1, read_wrongly, str(tmp_path), 1, *PROVE, "training.seed=5", "checkpoint.allow_changes=[training.seed]"
    )
    assert said.startswith("StartError: checkpoint.prove: batch 1 is another one"), said
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == before
    assert on_ranks(1, read_wrongly, str(tmp_path), 1, *PROVE, "checkpoint.prove=false") == ["it went on"]
