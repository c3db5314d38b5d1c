#!/usr/bin/env python
"""Measure saving and resuming on one rank, beside torch.save, torch's distributed checkpoints, and DeepSpeed's own.

    OMP_NUM_THREADS=1 python tools/bench/saving.py --shape pythia-70m --json

The same weights and both moments of AdamW are written and read again by each, in turns, in one process. "save" ends
when `save` returns and the files can be read (ours: hashed, durable and renamed; the others as they are by default);
"resume" fills the tensors of a model and optimizer that exist, and ours checks every byte that it reads.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import functools  # noqa: E402
import shutil  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from tools.bench.beside import CLOCKS, finish, lines  # noqa: E402
from tools.bench.contenders import SHAPES, Ours, Setup  # noqa: E402

SAVE, RESUME = "save", "resume"


class Ways:
    """Each way to write a run's state below a folder, and to fill the same tensors from there."""

    def __init__(self, shape: str, folder: Path):
        import torch

        self.torch, self.folder = torch, folder
        self.trained = Ours(Setup(shape, 128, 1, vocabulary=50304))
        self.trained.step(0)  # so that the moments exist
        self.engine = self.trained.engine

    def state(self) -> dict[str, Any]:
        return {"model": self.engine.module.state_dict(), "optimizer": self.engine.optimizer.state_dict()}

    @property
    def bytes(self) -> int:
        return sum(each.data.numel() * each.data.element_size() for each in self.engine.state.fragments())

    def ours_save(self, where: Path) -> None:
        from megatron.checkpoint.format.meta import Meta
        from megatron.checkpoint.save.writer import save

        save(where, 1, self.engine.state.fragments(), Meta(1, optimizer=self.engine.state.counters()))

    def ours_resume(self, where: Path) -> None:
        from megatron.checkpoint.format.names import step_name
        from megatron.checkpoint.read.reader import open_checkpoint

        open_checkpoint(where / step_name(1)).read_into(self.engine.state.targets())
        self.engine.state.refresh()

    def torch_save(self, where: Path) -> None:
        self.torch.save(self.state(), where / "state.pt")

    def torch_resume(self, where: Path) -> None:
        found = self.torch.load(where / "state.pt", mmap=True)
        self.engine.module.load_state_dict(found["model"])
        self.engine.optimizer.load_state_dict(found["optimizer"])

    def distributed_save(self, where: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state(), checkpoint_id=where)

    def distributed_resume(self, where: Path) -> None:
        import torch.distributed.checkpoint as dcp

        state = self.state()
        dcp.load(state, checkpoint_id=where)
        self.engine.module.load_state_dict(state["model"])
        self.engine.optimizer.load_state_dict(state["optimizer"])

    def deepspeed_save(self, where: Path) -> None:
        self.engine.deepspeed.save_checkpoint(str(where), tag="one")

    def deepspeed_resume(self, where: Path) -> None:
        if self.engine.deepspeed.load_checkpoint(str(where), tag="one")[0] is None:
            raise RuntimeError("DeepSpeed has read nothing")

    def pairs(self) -> dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]]:
        return {
            "ours": (self.ours_save, self.ours_resume),
            "torch.save": (self.torch_save, self.torch_resume),
            "torch.distributed.checkpoint": (self.distributed_save, self.distributed_resume),
            "DeepSpeed": (self.deepspeed_save, self.deepspeed_resume),
        }


def fingerprint(ways: Ways) -> list[float]:
    """Sums of every state, to see that what was read is what was written."""
    return [float(fragment.data.double().sum()) for fragment in ways.engine.state.fragments()]


def measure(shape: str, rounds: int, clock: str, folder: Path) -> list[dict[str, Any]]:
    """Raises RuntimeError where a way gives back other numbers than it was given."""
    ways, now = Ways(shape, folder), CLOCKS[clock]
    wanted = fingerprint(ways)
    seconds: dict[str, dict[str, list[float]]] = {part: {name: [] for name in ways.pairs()} for part in (SAVE, RESUME)}
    for number in range(rounds + 1):  # the first is not counted: imports, and room that is taken for the first time
        for name, (save, resume) in ways.pairs().items():
            where = folder / f"{number}-{name}"
            where.mkdir()
            for part, action in ((SAVE, save), (RESUME, resume)):
                begin = now()
                action(where)
                if number:
                    seconds[part][name].append(now() - begin)
                if part == SAVE:  # what is read must have come from the file
                    for fragment in ways.engine.state.targets():
                        fragment.data.zero_()
            if fingerprint(ways) != wanted:
                raise RuntimeError(f"{name} gave back other numbers than it was given")
            shutil.rmtree(where)
    size = ways.bytes
    what = f"{shape}, weights and AdamW's moments, {size / 2**20:,.0f} MiB"
    return [line for part in (SAVE, RESUME) for line in lines(f"{part}: {what}", "MB/s", seconds[part], size / 1e6)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="pythia-70m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    given = parser.parse_args(arguments)
    return finish(functools.partial(measure, given.shape, given.rounds, given.clock), given.json)


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
