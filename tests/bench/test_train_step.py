"""The benchmark of the training step on a tiny shape: what it reports, and that a wrong comparison fails."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import subprocess
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from bench.runner import Mismatch, parser_of, run
from bench.step import contenders, train_step
from bench.step.bound import NEEDED, Bound, Calls
from bench.step.contenders import CONTENDERS, has
from bench.step.remote import TOLERANCE, check_equal, first_steps
from bench.step.setup import Setup, configuration

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
        [sys.executable, "-m", "bench", "train-step", *TINY, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow  # the row in bf16 takes the same path
@pytest.mark.parametrize("shape", ["tiny", "mamba2-tiny"])
def test_a_row(shape: str):
    done = bench("--json", "--shapes", shape)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["what"] == f"{shape}, fp32, 2 x 32 tokens" and row["peer"] == "eager"
    assert row["least"] <= row["ratio"] <= row["most"] and 0 < row["memory"] < 2 and row["peak"] > 1e8
    if shape == "tiny":
        flops = row["share"] * row["peak"] / row["ours"]
        hidden, layers, words = 32, 2, 256  # a product per weight of the matrices, and all of attention, thrice
        assert flops == pytest.approx(6 * (layers * 12 * hidden**2 + words * hidden + layers * 2 * 32 * hidden))


@pytest.mark.tour
def test_a_row_in_bf16():
    """Next to transformers' weights in bf16 and its autocast, whose first losses and norms are compared."""
    done = bench("--json", "--precision", "bf16", "--rounds", "1", "--contenders", "ours", "eager", "autocast")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["peer"] for row in rows] == ["eager", "autocast"]
    assert all("bf16" in row["what"] and row["least"] <= row["ratio"] <= row["most"] for row in rows)


def test_the_bound_has_all_products_of_a_step_and_nothing_else():
    """Products of matrices are three per weight and token. AdamW updates each weight once. Ours is not called again."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        flops, updated, names = pool.submit(_bound, Setup("tiny", 32, 2, vocabulary=256, precision="bf16")).result()
    hidden, layers, words, tokens = 32, 2, 256, 64
    weights = layers * 12 * hidden**2 + words * hidden
    assert flops == 6 * weights * tokens
    assert updated == weights + words * hidden + layers * (9 + 4) * hidden + 2 * hidden
    assert names <= NEEDED and "bmm" in names


def _bound(setup: Setup) -> tuple[int, int, set[str]]:
    """FLOPs of products without attention's tiles, elements that are updated, and operations of a repeated step."""
    bound = Bound(setup)
    with Calls() as seen:
        bound.step(0)
    names, flops, updated = set(), 0, 0
    for function, args, _ in seen.made:
        name = function.overloadpacket.__name__
        names.add(name)
        if name in ("mm", "addmm"):
            left, right = args[-2:]
            flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        if name == "_fused_adamw_":
            updated += sum(each.numel() for each in args[0])
    return flops, updated, names


def test_ours_must_take_part(capsys):
    assert run("train_step", ["--contenders", "eager"]) == 2 and "must include ours" in capsys.readouterr().err


def test_a_peer_that_is_named_must_be_installed(capsys, monkeypatch):
    monkeypatch.setattr(train_step, "find_spec", lambda name: None)
    assert run("train_step", ["--contenders", "ours", "litgpt"]) == 2
    assert "bench/peers.txt" in capsys.readouterr().err


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
    """Of the released models. All have 50304 rows."""
    from megatron.model.costs.describe import totals

    assert totals(configuration(Setup(shape, 512, 1))).parameters == parameters


def test_compiled_blocks_meet_plain_ones_where_they_are_named(monkeypatch):
    setup, name = Setup("tiny", 32, 2, options=(("training.loss_chunk", 16),)), "ours-compiled"
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # as the contender does
    monkeypatch.setattr(contenders, "Ours", configuration)
    training = CONTENDERS[name](setup).training
    assert (training.compile, training.loss_chunk) == ("layer", 16) and configuration(setup).training.compile != "layer"
    assert CONTENDERS["ours-compiled-again"] is CONTENDERS[name]
    parse = parser_of(train_step).parse_intermixed_args
    assert not [each for each in parse([]).contenders if each.startswith("ours-")]
    assert parse(["--contenders", "ours", name]).contenders[1] == name
    assert has(name, "tiny") and has(name, "rwkv7-tiny", "bf16")


@pytest.mark.slow  # half a minute of the C++ compiler
def test_the_second_start_finds_what_the_first_has_compiled():
    names = ("ours", "ours-compiled", "ours-compiled-again")
    done = bench("--json", "--rounds", "1", "--contenders", *names)
    assert done.returncode == 0, done.stderr
    steps, one, two = json.loads(done.stdout)
    assert steps["peer"] == one["peer"] == "ours, compiled" and one["theirs"] > two["theirs"] > 0


def test_compiled_blocks_that_are_plain_are_no_contender(monkeypatch):
    def falls_back(setup: Setup) -> None:
        warnings.warn("torch.compile failed, so blocks run as they are: no compiler", stacklevel=2)

    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # as the contender does
    monkeypatch.setattr(contenders, "Ours", falls_back)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="no compiler"):
        CONTENDERS["ours-compiled"](Setup("tiny", 32, 2))
