"""Measure speed and memory of a training step, with plain loops of transformers as peers.

The loops train a model of the same shape, eager and compiled.

    python -m bench train-step --shapes pythia-14m pythia-70m --sequence 512 2048 --micro-batch 4
    python -m bench train-step --shapes pythia-160m --precision bf16 --micro-batch 2
    python -m bench train-step --shapes pythia-1.4b --sequence 2048 --micro-batch 16 --device cuda

Each contender has a process of its own, and they take turns in rounds. Speeds are medians over rounds, ratios are
medians of the ratios of neighbouring rounds. Before anything is timed, all contenders take the same first steps and
must report the same losses and gradient norms. Otherwise the exit status is 1. On a CPU each table also has the share
of the matrix products that the processor does, measured in the same rounds. With `--bound` it has in "at most" how many
times as fast as the peer a step would be that has only our products, attention and AdamW's update.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any
from unittest import mock

import yaml

from bench.processor import PRODUCTS, Products
from bench.runner import Comparison, Result, add_shares, compare, comparison, share
from bench.step.contenders import CONTENDERS, USUAL, has
from bench.step.remote import TOLERANCE, check_equal, first_steps, rounds_of, started
from bench.step.setup import SHAPES, Setup, configuration, flops_per_token
from megatron.config.problems import UserError

BOUND = "bound"  # name among contenders of the part of a step that every program has to do
COMPILED = {
    "ours-compiled": "ours, compiled",
    "ours-compiled-again": "ours, compiled, with what the former start has kept",
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["pythia-14m", "pythia-70m", "pythia-160m"])
    parser.add_argument("--sequence", nargs="+", type=int, default=[512, 2048], help="tokens per sample")
    parser.add_argument("--precision", choices=TOLERANCE, help="fp32 on CPU and bf16 on a GPU, unless given")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(USUAL))
    share(parser, "--micro-batch", "--vocabulary", "--steps", "--rounds", "--device", "--clock")
    parser.add_argument("--bound", action="store_true", help="measure the part of a step that every program has to do")
    own = "of our configuration. Write them first"
    parser.add_argument("options", nargs="*", type=option, metavar="key.path=value", help=own)


def option(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not key.path=value")
    return name, yaml.safe_load(value)


def measure(given: argparse.Namespace) -> Result:
    if "ours" not in given.contenders:
        raise UserError("--contenders must include ours, which the others are compared with")
    peers = [name for name in given.contenders if name.startswith("litgpt")]
    if peers and given.contenders != list(USUAL) and find_spec("litgpt") is None:
        raise UserError(f"--contenders {peers[0]} needs litgpt: install bench/peers.txt as its first lines say")
    made = []
    for shape in given.shapes:
        for sequence in given.sequence:
            size = shape, sequence, given.micro_batch, given.device, given.vocabulary
            setup = Setup(*size, tuple(given.options), given.clock, given.precision)
            names = [name for name in given.contenders if has(name, shape, setup.compute)]
            # The first of two starts, too, would find code that other contenders have compiled.
            with tempfile.TemporaryDirectory() as empty:
                cache = {"TORCHINDUCTOR_CACHE_DIR": empty} if "ours-compiled-again" in names else {}
                with mock.patch.dict(os.environ, cache):
                    made += steps_of(setup, names, given.steps, given.rounds, given.bound)
    return comparison(made)


def steps_of(setup: Setup, names: list[str], steps: int, rounds: int, bound: bool = False) -> list[dict[str, Any]]:
    """Compare a step of a shape.

    Raises:
        Mismatch: the contenders do not compute the same thing.
    """
    further: dict[str, Any] = {PRODUCTS: Products} if setup.device == "cpu" else {}
    if bound:
        from bench.step.bound import Bound

        further[BOUND] = Bound
    with started([*names, *further], setup, further) as remotes:
        first, failed = first_steps([remote for remote in remotes if remote.name in names])
        check_equal(first, TOLERANCE[setup.compute])
        seconds, peaks = rounds_of([remote for remote in remotes if remote.name not in failed], steps, rounds)
    return compared(setup, first, failed, seconds, peaks)


def compared(
    setup: Setup,
    first: Mapping[str, Mapping[str, Any]],
    failed: Mapping[str, str],
    seconds: dict[str, list[float]],
    peaks: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Comparisons of steps, and of the first two steps where our blocks were compiled.

    Args:
        first: results of the first steps, by contender.
        failed: why a contender could not be compiled.
        seconds: per step, by contender, in each round.
        peaks: memory, bytes.
    """
    product_seconds, least = seconds.pop(PRODUCTS, None), seconds.pop(BOUND, None)
    what = f"{setup.shape}, {setup.compute}, {setup.micro_batch} x {setup.sequence} tokens"
    if setup.device == "cuda":
        what += _utilisation(setup, setup.tokens / statistics.median(seconds["ours"]))
    what += "".join(f", {name} cannot be compiled ({reason})" for name, reason in failed.items())
    own = {name: times for name, times in seconds.items() if name != "ours-compiled-again"}  # it is there for its start
    made = compare(what, "tokens/s", own, setup.tokens)
    if product_seconds is not None:
        peak = Products.flops / statistics.median(product_seconds)
        add_shares(made, peak, dict.fromkeys(own, flops_per_token(configuration(setup))))
    for row in made:
        row["memory"] = peaks["ours"] / peaks[row["peer"]]
        if least is not None:
            row["bound"] = statistics.median(theirs / each for theirs, each in zip(seconds[row["peer"]], least))
        row["peer"] = COMPILED.get(row["peer"], row["peer"].replace("ours-", "ours, "))
    what = f"{setup.shape}, {setup.compute}: the first two steps, processor time with the compiler's"
    for name in (each for each in COMPILED if each in seconds):
        ours, theirs = first["ours"]["worked"], first[name]["worked"]
        ratio = theirs / ours
        made.append(asdict(Comparison(what, "s", COMPILED[name], ours, theirs, ratio, ratio, ratio)))
    return made


def _utilisation(setup: Setup, tokens_per_second: float) -> str:
    """Model FLOPs as a share of the device's peak, as text, which is empty for an unknown device."""
    import torch

    from megatron.report.peaks import device_peak

    peak = device_peak(torch.cuda.get_device_name(), "bf16").tflops
    rate = flops_per_token(configuration(setup)) * tokens_per_second / 1e12
    return f" (MFU {rate / peak:.1%} of {peak:g} TFLOP/s)" if peak else ""
