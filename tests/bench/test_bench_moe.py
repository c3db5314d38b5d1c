"""The benchmark of a step with experts: its models agree, and the dense one does the same matrix products."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from bench.processor import Products
from bench.step.moe import SHAPES, compared, configuration
from bench.step.setup import Setup
from megatron.model.costs.describe import totals
from tests.paths import ROOT


@pytest.mark.tour
def test_a_row():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench",
            "moe",
            "--shapes",
            "tiny",
            "--sequence",
            "32",
            "--micro-batch",
            "2",
            "--rounds",
            "1",
            "--steps",
            "1",
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs, dense = ([cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:])
    assert theirs[0] == "MoE tiny, fp32, 2 x 32 tokens" and (theirs[3], dense[3]) == ("transformers", "ours, dense")
    assert float(theirs[1].split()[0]) > 0 and re.search(r"\(\d+%\)$", theirs[2])


def test_each_contender_has_its_own_flops():
    """Dense and sparse differ by the router, forward and twice backward. The peer does what ours does."""
    setup = Setup("tiny", 32, 2, vocabulary=8192, precision="fp32")
    seconds = {"ours": [1.0], "transformers": [2.0], "ours, dense": [0.5]}
    theirs, dense = compared(setup, {**seconds, "products": [Products.flops / 1e9]})
    assert theirs["share"] == dense["share"] == pytest.approx(2 * theirs["share_theirs"])
    hidden, layers, _, experts, *_ = SHAPES["tiny"]
    router = 3 * layers * 2 * hidden * experts
    assert theirs["share"] - dense["share_theirs"] / 2 == pytest.approx(setup.tokens * router / 1e9)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dense", [False, True])
def test_ours_computes_in_the_type_that_is_asked_for(precision: str, dense: bool):
    """On a CPU too, where fp32 is only a default: the other side takes the same word."""
    for asked in (precision, None):
        setup = Setup("tiny", 32, 2, vocabulary=8192, precision=asked)
        assert configuration(setup, dense=dense).precision.compute == (asked or "fp32") == setup.compute


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_active_flops(shape: str):
    """All that the dense model lacks is the router: 2 H E per token and layer."""
    setup = Setup(shape, 512, 1, vocabulary=8192)
    sparse, dense = totals(configuration(setup)), totals(configuration(setup, dense=True))
    hidden, layers, _, experts, *_ = SHAPES[shape]
    assert sparse.forward_flops - dense.forward_flops == layers * 2 * hidden * experts
    assert sparse.active_parameters - dense.parameters == layers * hidden * experts
