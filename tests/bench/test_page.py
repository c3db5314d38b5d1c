"""The tables of docs/performance.md: which rows are measured, kept and written, and the tools, on tiny sizes."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import page
from bench.evaluation.evaluating import PEER, QUESTIONS, TOLERANCE, check_equal
from bench.page import ROWS, TABLES, Kept, Row
from bench.processor import Products
from bench.runner import add_shares, compare, in_turns, markdown, measurements, parser_of, run
from bench.step.setup import Setup, configuration, flops_per_token
from bench.step.train_step import compared

ROOT = Path(__file__).parents[2]


def test_ratios_are_those_of_neighbouring_rounds():
    """Above 1 where ours takes less time. The median of ratios is not the ratio of medians."""
    (line,) = compare("x", "tokens/s", {"ours": [1.0, 2.0, 4.0], "theirs": [3.0, 2.0, 8.0]}, 100)
    assert (line["ratio"], line["least"], line["most"]) == (2.0, 1.0, 3.0)
    assert (line["ours"], line["theirs"], line["peer"]) == (50.0, 100 / 3, "theirs")
    (line,) = compare("x", "s", {"ours": [2.0], "theirs": [3.0]})
    assert (line["ours"], line["theirs"], line["ratio"]) == (2.0, 3.0, 1.5)
    assert "| x | 2 s | theirs | 3 s | 1.50 (1.50 – 1.50) |  |" in markdown([line])


def test_shares_of_the_peak_are_of_what_each_side_computes():
    """20 and 10 tokens/s at 3 and 4 GFLOP each, of 100 GFLOP/s. A table has the column if one of its lines has it."""
    without = compare("other", "tokens/s", {"ours": [4.0], "theirs": [8.0]}, 80)
    made = compare("x", "tokens/s", {"ours": [4.0], "theirs": [8.0]}, 80)
    add_shares(made, 100e9, {"ours": 3e9, "theirs": 4e9})
    text = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown(made + without).splitlines()]
    assert text[0][:5] == ["measured", "matmul peak", "ours", "peer", "its"] and {len(each) for each in text} == {7}
    assert text[2][:5] == ["x", "100 GFLOP/s", "20 tokens/s (60%)", "theirs", "10 tokens/s (40%)"]
    assert text[3][:5] == ["other", "", "20 tokens/s", "theirs", "10 tokens/s"]
    assert "matmul peak" not in markdown(without)


def test_turns():
    order: list[str] = []
    ways = {name: lambda name=name: float(len(order.append(name) or order)) for name in ("a", "b")}
    assert in_turns(ways, 2) == {"a": [1.0, 3.0], "b": [2.0, 4.0]} and order == ["a", "b", "a", "b"]


STEPS = {"tiny": Setup("tiny", 64, 2), "again": Setup("tiny", 64, 2, precision="bf16")}


def test_steps_become_comparisons():
    flops = flops_per_token(configuration(STEPS["tiny"]))
    seconds = {"ours": [6.4], "eager": [12.8], "products": [Products.flops / 80 / flops]}
    (line,) = compared(STEPS["tiny"], {}, {}, seconds, {"ours": 1, "eager": 2})
    assert line["what"] == "tiny, fp32, 2 x 64 tokens" and line["memory"] == 0.5
    assert (line["ours"], line["theirs"], line["ratio"]) == (20.0, 10.0, 2.0)
    assert (line["peak"], line["share"], line["share_theirs"]) == pytest.approx((80 * flops, 0.25, 0.125))


def test_a_bound_is_the_ratio_of_a_step_with_nothing_but_it():
    """The peer takes 4 and 6 seconds, and what every program has to do 2: of two rounds the median ratio is 2.5."""
    seconds = {"ours": [3.0, 3.0], "eager": [4.0, 6.0], "bound": [2.0, 2.0]}
    (line,) = compared(STEPS["tiny"], {}, {}, seconds, {"ours": 1, "eager": 1})
    assert line["bound"] == 2.5
    text = [[cell.strip() for cell in each.split("|")[1:-1]] for each in markdown([line]).splitlines()]
    assert text[0][4:] == ["times as fast (range)", "at most", "memory, ours of its"] and text[2][5] == "2.50"


def test_compiled_blocks_have_a_line_for_each_start():
    seconds = {"ours": [6.4], "ours-compiled": [5.12], "ours-compiled-again": [5.12]}
    worked = {"ours": 2.0, "ours-compiled": 40.0, "ours-compiled-again": 5.0}
    first = {name: {"worked": each} for name, each in worked.items()}
    steps, one, two = compared(STEPS["again"], first, {}, seconds, dict.fromkeys(seconds, 1))
    assert (steps["ours"], steps["theirs"], steps["ratio"]) == pytest.approx((20.0, 25.0, 0.8))
    assert steps["unit"] == "tokens/s"
    assert [(each["unit"], each["ours"], each["theirs"], each["ratio"]) for each in (one, two)] == [
        ("s", 2.0, 40.0, 20.0),
        ("s", 2.0, 5.0, 2.5),
    ]
    assert "kept" not in one["peer"] and "kept" in two["peer"]


def test_a_contender_that_cannot_be_compiled_is_named():
    (line,) = compared(STEPS["tiny"], {}, {"compiled": "E"}, {"ours": [1.0], "eager": [1.0]}, {"ours": 1, "eager": 1})
    assert line["what"] == "tiny, fp32, 2 x 64 tokens, compiled cannot be compiled (E)"


@pytest.fixture
def small(tmp_path: Path, monkeypatch):
    """A page and rows of its own, and the rows that were measured."""
    text = "before\n" + "".join(f"<!-- measured: {name} -->\nold\n<!-- end -->\nbetween\n" for name in TABLES)
    (tmp_path / "page.md").write_text(text)
    rows = [Row("start", "start", (name,)) for name in ("one", "two")] + [Row("data", "reading", ("three",))]
    measured: list[str] = []

    def measure(row: Row, clock: str) -> list[dict]:
        measured.append(row.arguments[0])
        if row.arguments[0] in fails:
            raise RuntimeError("no such peer")
        return compare(row.arguments[0], "s", {"ours": [1.0], "theirs": [2.0]})

    fails = {"two"}
    for name, value in {"PAGE": tmp_path / "page.md", "ROWS": rows, "measured": measure}.items():
        monkeypatch.setattr(page, name, value)
    monkeypatch.setattr(page, "Kept", lambda clock: Kept(clock, tmp_path / "kept"))
    return tmp_path / "page.md", measured, fails


def test_a_row_is_measured_once_and_failures_do_not_stop_the_others(small, capsys):
    text, measured, fails = small
    assert run("page", []) == 1 and measured == ["one", "two", "three"]
    assert "start two: no such peer" in capsys.readouterr().err
    written = text.read_text()
    assert "| one | 1 s | theirs | 2 s | 2.00" in written and "| three |" in written and "| two |" not in written
    assert written.count("old\n") == len(TABLES) - 2  # a table without a row of this processor stays
    assert written.startswith("before\n") and written.count("between\n") == len(TABLES)
    measured.clear()
    fails.clear()
    assert run("page", ["--only", "start"]) == 0 and measured == ["two"]
    assert text.read_text().index("| one |") < text.read_text().index("| two |")
    assert run("page", ["--write-only"]) == 0 and measured == ["two"]
    assert run("page", ["--fresh", "--only", "data"]) == 0 and measured == ["two", "three"]
    assert run("page", ["--fresh", "--match", "one"]) == 0 and measured == ["two", "three", "one"]


def test_the_clock_has_rows_of_its_own(small):
    _, measured, _ = small
    run("page", ["--only", "data"])
    run("page", ["--only", "data", "--clock", "wall"])
    assert measured == ["three", "three"]


@pytest.mark.parametrize("theirs", ["1", "8"])
def test_rows_with_threads_of_their_own(tmp_path: Path, monkeypatch, theirs: str):
    """Measured with this number of threads, whatever the environment says, by the clock, and apart from the same row
    without them. The table's note says so."""
    monkeypatch.setenv("OMP_NUM_THREADS", theirs)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    (tmp_path / "bench").mkdir(parents=True)
    told = "print(json.dumps([{'threads': os.environ['OMP_NUM_THREADS'], 'given': sys.argv[1:]}]))"
    (tmp_path / "bench" / "__main__.py").write_text(f"import json, os, sys\n{told}\n")
    plain, two = Row("training", "echo", ("--shapes", "x")), Row("threads", "echo", ("--shapes", "x"), threads=2)
    for row, threads, clock in ((plain, theirs, "cpu"), (two, "2", "wall")):
        (found,) = page.measured(row, "cpu")
        assert found == {"threads": threads, "given": ["echo", "--shapes", "x", "--clock", clock, "--json"]}
    assert plain.name != two.name
    monkeypatch.setattr(page, "ROWS", [plain, two])
    kept = Kept("cpu", tmp_path)
    for row, note in (
        (plain, f"OMP_NUM_THREADS={theirs}, by processor time"),
        (two, "OMP_NUM_THREADS=2, by the clock"),
    ):
        kept.add(row, compare("x", "s", {"ours": [1.0], "theirs": [2.0]}))
        assert note in " ".join(page.text(row.table, "cpu", kept).split())
    assert {row.table: row.threads for row in ROWS if row.threads} == {"threads": 2}


