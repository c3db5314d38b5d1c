"""The table of docs/any_model.md again: every causal language model of the installed transformers."""

from __future__ import annotations

import pytest
import transformers

from tests.kinds.transformers.table import BOUND, PAGE, WAYS, compare
from tests.kinds.transformers.tiny import TYPES


def shown() -> dict[str, list[str]]:
    """The cells of each row, by type."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) >= len(WAYS) + 3 and row[0] in TYPES}


def test_the_page_has_every_type():
    if transformers.__version__ in PAGE.read_text(encoding="utf-8"):
        assert sorted(shown()) == TYPES


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_type_is_trained_as_the_page_says(name):
    found, cells = compare(name), shown()[name]
    for way, cell in zip(WAYS, cells[1:]):
        if cell != "–" and float(cell) <= BOUND:
            assert found.get(way, 1.0) <= BOUND, found
