"""The tables of docs/layouts.md say what tests/layouts.yml tests, no more and no less."""

from __future__ import annotations

import pytest

from tests.paths import ROOT
from tests.training.layouts.choice import chosen, meetings
from tests.training.matrix import cases, read
from tools.support_table import GRID, SUMMARY, grid, main, replaced, section, summary


def test_every_case_is_in_the_table():
    rows = {
        row.split(" | ")[0].removeprefix("| "): [cell.strip(" |") for cell in row.split(" | ")[2:]]
        for row in grid().partition("\n\n")[0].splitlines()
        if row.startswith("| ")
    }
    names = rows.pop("layout")
    assert list(rows) == list(read()["layouts"])
    shown = {
        (recipe, name, layout)
        for layout, cells in rows.items()
        for name, cell in zip(names, cells, strict=True)
        for recipe in cell.split(", ")
        if recipe != "–"
    }
    assert shown == {(case.recipe, case.architecture, case.layout) for case in cases()}


def test_every_layout_and_architecture_is_tested():
    assert {case.layout for case in cases()} == set(read()["layouts"])
    assert {case.architecture for case in cases()} == set(read()["architectures"])
    assert {case.architecture for case in cases() if case.values.get("precision") == "bf16"} == set(
        read()["architectures"]
    )


def test_every_case_is_run_by_some_file():
    files = (ROOT / "tests" / "training" / "layouts").glob("test_layouts_*.py")
    assert {case.part for case in cases()} == {file.stem.removeprefix("test_layouts_") for file in files}


def test_those_that_are_chosen_meet_what_all_meet():
    every = {case.name: case for case in cases()}
    assert len(every) == len(cases()) and chosen() < set(every)
    met = set().union(*(meetings(every[name]) for name in chosen()))
    assert met == set().union(*(meetings(case) for case in every.values() if not case.slow))
    assert not any(every[name].slow for name in chosen())
    waiting = set(read()["layouts"]) - {case.layout for case in every.values() if not case.slow}
    assert {("fp32", "on", layout) for layout in set(read()["layouts"]) - waiting if "offload" not in layout} < met
    assert all(every[name].ranks == 8 for name in every if every[name].layout in waiting)
    assert {("rwkv7", "through", "ZeRO 3"), ("neox", "through", "pipeline"), ("bf16", "with", "moe")} < met
    assert ("fp32", "recurrent", "ZeRO 3", "sequence") in met


def test_the_summary_says_what_is_tested():
    """By hand for two of them, from tests/layouts.yml."""
    rows = {cells[0].strip(): cells for row in summary().splitlines() if (cells := row.strip("| ").split(" | "))}
    assert rows.keys() >= set(read()["architectures"])
    every = ["2, 4 (sequence too)", "2, 4", "0, 1, 2, 3", "2, 4", "2", "–"]
    shared = {"tp·cp", "pp·cp", "cp·dp", "tp·depth", "pp·depth", "depth·dp"}
    shared |= {"tp·col", "col·depth", "col·pp", "col·dp"}
    assert rows["neox"][2:8] == every and rows["neox"][9:] == ["full, selective", "yes"]
    assert set(rows["neox"][8].split(", ")) == {"tp·dp", "tp·pp", "pp·dp", "tp·pp·dp", *shared}
    assert "tp·pp·dp·ep" in rows["dense, then moe"][8] and rows["moe"][7] == "2, 4"
    assert rows["llama"][5] == "2, 4" and rows["moe"][5] == "2, 4"
    assert {"cp·ep", "fold·ep"} < set(rows["moe"][8].split(", "))
    # its kind has no way to share sequences, and a longer llama, for stages only
    whole = {"sparse attention", "compressed entries", "deep"}
    assert {name for name in read()["architectures"] if {"–"} == set(rows[name][5:7])} == whole
    assert rows["even vocabulary"][6] == "2, 4" and "pp·fold" in rows["even vocabulary"][8]


TABLES = [(SUMMARY, summary), (GRID, grid)]


@pytest.mark.parametrize(("name", "table"), TABLES)
def test_the_page_has_its_tables(name, table):
    text = (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
    assert section(text, name) == table(), "run `python tools/support_table.py docs/layouts.md`"


def test_tool(tmp_path, capsys):
    file = tmp_path / "a.md"
    places = "\n".join(f"<!-- {name} -->\nold table\n<!-- /{name} -->" for name, _ in TABLES)
    file.write_text(f"before\n{places}\nafter\n")
    assert main([str(file)]) == 0
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith(f"<!-- /{GRID} -->\nafter\n") and "old table" not in text
    for name, table in TABLES:
        assert section(text, name) == table() and replaced(text, name, table()) == text
    file.write_text("no markers")
    assert main([str(file)]) == 2 and "needs one line" in capsys.readouterr().err
