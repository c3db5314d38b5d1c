"""The benchmark of the training step on a tiny shape: what it reports, and that a wrong comparison fails."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tools.bench import contenders
from tools.bench.contenders import CONTENDERS, Setup, configuration, has
from tools.bench.train_step import TOLERANCE, Mismatch, arguments, check_equal, first_steps, table

ROOT = Path(__file__).parents[2]
TINY = (
    "--shapes",
    "tiny",
    "--sequence",
    "32",
    "--micro-batch",
    "2",
    "--vocabulary",
    "256",
    "--steps",
    "1",
    "--rounds",
    "2",
    "--contenders",
    "ours",
    "eager",
)


def bench(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "tools/bench/train_step.py", *TINY, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow  # the row in bf16 goes the same way
@pytest.mark.parametrize("shape", ["tiny", "mamba2-tiny"])
def test_a_row(shape: str):
    done = bench("--json", "--shapes", shape)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["shape"] == shape and set(row["tokens_per_second"]) == {"ours", "eager"}
    assert row["first_losses"][0] == pytest.approx(math.log(256), rel=0.05)
    for name, seconds in row["seconds"].items():
        assert len(seconds) == 2 and row["peak_bytes"][name] > 100 * 2**20
        assert row["tokens_per_second"][name] == pytest.approx(2 * 64 / sum(seconds))
    assert f"| {shape} | fp32 | 32 | 2 |" in table([row])
    assert row["peak_flops"] > 1e8 and set(row["share_of_peak"]) == {"ours", "eager"}
    flops = row["share_of_peak"]["ours"] * row["peak_flops"] / row["tokens_per_second"]["ours"]
    hidden, layers, words = 32, 2, 256  # a product per weight of the matrices, and all of attention, thrice
    assert flops == pytest.approx(6 * (layers * 12 * hidden**2 + words * hidden + layers * 2 * 32 * hidden))


def test_a_row_in_bf16():
    """Beside transformers' weights in bf16 and its autocast, whose first losses and norms are compared."""
    done = bench("--json", "--precision", "bf16", "--rounds", "1", "--contenders", "ours", "eager", "autocast")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["precision"] == "bf16" and set(row["speed_ratio"]) == {"eager", "autocast"}
    for name, (low, high) in row["speed_ratio_range"].items():
        assert low <= row["speed_ratio"][name] <= high


@pytest.mark.slow  # what is equal is decided by check_equal
def test_another_recipe_is_no_comparison():
    done = bench("--rounds", "1", "training.z_loss=0.1")
    assert done.returncode == 1 and "of eager" in done.stderr and done.stdout == ""


class Failing:
    """A contender whose first steps end with an error, if it has one."""

    def __init__(self, name: str, error: str = ""):
        self.name, self.error = name, error

    def run(self, first: int, steps: int) -> dict[str, list[float]]:
        if self.error:
            raise RuntimeError(f"{self.name}: {self.error}")
        return {"losses": [1.0] * steps}


def test_what_torch_cannot_compile_takes_no_part():
    error = "InductorError: CppCompileError: C++ compile error\n  |  ^~~~"
    first, failed = first_steps([Failing("ours"), Failing("compiled", error)])
    assert set(first) == {"ours"} and failed == {"compiled": "InductorError"}
    for other in (Failing("eager", error), Failing("compiled", "ValueError: no")):
        with pytest.raises(RuntimeError, match=other.name):
            first_steps([other])


def test_values_that_differ_are_named():
    same = {"losses": [2.0, 1.5], "norms": [1.0, 1.0]}
    check_equal({"ours": same, "eager": {**same, "losses": [2.0, 1.5001]}}, TOLERANCE["fp32"])
    for wrong in (1.51, math.nan):
        with pytest.raises(Mismatch, match="step 1: losses of eager"):
            check_equal({"ours": same, "eager": {**same, "losses": [2.0, wrong]}}, TOLERANCE["fp32"])


@pytest.mark.parametrize(
    "shape, parameters",
    [
        ("pythia-14m", 14_067_712),
        ("pythia-70m", 70_426_624),
        ("pythia-160m", 162_322_944),
        ("pythia-1.4b", 1_414_647_808),
    ],
)
def test_shapes_are_those_published(shape, parameters):
    """Of the released models; all have 50304 rows."""
    from megatron.model.costs.describe import totals

    assert totals(configuration(Setup(shape, 512, 1))).parameters == parameters


def test_compiled_blocks_meet_plain_ones_where_they_are_named(monkeypatch):
    setup, name = Setup("tiny", 32, 2, options=(("training.loss_chunk", 16),)), "ours-compiled"
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # as the contender does
    monkeypatch.setattr(contenders, "Ours", configuration)
    training = CONTENDERS[name](setup).training
    assert (training.compile, training.loss_chunk) == ("layer", 16) and configuration(setup).training.compile != "layer"
    assert CONTENDERS["ours-compiled-again"] is CONTENDERS[name]
    assert not [each for each in arguments([]).contenders if each.startswith("ours-")]
    assert arguments(["--contenders", "ours", name]).contenders[1] == name
    assert has(name, "tiny") and has(name, "rwkv7-tiny", "bf16")


@pytest.mark.slow  # half a minute of the C++ compiler
def test_the_second_start_finds_what_the_first_has_compiled():
    names = ("ours", "ours-compiled", "ours-compiled-again")
    done = bench("--json", "--rounds", "1", "--contenders", *names)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert set(row["first_seconds"]) == set(names) == set(row["tokens_per_second"])


def test_compiled_blocks_that_are_plain_are_no_contender(monkeypatch):
    def falls_back(setup: Setup) -> None:
        warnings.warn("torch.compile failed, so blocks run as they are: no compiler", stacklevel=2)

    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # as the contender does
    monkeypatch.setattr(contenders, "Ours", falls_back)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="no compiler"):
        CONTENDERS["ours-compiled"](Setup("tiny", 32, 2))
