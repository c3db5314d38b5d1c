"""The predicted speed on GPUs: its products against the closed formula, and its page against the program."""

from __future__ import annotations

from argparse import Namespace

import pytest

from bench.gpu.gpu_prediction import RATES, SHAPES, configured, measure, seconds
from megatron.plan.devices import cluster
from tests.paths import ROOT

LAYERS, HIDDEN, TOKENS = 24, 2048, 16 * 2048  # of pythia-1.4b, in a step


def test_pythia():
    shape = next(each for each in SHAPES if each.name == "pythia-1.4b")
    config, at = configured(shape, 1), cluster(1, "h100")
    spent = seconds(shape, config, 1, at)
    best = RATES["matrix"][0] * at.device.peak("bf16")
    products = 6 * 12 * HIDDEN**2 * LAYERS * TOKENS / best  # 4 H**2 of attention and 8 H**2 of the mlp
    assert products < spent["products"] < 1.06 * products  # the last wave of tiles does not fill all units
    scores = 3.5 * 4 * 2048 * HIDDEN / 2 * LAYERS * TOKENS / (RATES["attention"][0] * at.device.peak("bf16"))
    assert spent["attention and scans"] == pytest.approx(scores, rel=1e-3)


def test_the_page_has_the_tables_of_the_program():
    assert measure(Namespace(page=None)).text in (ROOT / "docs" / "gpu_prediction.md").read_text()
