#!/usr/bin/env python
"""Where the time of a training step goes: the shares of torch's operations, of ours and of its peers.

    OMP_NUM_THREADS=1 python tools/bench/shares.py --shapes pythia-14m pythia-160m --precision bf16 --micro-batch 2
    OMP_NUM_THREADS=1 python tools/bench/shares.py --shapes llama-14m --contenders ours litgpt --precision bf16

The contenders are those of `train_step.py`, each in a process of its own, under torch's profiler. An operation's share
is the time of its own code, without the operations that it calls, of the time of the steps by the clock: use it on a
machine that does nothing else, with one thread. What is no operation is Python and the profiler itself, which makes
steps of many small operations longer.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import json  # noqa: E402
import multiprocessing  # noqa: E402
import time  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from concurrent.futures import ProcessPoolExecutor  # noqa: E402
from typing import Any  # noqa: E402

from tools.bench.contenders import CONTENDERS, SHAPES, Setup, has  # noqa: E402
from tools.bench.processor import processor  # noqa: E402

FIRST = 2  # steps before those that are counted
OUTSIDE = "no operation"
LEAST = 0.02  # the share, in some column, from which on an operation has a line of its own


def operations(name: str, setup: Setup, steps: int) -> dict[str, float]:
    """Seconds of a step in the code of each operation, and `OUTSIDE` of them."""
    from torch.profiler import ProfilerActivity, profile

    contender = CONTENDERS[name](setup)
    for step in range(FIRST):
        contender.step(step)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        begin = time.perf_counter()
        for step in range(FIRST, FIRST + steps):
            contender.step(step)
        whole = (time.perf_counter() - begin) / steps
    contender.close()
    events = profiler.key_averages()
    found = {each.key: each.self_cpu_time_total / 1e6 / steps for each in events if each.key.startswith("aten::")}
    return {**found, OUTSIDE: whole - sum(found.values())}


def measure(setup: Setup, names: list[str], steps: int) -> list[dict[str, Any]]:
    """A column for each contender that can train the shape."""
    columns = []
    for name in names:
        if has(name, setup.shape, setup.compute):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found = pool.submit(operations, name, setup, steps).result()
            what = {"shape": setup.shape, "precision": setup.compute, "contender": name}
            columns.append({**what, "sequence": setup.sequence, "micro_batch": setup.micro_batch, "seconds": found})
    return columns


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Of each operation in the step."""
    whole = sum(seconds.values())
    return {name: each / whole for name, each in seconds.items()}


def table(columns: list[dict[str, Any]]) -> str:
    """Markdown: operations of at least `LEAST` in some column, the largest first; the others together."""
    found = [shares(column["seconds"]) for column in columns]
    most = {name: max(each.get(name, 0.0) for each in found) for each in found for name in each if name != OUTSIDE}
    named = sorted((name for name in most if most[name] >= LEAST), key=lambda name: -most[name])
    rest = [sum(each.values()) - each[OUTSIDE] - sum(each.get(name, 0.0) for name in named) for each in found]
    heads = [f"{each['shape']}, {each['precision']}, {each['contender']}" for each in columns]
    totals = [f"{sum(each['seconds'].values()):.3g} s" for each in columns]
    lines = [["operation", *heads], ["---"] * (len(columns) + 1)]
    lines += [[f"`{name.removeprefix('aten::')}`", *(f"{each.get(name, 0):.1%}" for each in found)] for name in named]
    lines += [["others", *(f"{each:.1%}" for each in rest)]]
    lines += [[OUTSIDE, *(f"{each[OUTSIDE]:.1%}" for each in found)], ["a step", *totals]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["pythia-14m"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["ours"])
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["bf16"])
    parser.add_argument("--sequence", type=int, default=512, help="tokens per sample")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples per step")
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--steps", type=int, default=4, help="that are counted")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    asked = parser.parse_args(given)
    columns = []
    for shape in asked.shapes:
        for precision in asked.precision:
            size = (shape, asked.sequence, asked.micro_batch)
            setup = Setup(*size, vocabulary=asked.vocabulary, precision=precision)
            columns += measure(setup, asked.contenders, asked.steps)
    print(json.dumps(columns) if asked.json else f"{processor()}\n\n{table(columns)}")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
