"""The benchmark of what experts send: its table on tiny sizes, and that different outputs are an error."""

from __future__ import annotations

import pytest
import torch

from bench import runner
from bench.messages import expert_traffic
from tests.workers import run

TINY = ("--tokens", "24", "--hidden-size", "16", "--width", "8", "--experts", "8")


@pytest.fixture
def on_workers(monkeypatch):
    """Ranks are the tests' own processes."""
    monkeypatch.setattr(expert_traffic, "on_each_rank", lambda way, asked: run(4, expert_traffic.passed, way, asked))


def rows(text: str) -> dict[str, list[float]]:
    cells = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in text.splitlines()[2:]]
    return {name: [float(number.replace(",", "")) for number in numbers] for name, *numbers in cells}


def test_the_table(on_workers, capsys):
    assert runner.run("expert_traffic", TINY) == 0
    found = rows(capsys.readouterr().out)
    everything, share, folded = found.values()
    assert share[0] == pytest.approx(everything[0] / 2, abs=1) and everything[1] == folded[1] == 0 < share[1]
    for exchanged, gathered, together in found.values():
        assert together == pytest.approx(exchanged + gathered, abs=1)
    assert folded[2] < everything[2] < share[2]


def test_other_outputs_are_an_error(on_workers, monkeypatch, capsys):
    measure = expert_traffic.on_each_rank

    def wrong(way, asked):
        return [(traffic, y + (way == "folded"), x_grad) for traffic, y, x_grad in measure(way, asked)]

    monkeypatch.setattr(expert_traffic, "on_each_rank", wrong)
    assert runner.run("expert_traffic", TINY) == 1
    assert "folded: other outputs" in capsys.readouterr().err


def test_a_process_writes_what_it_found(tmp_path):
    asked = expert_traffic.argparse.Namespace(
        tensor=1, data=1, expert=1, experts=4, top_k=2, tokens=8, hidden_size=16, width=8
    )
    torch.multiprocessing.spawn(expert_traffic.work, ("folded", asked, str(tmp_path)), nprocs=1)
    traffic, y, x_grad = torch.load(tmp_path / "0.pt")
    assert traffic == {"exchanged": 0, "exchanges": 0, "gathered": 0} and y.shape == x_grad.shape == (1, 8, 16)
