"""State spaces and other recurrences on every layout: the numbers of one process of plain PyTorch."""

from __future__ import annotations

import pytest

from tests.training.layouts.choice import parameters
from tests.training.layouts.layout_check import compare
from tests.training.matrix import Case

pytestmark = pytest.mark.layouts


@pytest.mark.parametrize("case", parameters("recurrent"))
def test_numbers_of_one_process(case: Case):
    compare(case)
