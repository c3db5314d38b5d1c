"""Measured times of a few files go into what is known of all."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from itertools import product

import pytest

from tests.paths import ROOT
from tests.selection import covering, merged, toured


def test_what_ran_is_replaced_and_what_is_gone_is_forgotten() -> None:
    here, there, gone = "tests/test_selection.py", "tests/test_rooms.py", "tests/test_that_nobody_has.py"
    known = {
        "files": {here: 3.0, there: 4.0, gone: 5.0},
        "long": {f"{here}::a": 2.0, f"{there}::b": 2.5, f"{gone}::c": 1.5},
    }
    assert merged(known, {here: 1.26}, {f"{here}::d": 1.04}) == {
        "files": {there: 4.0, here: 1.3},
        "long": {f"{there}::b": 2.5, f"{here}::d": 1.0},
    }


def test_a_covering_set_has_each_value_of_each_axis_and_the_rest_is_slow() -> None:
    axes = ("abcde", (1, 2, 3), (True, False))
    for every in (1, 2):
        cases = covering(*axes, every=every)
        assert [case.values for case in cases] == list(product(*axes))
        plain = [case.values for case in cases if not case.marks]
        assert len(plain) == 30 // every and [set(column) for column in zip(*plain)] == [set(axis) for axis in axes]
        assert len({(letter, number) for letter, number, _ in plain}) == 15, "and each pair of the longer axes"


def test_files_that_have_a_mark_are_found_by_its_text() -> None:
    """As the Makefile finds the files of `make layouts`, `make tour` and `make hosts`."""
    helpers = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    marking = [path.name for path in helpers if re.search(r"mark\.(tour|hosts|layouts)\b", path.read_text())]
    assert not marking
    assert "$(call MARKED,mark\\.tour|toured)" in (ROOT / "Makefile").read_text()


def test_a_plain_run_has_one_case_of_whole_runs_and_the_tour_has_the_rest() -> None:
    slow = pytest.param("a", marks=pytest.mark.slow)
    cases = toured([slow, "b", pytest.param("c", id="named"), {"d": 1}])
    assert [case.values for case in cases] == [("a",), ("b",), ("c",), ({"d": 1},)]
    of_two = toured([(1, "x"), (2, "y")], "layouts")
    assert [case.values for case in of_two] == [(1, "x"), (2, "y")] and of_two[1].marks[0].name == "layouts"
    assert [[mark.name for mark in case.marks] for case in cases] == [["slow"], [], ["tour"], ["tour"]]
    assert cases[2].id == "named"


@pytest.mark.parametrize("left", [-60, 600])
def test_tests_that_would_start_too_late_are_skipped_and_counted(left: int) -> None:
    name = f"{__file__}::test_files_that_have_a_mark_are_found_by_its_text"
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "--until", str(time.time() + left)]
    run = subprocess.run([*command, name], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert ("1 tests were not run" in run.stdout) == ("1 skipped" in run.stdout) == (left < 0)
    assert ("1 passed" in run.stdout) == (left > 0)
