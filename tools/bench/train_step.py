#!/usr/bin/env python
"""Measure speed and memory of a training step, beside plain loops with transformers.

The loops train a model of the same shape, eager and compiled.

    python tools/bench/train_step.py --shapes pythia-14m pythia-70m --sequence 512 2048 --micro-batch 4
    python tools/bench/train_step.py --shapes pythia-160m --precision bf16 --micro-batch 2
    python tools/bench/train_step.py --shapes pythia-1.4b --sequence 2048 --micro-batch 16 --device cuda

Each contender lives in a process of its own, so that its peak memory is its own; they take turns in short rounds, so
that a change of the machine's load meets all of them. Speeds are medians over rounds, ratios are medians of the ratios
of neighbouring rounds. Before anything is timed all contenders take the same first steps and must report the same
losses and gradient norms: the exit status is 1 where they do not. On CPU each table also has the share of the matrix
products that the processor does, measured in the same turns.
"""

from __future__ import annotations

import os
import re
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import contextlib  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import multiprocessing  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import yaml  # noqa: E402

from tools.bench.contenders import (  # noqa: E402
    CONTENDERS,
    SHAPES,
    USUAL,
    VOCABULARY,
    Contender,
    Setup,
    configuration,
    flops_per_token,
    has,
    serve,
)
from tools.bench.processor import Products, processor  # noqa: E402

# Relative, of losses and gradient norms in the first steps. In bf16 a loss is a mean of fp32 numbers over all tokens,
# so it must be closer than one unit in the last of bf16's places.
TOLERANCE = {"fp32": {"losses": 2e-4, "norms": 2e-4}, "bf16": {"losses": 2**-8, "norms": 2e-2}}
CHECKED_STEPS = 2


# What inductor says where its C++ cannot be compiled, as of loops that are joined in bf16 (torch 2.13).
NOT_COMPILED = re.compile(r"\b(CppCompileError|InductorError)\b")


class Mismatch(Exception):
    """The contenders do not compute the same thing."""


class Remote:
    """One contender's process."""

    def __init__(self, name: str, setup: Setup, make: Callable[[Setup], Contender] | None = None):
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(name, setup, theirs, make), daemon=True)
        self.process.start()
        theirs.close()

    def ready(self) -> None:
        self._receive()

    def run(self, first: int, steps: int) -> dict[str, Any]:
        self.begin(first, steps)
        return self.answer()

    def begin(self, first: int, steps: int) -> None:
        """Have it take steps, while others do too."""
        self.pipe.send((first, steps))

    def answer(self) -> dict[str, Any]:
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"{self.name}: its process ended with status {self.process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(None)
        self.process.join(timeout=30)
        if self.process.is_alive():
            self.process.kill()


@contextlib.contextmanager
def started(names: list[str], setup: Setup, makers: dict[str, Any] | None = None) -> Iterator[list[Remote]]:
    """The contenders, built one after another; `makers` has functions that build them, if they are others than
    usual.
    """
    remotes: list[Remote] = []
    try:
        for name in names:
            remotes.append(Remote(name, setup, (makers or {}).get(name)))
            remotes[-1].ready()
        yield remotes
    finally:
        for remote in remotes:
            remote.close()


def check_equal(first: dict[str, dict[str, Any]], tolerances: dict[str, float]) -> None:
    """Losses and gradient norms of the first steps, contender by contender, against the first contender's.

    Raises:
        Mismatch: a value differs by more than its tolerance, relatively, or is not finite.
    """
    reference, *others = first
    for what, tolerance in tolerances.items():
        wanted = first[reference][what]
        for name in (reference, *others):
            for step, (found, right) in enumerate(zip(first[name][what], wanted, strict=True)):
                if not math.isfinite(found) or abs(found - right) > tolerance * abs(right):
                    raise Mismatch(f"step {step}: {what} of {name} {found!r}, of {reference} {right!r}")


def measure(setup: Setup, names: list[str], steps: int, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    if "ours-compiled-again" in names:
        # The first start, too, would find what others have compiled.
        with tempfile.TemporaryDirectory() as empty, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=empty):
            return _measure(setup, names, steps, rounds)
    return _measure(setup, names, steps, rounds)


def _measure(setup: Setup, names: list[str], steps: int, rounds: int) -> dict[str, Any]:
    products = ["products"] if setup.device == "cpu" else []
    with started([*names, *products], setup, dict.fromkeys(products, Products)) as remotes:
        first, failed = first_steps([remote for remote in remotes if remote.name in names])
        names = [name for name in names if name not in failed]
        remotes = [remote for remote in remotes if remote.name not in failed]
        check_equal(first, TOLERANCE[setup.compute])
        seconds: dict[str, list[float]] = {remote.name: [] for remote in remotes}
        for number in range(rounds):
            for remote in remotes:
                answer = remote.run(CHECKED_STEPS + number * steps, steps)
                seconds[remote.name].append(answer["seconds"] / steps)
                if remote.name in names:
                    first[remote.name]["peak"] = answer["peak"]
    return {**_row(setup, names, first, seconds), "failed": failed}


