"""The feature: off it is not imported, on it logs the same numbers on one rank and on two."""

import sys
from pathlib import Path

import pytest
import yaml

from megatron.config import resolve
from megatron.testing import train_on_ranks

VALUES = yaml.safe_load((Path(__file__).parents[1] / "retention.yml").read_text())
SHORT = {**VALUES, "training": {**VALUES["training"], "steps": 2}, "logging": {"console": "quiet", "curve": False}}


def worst(folder, ranks, **options):
    records = train_on_ranks(ranks, {**SHORT, "run": {"dir": str(folder)}, "worst_label": options}, ())
    return [each.get("worst_label") for each in records if "loss" in each]


def test_ranks_agree_and_it_can_be_off(tmp_path):
    one, two = worst(tmp_path / "one", 1, enabled=True), worst(tmp_path / "two", 2, enabled=True)
    assert one == pytest.approx(two, rel=1e-4) and min(one) > 0
    assert worst(tmp_path / "high", 1, enabled=True, above=1e6) == [None, None]


def test_a_run_without_it_does_not_import_it():
    config = resolve(SHORT, check_inputs=False)
    assert not config.worst_label.enabled and "my_lab.worst_label.part" not in sys.modules
