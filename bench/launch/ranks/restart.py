"""A rank of `bench/launch/restart.py`: trains as `train.py` does, and notes when it gets to each part of a start."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from pathlib import Path

FOLDER = "RESTART_MARKS"  # as in bench/launch/restart.py: an import of it would count


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


if __name__ == "__main__":
    from megatron.worker.job import guarded

    sys.exit(guarded(rank))
