"""Configurations and runs compared: what differs, where each value came from, and how the runs ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config import load, save_resolved
from tests.config.broken import BASE
from tools.compare import main as compare
from tools.config import main as config


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """Runs a and b of one file with other rates and other losses."""
    monkeypatch.chdir(tmp_path)
    Path("base.yml").write_text(BASE)
    Path("b.yml").write_text("extends: base.yml\noptimizer: {lr: 0.01}\nmodel: {layers: '(attention/mlp x2) x2'}\n")
    for name, level in (("a", 2.0), ("b", 1.0)):
        file = "base.yml" if name == "a" else "b.yml"
        save_resolved(load([file], [f"run.dir={name}"], ranks=2, check_inputs=False), Path(name, "config.yml"))
        lines = [{"step": step, "loss": level + 10 / (1 + step)} for step in range(100)]
        lines.append({"step": 100, "validation": {"validation": {"loss": level, "perplexity": 1, "tokens": 1}}})
        Path(name, "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_files_and_runs_differ_by_meaning(runs, capsys):
    """A file against a resolved run of it: only what was said elsewhere. Patterns of the same layers are the same."""
    assert config(["diff", "base.yml", "b.yml", "--ranks", "2", "--json"]) == 0
    found = {each["key"]: each for each in json.loads(capsys.readouterr().out)["differences"]}
    assert set(found) == {"optimizer.lr", "run.name", "run.dir", "data.cache", "checkpoint.dir"}
    assert found["optimizer.lr"]["a"] == {"value": 3e-4, "there": True, "origin": "default"}
    assert found["optimizer.lr"]["b"] == {"value": 0.01, "there": True, "origin": "b.yml:2"}
    assert config(["diff", "b.yml", "b", "--ranks", "2"]) == 0
    text = capsys.readouterr().out
    assert "optimizer" not in text and "+ 'b'  (argument run.dir=b)" in text
    assert config(["diff", "b", "b/config.yml"]) == 0
    assert capsys.readouterr().out == "no value differs\n"


@pytest.mark.parametrize("words", [["a"], ["a", "b", "a"], ["a", "none.yml"], ["a", "nothing"]])
def test_a_diff_needs_two_configurations(runs, capsys, words):
    assert config(["diff", *words]) == 2
    assert "rule: " in capsys.readouterr().err


def test_runs_side_by_side(runs, capsys):
    assert compare(["a", "b/", "--output", "c.png", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    tail = [10 / (1 + step) for step in range(95, 100)]
    assert (
        document["runs"]["a"]["training"] == pytest.approx(2 + sum(tail) / 5) and document["runs"]["a"]["averaged"] == 5
    )
    assert document["runs"]["b"]["validation"]["validation"]["loss"] == 1.0
    assert "optimizer.lr" in [each["key"] for each in document["differences"]["b"]]
    assert Path("c.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert compare(["a", "b"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].split() == ["b", "99", f"{1 + sum(tail) / 5:.4f}", "1.0000"] and "b.yml:2" in out


def test_what_cannot_be_compared(runs, capsys):
    assert compare(["a", "nowhere"]) == 2
    assert "nowhere has no metrics" in capsys.readouterr().err
    before = Path("a/metrics.jsonl").read_bytes()
    assert compare(["a", "b", "--output", "a/metrics.jsonl"]) == 2
    assert Path("a/metrics.jsonl").read_bytes() == before
