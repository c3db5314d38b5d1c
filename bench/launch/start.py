"""Measure how long it takes from a command to the end of its first step, on 1, 2 and 8 ranks of this host.

    OMP_NUM_THREADS=1 python -m bench start --ranks 1 2 8

Ours is `deepy.py train.py` on a tiny model with one step: configuration, launcher, watch, data, engine, step, metrics,
ledger. The peer is the shortest program that one would write: torchrun, transformers' model of the same shape,
DistributedDataParallel, AdamW, a step on a batch made of random numbers. Both end after the step, and the end is
counted. Wall seconds, or with `--clock cpu` processor seconds of all processes together.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from bench.runner import ROOT, Result, compare, comparison, in_turns, share
from megatron.config.problems import counted

PEER = "torchrun, transformers, DistributedDataParallel"
WORDS, LENGTH, SAMPLES = 64, 32, 8  # as in ranks/start.py


def ours(ranks: int, folder: str) -> list[str]:
    values = {
        "model.vocab_size": WORDS,
        "training.steps": 1,
        "training.sequence_length": LENGTH,
        "training.global_batch_size": SAMPLES,
        "training.micro_batch_size": SAMPLES // ranks,
        "data.synthetic": "copy",
        "run.dir": f"{folder}/run",
        "logging.console": "quiet",
        "logging.curve": "false",
        "schedule.warmup_steps": 0,
        "evaluation.at_end": "false",
        "checkpoint.at_end": "false",
    }
    given = [str(ROOT / "configs" / "test" / "tiny_neox.yml"), *(f"{key}={value}" for key, value in values.items())]
    return [sys.executable, str(ROOT / "deepy.py"), "--ranks", str(ranks), str(ROOT / "train.py"), *given]


def theirs(ranks: int, folder: str) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    return [*torchrun, str(ROOT / "bench" / "launch" / "ranks" / "start.py")]


def run(make: Any, ranks: int, clock: str) -> float:
    """Seconds of a command.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        before, begin = os.times(), time.perf_counter()
        done = subprocess.run(make(ranks, folder), capture_output=True, text=True, check=False, cwd=folder)
        end, after = time.perf_counter(), os.times()
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip())[-400:])
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return end - begin if clock == "wall" else used


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 8], choices=(1, 2, 4, 8))
    share(parser, "--rounds", "--clock", rounds=3)


def measure(given: argparse.Namespace) -> Result:
    made = []
    for ranks in given.ranks:
        ways: dict[str, Callable[[], float]] = {
            name: functools.partial(run, make, ranks, given.clock) for name, make in (("ours", ours), (PEER, theirs))
        }
        made += compare(f"command to first step, {counted(ranks, 'rank')}", "s", in_turns(ways, given.rounds))
    return comparison(made)
