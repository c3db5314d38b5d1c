"""Measured times of a few files go into what is known of all."""

from __future__ import annotations

from tests.selection import merged


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
