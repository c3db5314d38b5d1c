"""Measure the parts of a start that reads a checkpoint, from the start of each rank's process to its first step.

    python -m bench restart a.yml key.path=value ... [--ranks 2] [--json]

A run of a few steps saves a checkpoint and is started again. Each rank then notes the time at each part of its start,
by the clock and in processor time of all its threads. Shown is the rank for which the clock took longest. Not included
are noticing a failure, ending the other ranks, and the launcher's and the agents' own start.

A rank that is forked from a process with all modules loaded would not need the "imports". They are all modules that the
same rank had when it saved the checkpoint, in that order.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from bench.runner import ROOT, Result, in_folder, share, with_this_folder

FOLDER = "RESTART_MARKS"  # variable with the folder that ranks write to
STEPS = 4  # of the run that leaves the checkpoint
PARTS = {  # where a rank gets to, and what it calls the time from there on
    "imports": "imports",
    "joining": "joining the other ranks",
    "opening the data": "data, and finding the checkpoint",
    "building the model and the engine": "model and engine",
    "reading the checkpoint": "reading the checkpoint",
    "data": "first step",
}


def split(marks: list[list[Any]]) -> dict[str, tuple[float, float]]:
    """(seconds by the clock, processor seconds) of each part of a start, in order. They sum to the whole.

    Args:
        marks: [name, clock, processor] of each place that a rank has come to. A name that is no part's belongs to the
            part around it, and so does a name that comes again.
    """
    begun = [
        next(each for each in marks if each[0] == name) for name in PARTS if any(each[0] == name for each in marks)
    ]
    ends = [*begun[1:], marks[-1]]
    return {
        PARTS[name]: (end[1] - clock, end[2] - processor)
        for (name, clock, processor), end in zip(begun, ends, strict=True)
    }


def options(parser: argparse.ArgumentParser) -> None:
    share(parser, "sources", "--ranks")


@in_folder
def measure(given: argparse.Namespace, folder: Path) -> Result:
    """Train, and start again."""
    from megatron.config import split_arguments
    from megatron.launch.command_line import main as launch

    files, overrides = split_arguments(given.sources)
    own = [*files, *overrides, f"run.dir={folder}/run", "logging.console=quiet", "logging.curve=false"]
    own += ["evaluation.at_end=false", "checkpoint.every=null"]
    os.environ[FOLDER] = str(folder)
    with_this_folder()
    rank = str(ROOT / "bench" / "launch" / "ranks" / "restart.py")
    for last in (STEPS, STEPS + 1):
        if status := launch(["--ranks", str(given.ranks), rank, *own, f"training.stop_at_step={last}"]):
            raise SystemExit(status)
    ranks = [json.loads(Path(folder, f"{number}.json").read_text()) for number in range(given.ranks)]
    parts = split(max(ranks, key=lambda marks: marks[-1][1] - marks[0][1]))
    whole = [sum(each[index] for each in parts.values()) for index in range(2)]
    lines = [f"{'part':34} {'seconds':>8} {'processor':>10} {'of it':>7}"]
    for name, (clock, processor) in [*parts.items(), ("in all", (whole[0], whole[1]))]:
        lines.append(f"{name:34} {clock:8.2f} {processor:10.2f} {processor / whole[1]:7.1%}")
    document = {name: {"seconds": both[0], "processor_seconds": both[1]} for name, both in parts.items()}
    return Result(document, "\n".join(lines))
