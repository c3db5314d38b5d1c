#!/usr/bin/env python
"""Where the time of a start goes that reads a checkpoint, from the start of each rank's process to its first step.

    python tools/bench/restart.py a.yml key.path=value ... [--ranks 2] [--json]

A run of a few steps leaves a checkpoint; then it is started again, and each rank notes when it gets to where, by the
clock and in processor time of all its threads. Shown is the rank for which the clock took longest. What comes before
is not in it: noticing a failure, ending the other ranks, and the launcher's and the agents' own start.

"imports" are what a rank that were forked from a process that has everything loaded would not need: all modules that
the same rank had in the end when it left the checkpoint, in that order.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import contextlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

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


def born() -> float:
    """When this process was started, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def rank() -> int:
    """A rank: trains as `train.py` does, and notes when it gets to where."""
    marks: list[tuple[str, float, float]] = [("imports", born(), 0.0)]

    def note(name: str) -> None:
        marks.append((name, time.time(), time.process_time()))

    modules = Path(os.environ[FOLDER], f"modules_{os.environ['RANK']}.json")
    again = modules.exists()
    if again:
        import torch

        from megatron.engine.deepspeed.process import prepare_deepspeed

        prepare_deepspeed(torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # which keeps compilers out
    for name in json.loads(modules.read_text()) if again else ():
        with contextlib.suppress(Exception):  # what is made as a program runs has names that cannot be imported
            importlib.import_module(name)
    from megatron.training.run import train
    from megatron.worker.beacon import NAMES, Beacon

    note("joining")
    if not again:
        status = train()
        modules.write_text(json.dumps(list(sys.modules)))
        return status
    at, done = Beacon.at, Beacon.done

    def told(self: Beacon, phase: int, part: int = 0, parts: int = 0, detail: bytes = b"") -> None:
        note(detail.decode() or NAMES[phase])
        at(self, phase, part, parts, detail)

    def first(self: Beacon) -> None:
        note("end")
        Path(os.environ[FOLDER], f"{os.environ['RANK']}.json").write_text(json.dumps(marks))
        setattr(Beacon, "done", done)  # noqa: B010
        done(self)

    setattr(Beacon, "at", told)  # noqa: B010  (a method)
    setattr(Beacon, "done", first)  # noqa: B010
    return train()


def split(marks: list[list[Any]]) -> dict[str, tuple[float, float]]:
    """(seconds by the clock, processor seconds) of each part of a start, in order; they sum to the whole.

    Args:
        marks: [name, clock, processor] of each place that a rank has come to. What is no name of a part belongs to the
            part that it is in, and so does a name that comes again.
    """
    begun = [
        next(each for each in marks if each[0] == name) for name in PARTS if any(each[0] == name for each in marks)
    ]
    ends = [*begun[1:], marks[-1]]
    return {
        PARTS[name]: (end[1] - clock, end[2] - processor)
        for (name, clock, processor), end in zip(begun, ends, strict=True)
    }


def main(arguments: list[str] | None = None) -> int:
    """Train, start again, and print the parts."""
    from megatron.config import split_arguments
    from megatron.launch.command_line import main as launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="a.yml", help="files and overrides of the run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_intermixed_args(arguments)
    files, overrides = split_arguments(options.sources)
    with tempfile.TemporaryDirectory() as folder:
        own = [*files, *overrides, f"run.dir={folder}/run", "logging.console=quiet", "logging.curve=false"]
        own += ["evaluation.at_end=false", "checkpoint.every=null"]
        os.environ[FOLDER] = folder
        for last in (STEPS, STEPS + 1):
            if status := launch(["--ranks", str(options.ranks), __file__, *own, f"training.stop_at_step={last}"]):
                return status
        ranks = [json.loads(Path(folder, f"{number}.json").read_text()) for number in range(options.ranks)]
    parts = split(max(ranks, key=lambda marks: marks[-1][1] - marks[0][1]))
    if options.json:
        print(json.dumps({name: {"seconds": both[0], "processor_seconds": both[1]} for name, both in parts.items()}))
        return 0
    whole = [sum(each[index] for each in parts.values()) for index in range(2)]
    print(f"{'part':34} {'seconds':>8} {'processor':>10} {'of it':>7}")
    for name, (clock, processor) in [*parts.items(), ("in all", (whole[0], whole[1]))]:
        print(f"{name:34} {clock:8.2f} {processor:10.2f} {processor / whole[1]:7.1%}")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped
    from megatron.worker.job import guarded

    sys.exit(guarded(rank) if "RANK" in os.environ else piped(main))
