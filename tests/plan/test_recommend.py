"""The page of recommended layouts has every ready configuration, and rows that are made anew are those of the page."""

from __future__ import annotations

import pytest

from megatron.plan.recommend import ready, row
from tests.paths import ROOT

PAGE = ROOT / "docs" / "recommended_layouts.md"
CONFIGS = ROOT / "configs"


def rows() -> dict[str, str]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: line for line in lines}


def test_every_configuration_has_a_row():
    assert list(rows()) == [path.relative_to(CONFIGS).with_suffix("").as_posix() for path in ready(CONFIGS)]


@pytest.mark.parametrize("name", ["pythia/70m", "olmoe/1b_7b", "mamba2/130m"])
def test_a_row_is_current(name):
    assert rows()[name] == row(CONFIGS / f"{name}.yml", CONFIGS), "python tools/plan.py recommend writes the page anew"


@pytest.mark.slow
def test_the_page_is_current():
    assert list(rows().values()) == [row(path, CONFIGS) for path in ready(CONFIGS)]
