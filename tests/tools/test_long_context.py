"""The benchmark of long sequences: ranks that share a sequence agree with one, and a difference is an error."""

from __future__ import annotations

import pytest

from tests.paths import ROOT
from tools.bench import long_context
from tools.bench.long_context import Row, main, table


def row(ranks: int, loss: float, sent: int = 0) -> Row:
    return Row(64, ranks, 3 << 20, 1 << 20, sent, loss, 2.0)


def test_a_table_by_hand():
    lines = table([row(1, 4.0), row(2, 4.0004, sent=1 << 19)]).splitlines()
    assert lines[2] == "| 64 | 1 | 4.000000 | 2.000000 |  | 3.0 | 1.0 | – |"
    assert lines[3] == "| 64 | 2 | 4.000400 | 2.000000 | 1.0e-04 | 3.0 | 1.0 | 0.5 |"


@pytest.mark.parametrize(("second", "status"), [(4.00001, 0), (4.001, 1), (float("nan"), 1)])
def test_what_differs_is_an_error(monkeypatch, capsys, second, status):
    losses = {1: 4.0, 2: second}
    monkeypatch.setattr(
        long_context, "measure", lambda files, overrides, length, ranks, folded: row(ranks, losses[ranks])
    )
    assert main(["a.yml", "--lengths", "64", "--context", "1", "2"]) == status


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--folded"]])
def test_real_runs(more, capfd):
    """Of a hybrid, whose attention has a window in one layer."""
    words = [str(ROOT / "configs/test/tiny_bamba.yml"), "schedule.warmup_steps=0"]
    assert main([*words, "--lengths", "64", "--context", "1", "2", *more]) == 0
    one, two = capfd.readouterr().out.splitlines()[-2:]
    assert one.startswith("| 64 | 1 | ") and one.endswith("| – |")
    assert two.startswith("| 64 | 2 | ") and float(two.split("|")[-2]) > 0