@pytest.mark.parametrize("mine", [math.nan, -math.inf, -2.0 * (1 + 2 * TOLERANCE)])
@pytest.mark.parametrize("swapped", [False, True])
def test_log_likelihoods_that_are_not_equal(mine: float, swapped: bool):
    check_equal(QUESTIONS, [-1.0, -2.0], [-1.0, -2.0 * (1 + TOLERANCE / 2)])
    sides = [[-1.0, mine], [-1.0, -2.0]]
    with pytest.raises(RuntimeError, match=PEER):
        check_equal(QUESTIONS, *(sides[::-1] if swapped else sides))


def test_the_page_has_every_table(tmp_path: Path):
    text = page.PAGE.read_text()
    assert page.write(text, "cpu", Kept("cpu", tmp_path)).count("<!-- measured: ") == len(TABLES)
    assert {row.table for row in ROWS} == set(TABLES)
    with pytest.raises(ValueError, match="measured: start"):
        page.write(text.replace("<!-- measured: start -->", ""), "cpu", Kept("cpu", tmp_path))


@pytest.mark.parametrize("row", {row.tool: row for row in ROWS}.values(), ids=lambda row: row.tool)
def test_tools_take_the_arguments_of_their_rows(row: Row):
    words = row.command("wall")[4:]
    module = importlib.import_module(measurements()[row.tool.replace("_", "-")][0])
    assert parser_of(module).parse_intermixed_args(words).json is True


