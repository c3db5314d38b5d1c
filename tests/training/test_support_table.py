"""The README's table says what tests/layouts.yml tests, no more and no less."""

from __future__ import annotations

import pytest

from tests.paths import ROOT
from tests.training.matrix import cases, read
from tools.support_table import BEGIN, END, main, render, replaced, section


def test_every_case_is_in_the_table():
    rows = {row.split(" | ")[0].removeprefix("| "): [cell.strip(" |") for cell in row.split(" | ")[2:]]
            for row in render().splitlines() if row.startswith("| ")}
    names = rows.pop("layout")
    assert list(rows) == list(read()["layouts"])
    shown = {(recipe, name, layout) for layout, cells in rows.items() for name, cell in zip(names, cells, strict=True)
             for recipe in cell.split(", ") if recipe != "–"}
    assert shown == {(case.recipe, case.architecture, case.layout) for case in cases()}


def test_every_layout_and_architecture_is_tested():
    assert {case.layout for case in cases()} == set(read()["layouts"])
    assert {case.architecture for case in cases()} == set(read()["architectures"])


def test_the_readme_has_the_table():
    readme = ROOT / "README.md"
    assert readme.exists(), "README.md is missing; the support table stands there"
    try:
        shown = section(readme.read_text())
    except ValueError as error:
        pytest.fail(f"README.md: {error}")
    assert shown == render(), "run `python tools/support_table.py README.md`"


def test_tool(tmp_path, capsys):
    file = tmp_path / "a.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert main([str(file)]) == 0
    assert section(file.read_text()) == render() and file.read_text().startswith("before\n")
    assert file.read_text().endswith(f"{END}\nafter\n") and "old" not in file.read_text().split()
    assert replaced(file.read_text()) == file.read_text()
    file.write_text("no markers")
    assert main([str(file)]) == 2 and "needs one line" in capsys.readouterr().err
