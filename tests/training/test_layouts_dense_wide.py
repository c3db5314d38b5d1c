"""Attention and feed-forward layers on four and eight ranks: the numbers of one process of plain PyTorch."""

from __future__ import annotations

import pytest

from tests.training.layout_check import compare
from tests.training.matrix import Case, part


@pytest.mark.parametrize("case", part("dense_wide"), ids=lambda case: case.name)
def test_numbers_of_one_process(case: Case):
    compare(case)