@pytest.mark.slow  # each starts several processes
@pytest.mark.parametrize(
    "row",
    [
        Row("checkpoints", "saving", ("--shape", "tiny", "--rounds", "1")),
        Row("start", "start", ("--ranks", "2", "--rounds", "1")),
        Row(
            "ranks",
            "replicas",
            ("--shapes", "tiny", "--sequence", "32", "--micro-batch", "2", "--rounds", "1"),
            clocks=False,
        ),
        Row("tokenising", "tokenize", ("--megabytes", "0.3", "--rounds", "1")),
        Row("evaluation", "evaluating", ("--shape", "tiny", "--sequence", "128", "--questions", "8", "--rounds", "1")),
    ],
    ids=lambda row: row.tool,
)
def test_a_tool(row: Row):
    done = subprocess.run(
        row.command("wall"),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found and all(line["ours"] > 0 and line["least"] <= line["ratio"] <= line["most"] for line in found)
    for line in found if row.tool == "replicas" else []:  # the same FLOPs on every side
        flops = [
            line[share] * line["peak"] / line[speed] for share, speed in (("share", "ours"), ("share_theirs", "theirs"))
        ]
        assert line["peak"] > 1e8 and flops == pytest.approx([flops_per_token(configuration(Setup("tiny", 32, 2)))] * 2)
    assert sys.executable in row.command("wall")
