"""Curves: where the points of a drawing fall, that files are pictures, and what a run's closing words say."""

from __future__ import annotations

import math
import sys

from megatron.report.curve import History, draw, save_loss_curve, smoothed, summary, terminal_loss_curve
from megatron.report.figures import save_lines
from megatron.report.jsonl import MetricsFile


def dots(text: str, width: int) -> set[tuple[int, int]]:
    """The points set in a drawing, as (column, row), decoded from the Unicode numbering of braille dots."""
    order = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]
    found = set()
    for row, line in enumerate(line.split("┤")[1] for line in text.splitlines() if "┤" in line):
        for column, character in enumerate(line.ljust(width)):
            for bit, (x, y) in enumerate(order):
                if ord(character) >= 0x2800 and (ord(character) - 0x2800) >> bit & 1:
                    found.add((2 * column + x, 4 * row + y))
    return found


def test_a_diagonal_falls_on_the_diagonal():
    width = height = 10
    found = dots(draw({"line": [(0, 39), (19, 0)]}, width=10, height=10), width)
    assert {(0, 0), (19, 39)} <= found
    assert len({x for x, _ in found}) == 2 * width and len({y for _, y in found}) == 4 * height
    assert all(abs(y - 39 * x / 19) <= 1.1 for x, y in found)


def test_labels_marks_and_odd_values():
    text = draw({"training": [(0, 4.0), (5, math.nan), (10, 2.0)], "val": [(10, 3.0)]}, title="loss")
    assert "loss" in text and "4" in text.splitlines()[1] and "o val" in text
    assert any(line.rstrip().endswith("o") and "┤" in line for line in text.splitlines())
    assert "nothing to draw" in draw({"a": [], "b": [(0, math.inf)]}, title="empty")
    assert draw({"flat": [(0, 1.0), (1, 1.0)]}) and draw({"one": [(3, 2.0)]})


def history(tmp_path) -> History:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(50):
        tokens = 1024 * (step + 1)
        file.write({"step": step, "loss": 5 * 0.95**step, "tokens": tokens, "tokens_per_second": 100.0 + step})
        if step % 20 == 19:
            code = {"loss": 4.0 - step / 20, "perplexity": 1, "tokens": 5}
            file.write({"step": step + 1, "validation": {"code": code}})
    file.close()
    return History.read(tmp_path / "metrics.jsonl")


def test_loss_curve_files(tmp_path):
    past = history(tmp_path)
    save_loss_curve(past, tmp_path / "deep" / "loss.png", "a run")
    data = (tmp_path / "deep" / "loss.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 5000
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["loss.png"]
    assert "matplotlib.pyplot" not in sys.modules
    text = terminal_loss_curve(past)
    assert "o validation: code" in text and "┤" in text


def test_a_picture_depends_on_its_data(tmp_path):
    for name, slope in (("a", 1), ("b", 1), ("c", -1)):
        save_lines(tmp_path / name, {"x": [(0, 0), (1, slope)]}, title="t", x="x", y="y")
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_closing_words(tmp_path):
    text = summary(history(tmp_path), seconds=61, reason="finished")
    assert "finished after 0:01:01: 50 steps, 51.2k tokens" in text
    assert "5.0000 (step 0) -> 0.4050 (step 49)" in text
    assert "2.0500 (code, after 40 steps, best 2.0500 after 40)" in text and "125 tokens/s" in text
    only = History(history(tmp_path).training, {"validation": [(40, 2.05)]})
    assert "validation loss  2.0500 (after 40 steps, best" in summary(only, seconds=61, reason="finished")
    first = History(only.training[:1], {"validation": [(1, 2.05)]})
    text = summary(first, seconds=61, reason="stopped")
    assert "0:01:01: 1 step, 1.02k" in text and "after 1 step," in text
    assert "no step was logged" in summary(History(), seconds=0, reason="stopped")


def test_running_means():
    """A straight line stays itself, noise shrinks, and few points are not changed."""
    line = [(x, 2.0 * x) for x in range(100)]
    raw, means = smoothed({"training": line})
    assert raw == {"training": line} and list(means) == ["training (mean of 9)"]
    assert all(abs(y - 2 * x) < 1e-9 for x, y in means["training (mean of 9)"])
    _, means = smoothed({"noise": [(x, (-1.0) ** x) for x in range(100)]})
    assert max(abs(y) for _, y in means["noise (mean of 9)"][4:-4]) < 0.12
    assert smoothed({"few": line[:10]}) == ({}, {"few": line[:10]})


def test_the_only_validation_set_has_one_name():
    history = History(validation={"validation": [(1, 2.0)], "code": [(1, 2.0)]})
    assert list(history.curves()) == ["training", "validation", "validation: code"]
