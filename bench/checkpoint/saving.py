"""Measure saving and resuming on one rank, by ours, torch.save, torch's distributed checkpoints, and DeepSpeed.

    OMP_NUM_THREADS=1 python -m bench saving --shape pythia-70m --json

Each writes and reads again the same weights and both moments of AdamW, in turns, in one process. The time of "save"
ends when `save` returns and the files can be read. Our files are then hashed, durable and renamed. The others keep
their defaults.

"resume" fills the tensors of a model and optimizer that exist. Ours is what a run does: it checks every byte, and then
reads them. "torch.save, mapped" maps the file and copies it into the tensors. Without the copy, `load_state_dict` of an
optimizer would leave the moments in the file, unread. It checks nothing: "torch.save, mapped and hashed" is equal work,
with our hash over each byte first. "resume, unchecked" is equal work too: ours then compares only sizes.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.runner import Result, compare, comparison, in_folder, share, timed
from bench.step.contenders import Ours
from bench.step.setup import SHAPES, Setup

SAVE, RESUME = "save", "resume"
UNCHECKED, MAPPED, HASHED = "ours, unchecked", "torch.save, mapped", "torch.save, mapped and hashed"
PIECE = 1 << 18  # bytes that are hashed at once, in the cache of a core


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
        from megatron.checkpoint.format.manifest import Meta
        from megatron.checkpoint.save.writer import save

        save(where, 1, self.engine.state.fragments(), Meta(1, optimizer=self.engine.state.counters()))

    def ours_resume(self, where: Path, verify: str = "checksums") -> None:
        from megatron.checkpoint.format.durable import step_name
        from megatron.checkpoint.read.reader import open_checkpoint

        open_checkpoint(where / step_name(1), verify=verify).read_into(self.engine.state.targets())
        self.engine.state.refresh()

    def unchecked_resume(self, where: Path) -> None:
        self.ours_resume(where, verify="sizes")

    def torch_save(self, where: Path) -> None:
        self.torch.save(self.state(), where / "state.pt")

    def torch_resume(self, where: Path) -> None:
        found = self.torch.load(where / "state.pt")
        self.engine.module.load_state_dict(found["model"])
        self.engine.optimizer.load_state_dict(found["optimizer"])

    def mapped_resume(self, where: Path) -> None:
        found = self.torch.load(where / "state.pt", mmap=True)
        self.engine.module.load_state_dict(found["model"])
        mine = self.engine.optimizer.state_dict()["state"]
        for number, states in found["optimizer"]["state"].items():
            for name, values in states.items():
                mine[number][name].copy_(values)

    def hashed_resume(self, where: Path) -> None:
        import xxhash

        digest, piece = xxhash.xxh3_64(), bytearray(PIECE)
        with open(where / "state.pt", "rb") as file:
            while size := file.readinto(piece):
                digest.update(memoryview(piece)[:size])
        self.mapped_resume(where)

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
            UNCHECKED: (self.ours_save, self.unchecked_resume),
            "torch.save": (self.torch_save, self.torch_resume),
            MAPPED: (self.torch_save, self.mapped_resume),
            HASHED: (self.torch_save, self.hashed_resume),
            "torch.distributed.checkpoint": (self.distributed_save, self.distributed_resume),
            "DeepSpeed": (self.deepspeed_save, self.deepspeed_resume),
        }


def fingerprint(ways: Ways) -> list[float]:
    """Sums of every state, to see that what was read is what was written."""
    return [float(fragment.data.double().sum()) for fragment in ways.engine.state.fragments()]


@in_folder
def measure(given: argparse.Namespace, folder: Path) -> Result:
    """Raises RuntimeError where a way gives back other numbers than it was given."""
    ways = Ways(given.shape, folder)
    wanted = fingerprint(ways)
    seconds: dict[str, dict[str, list[float]]] = {part: {name: [] for name in ways.pairs()} for part in (SAVE, RESUME)}
    for number in range(
        given.rounds + 1
    ):  # the first is not counted: imports, and room that is taken for the first time
        for name, (save, resume) in ways.pairs().items():
            where = folder / f"{number}-{name}"
            where.mkdir()
            for part, action in ((SAVE, save), (RESUME, resume)):
                spent = timed(action, given.clock, where)
                if number:
                    seconds[part][name].append(spent)
                if part == SAVE:  # what is read must have come from the file
                    for fragment in ways.engine.state.targets():
                        fragment.data.zero_()
            if fingerprint(ways) != wanted:
                raise RuntimeError(f"{name} gave back other numbers than it was given")
            shutil.rmtree(where)
    for name in (UNCHECKED, MAPPED, HASHED):  # other ways to read the same files
        del seconds[SAVE][name]
    alike = {"ours": seconds[RESUME].pop(UNCHECKED), MAPPED: seconds[RESUME][MAPPED]}
    size = ways.bytes
    what = f"{given.shape}, weights and AdamW's moments, {size / 2**20:,.0f} MiB"
    tables = {**seconds, f"{RESUME}, unchecked": alike}
    parts = [compare(f"{part}: {what}", "MB/s", each, size / 1e6) for part, each in tables.items()]
    return comparison([row for made in parts for row in made])


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="pythia-70m")
    share(parser, "--rounds", "--clock")
