"""The table of docs/any_model.md again: every causal language model of the installed transformers."""

from __future__ import annotations

import pytest
import transformers

from tests.kinds.transformers.table import BOUND, PAGE, WAYS, begin, compare, rows_of_page
from tests.kinds.transformers.tiny import TYPES


def test_the_page_has_every_type():
    if transformers.__version__ in PAGE.read_text(encoding="utf-8"):
        assert sorted(rows_of_page()) == TYPES


def test_every_gap_of_the_page_has_a_reason():
    for cells in rows_of_page().values():
        gaps = [way for way, cell in zip(WAYS, cells[2:]) if cell == "–"]
        if len(gaps) < len(WAYS):
            assert all(begin(way) in cells[-1] for way in gaps), cells
        assert bool(cells[-1]) or not gaps, cells


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_type_is_trained_as_the_page_says(name):
    found, cells = compare(name), rows_of_page()[name]
    for way, cell in zip(WAYS, cells[2:]):
        if cell != "–" and float(cell) <= BOUND:
            assert found.get(way, 1.0) <= BOUND, found