def first_steps(contenders: list[Remote]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What the contenders computed; and by name why torch could not compile one, which then takes no part.

    Raises:
        RuntimeError: one failed in another way.
    """
    first, failed = dict[str, dict[str, Any]](), dict[str, str]()
    for remote in contenders:
        try:
            first[remote.name] = remote.run(0, CHECKED_STEPS)
        except RuntimeError as error:
            reason = NOT_COMPILED.search(str(error))
            if "compiled" not in remote.name or reason is None:
                raise
            failed[remote.name] = reason[0]
    return first, failed


def _row(setup: Setup, names: list[str], first: dict[str, Any], seconds: dict[str, list[float]]) -> dict[str, Any]:
    product_seconds = seconds.pop("products", None)
    speeds = {name: setup.tokens / statistics.median(values) for name, values in seconds.items()}
    peaks = {name: first[name]["peak"] for name in names}
    row: dict[str, Any] = {
        "shape": setup.shape,
        "sequence": setup.sequence,
        "micro_batch": setup.micro_batch,
        "device": setup.device,
        "clock": setup.clock,
        "precision": setup.compute,
        "tokens_per_second": speeds,
        "peak_bytes": peaks,
        "seconds": seconds,
        "first_losses": first[names[0]]["losses"],
        "first_seconds": {name: first[name]["worked"] for name in names},
        "speed_ratio": {},
        "speed_ratio_range": {},
        "memory_ratio": {},
    }
    if product_seconds is not None:
        row |= {"processor": processor(), **_share(setup, speeds, statistics.median(product_seconds))}
    if "ours" in names:
        for name in names:
            if name != "ours":
                ratios = [theirs / ours for theirs, ours in zip(seconds[name], seconds["ours"])]
                row["speed_ratio"][name] = statistics.median(ratios)
                row["speed_ratio_range"][name] = min(ratios), max(ratios)
                row["memory_ratio"][name] = peaks["ours"] / peaks[name]
        if setup.device == "cuda":
            row["mfu"] = _utilisation(setup, speeds["ours"])
    return row


def _share(setup: Setup, speeds: dict[str, float], product_seconds: float) -> dict[str, Any]:
    """The measured peak of matrix products, FLOP/s, and the share of it that each contender's tokens need."""
    peak, flops = Products.flops / product_seconds, flops_per_token(configuration(setup))
    return {"peak_flops": peak, "share_of_peak": {name: flops * speed / peak for name, speed in speeds.items()}}


def _utilisation(setup: Setup, tokens_per_second: float) -> dict[str, Any]:
    """Model FLOPs as a share of the device's peak."""
    import torch

    from megatron.report.peaks import device_peak

    peak = device_peak(torch.cuda.get_device_name(), "bf16")
    rate = flops_per_token(configuration(setup)) * tokens_per_second / 1e12
    return {"tflops": rate, "peak_tflops": peak.tflops, "mfu": rate / peak.tflops if peak.tflops else None}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: our speed and memory, and beside each other contender the ratios."""
    others = [name for name in CONTENDERS if name != "ours" and any(name in row["tokens_per_second"] for row in rows)]
    head = ["shape", "type", "sequence", "micro-batch", "ours: tokens/s", "ours: peak MiB"]
    head += [text for name in others for text in (f"speed / {name}", f"memory / {name}")]
    head += ["share of matmul peak"] if any("share_of_peak" in row for row in rows) else []
    head += ["MFU"] if any("mfu" in row for row in rows) else []
    lines = [head, ["---"] * len(head)]
    for row in rows:
        ours = row["tokens_per_second"].get("ours"), row["peak_bytes"].get("ours")
        cells = [
            row["shape"],
            row["precision"],
            str(row["sequence"]),
            str(row["micro_batch"]),
            f"{ours[0]:,.0f}" if ours[0] else "",
            f"{ours[1] / 2**20:,.0f}" if ours[1] else "",
        ]
        for name in others:
            speed, memory = row["speed_ratio"].get(name), row["memory_ratio"].get(name)
            low, high = row["speed_ratio_range"].get(name, (None, None))
            cells += [f"{speed:.2f} ({low:.2f} – {high:.2f})" if speed else "", f"{memory:.2f}" if memory else ""]
        if "share of matmul peak" in head:
            cells.append(_shares(row))
        if "MFU" in head:
            share = row.get("mfu", {}).get("mfu")
            cells.append(f"{share:.1%} of {row['mfu']['peak_tflops']:g} TFLOP/s" if share else "")
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _shares(row: dict[str, Any]) -> str:
    """Of each contender, and what they are shares of."""
    if "share_of_peak" not in row:
        return ""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in row["share_of_peak"].items())
    return f"{shares} of {row['peak_flops'] / 1e9:.0f} GFLOP/s"


def option(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not key.path=value")
    return name, yaml.safe_load(value)


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["pythia-14m", "pythia-70m", "pythia-160m"])
    parser.add_argument("--sequence", nargs="+", type=int, default=[512, 2048], help="tokens per sample")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples per step")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--steps", type=int, default=2, help="steps of one contender in one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=TOLERANCE, help="fp32 on CPU and bf16 on a GPU, unless given")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time instead, for busy machines; use it with OMP_NUM_THREADS=1",
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(USUAL))
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument(
        "options", nargs="*", type=option, metavar="key.path=value", help="of our configuration; write them first"
    )
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    asked, rows = arguments(given), []
    for shape in asked.shapes:
        for sequence in asked.sequence:
            setup = Setup(
                shape,
                sequence,
                asked.micro_batch,
                asked.device,
                asked.vocabulary,
                tuple(asked.options),
                asked.clock,
                asked.precision,
            )
            try:
                names = [name for name in asked.contenders if has(name, shape, setup.compute)]
                rows.append(measure(setup, names, asked.steps, asked.rounds))
            except (Mismatch, RuntimeError) as error:
                print(f"{shape}, sequence {sequence}: {error}", file=sys.stderr)
                return 1
            if not asked.json:
                if len(rows) == 1 and "processor" in rows[0]:
                    print(f"{rows[0]['processor']}\n")
                print(table(rows[-1:]) if len(rows) == 1 else table(rows[-1:]).splitlines()[-1], flush=True)
    if asked.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
