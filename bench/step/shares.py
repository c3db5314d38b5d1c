"""Measure where the time of a training step goes: the shares of torch's operations, of ours and of its peers.

    OMP_NUM_THREADS=1 python -m bench shares --shapes pythia-14m pythia-160m --precision bf16 --micro-batch 2
    OMP_NUM_THREADS=1 python -m bench shares --shapes llama-14m --contenders ours litgpt --precision bf16

`train_step.py` has the contenders. Each runs in a process of its own, under torch's profiler. An operation's share is
the time of its own code, without the operations that it calls, over the time of the steps by the clock. Use it on a
machine that does nothing else, with one thread. The rest is Python and the profiler itself, which makes steps of many
small operations longer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from bench.processor import processor
from bench.runner import Result, grid, share
from bench.step.contenders import CONTENDERS, has
from bench.step.setup import SHAPES, Setup

FIRST = 2  # steps before the counted ones
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


def columns_of(setup: Setup, names: list[str], steps: int) -> list[dict[str, Any]]:
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
    """Markdown: operations of at least `LEAST` in some column, the largest first, and then the others together."""
    found = [shares(column["seconds"]) for column in columns]
    most = {name: max(each.get(name, 0.0) for each in found) for each in found for name in each if name != OUTSIDE}
    named = sorted((name for name in most if most[name] >= LEAST), key=lambda name: -most[name])
    rest = [sum(each.values()) - each[OUTSIDE] - sum(each.get(name, 0.0) for name in named) for each in found]
    heads = [f"{each['shape']}, {each['precision']}, {each['contender']}" for each in columns]
    totals = [f"{sum(each['seconds'].values()):.3g} s" for each in columns]
    lines = [["operation", *heads]]
    lines += [[f"`{name.removeprefix('aten::')}`", *(f"{each.get(name, 0):.1%}" for each in found)] for name in named]
    lines += [["others", *(f"{each:.1%}" for each in rest)]]
    lines += [[OUTSIDE, *(f"{each[OUTSIDE]:.1%}" for each in found)], ["a step", *totals]]
    return grid(lines)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["pythia-14m"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["ours"])
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["bf16"])
    share(parser, "--sequence", "--micro-batch", "--vocabulary", "--steps", steps=4)


def measure(given: argparse.Namespace) -> Result:
    columns = []
    for shape in given.shapes:
        for precision in given.precision:
            size = (shape, given.sequence, given.micro_batch)
            setup = Setup(*size, vocabulary=given.vocabulary, precision=precision)
            columns += columns_of(setup, given.contenders, given.steps)
    return Result(columns, f"{processor()}\n\n{table(columns)}")
