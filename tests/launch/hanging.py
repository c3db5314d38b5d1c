"""A hook that makes one rank of a training run hang, in the ways in which real ones do."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.training.hook import Hook
from megatron.training.trainer import Trainer


def shares_memory(process: int | str) -> bool:
    """Whether a process has mapped memory of other ranks."""
    return "memfd:deepy-" in Path(f"/proc/{process}/maps").read_text()


class Hang(Hook):
    """From step `step` on, rank `rank` does what `kind` says. It hangs only in its first attempt.

    Args:
        size: elements of the smallest message.
        wrong: how many the guilty one brings, of a hundred, where shapes differ.
        at: the pass through layer 1, counted from 1, that does not end, where a layer does not.
    """

    def __init__(self, kind: str, rank: int, step: int, size: int = 100, wrong: int = 90, at: int = 0) -> None:
        self.kind, self.rank, self.step, self.size, self.at = kind, rank, step, size, at
        self.wrong = size * wrong // 100
        self.group = None

    def on_start(self, trainer: Trainer) -> None:
        self.passes = 0  # of layer 1 in the step at work
        if self.kind == "layer":  # slow ones, which are reported
            for index, block in enumerate(trainer.engine.model.blocks):
                block.mixer.register_forward_pre_hook(partial(self._in_layer, trainer, index))
        if os.environ.get("JOB_ATTEMPT", "0") != "0":
            self.kind = "none"
        if trainer.mesh.layout.world_size > 1:
            self.group = dist.new_group()
        self.guilty = trainer.mesh.rank == self.rank
        if self.guilty and self.kind in ("disk", "read"):
            self._break_the_data(trainer)

    def _in_layer(self, trainer: Trainer, index: int, *_: object) -> None:
        time.sleep(0.02)
        self.passes += index
        while self.kind == "layer" and self.guilty and trainer.at == self.step and self.passes == self.at:
            time.sleep(0)

    def before_step(self, trainer: Trainer, step: int) -> None:
        self.passes = 0
        if step == self.step:
            print(f"this rank shares memory: {shares_memory('self')}", flush=True)
        if step and self.kind == "types":
            dist.all_reduce(torch.ones(self.size, dtype=torch.float64 if self.guilty and step == self.step else None))
        if step and self.kind == "root":
            dist.broadcast(torch.ones(self.size), 1 if self.guilty and step == self.step else 0)
        if step and self.kind in ("skipped", "shapes", "deadlock"):
            self._together(hang=step == self.step)
        if step != self.step or not self.guilty:
            return
        if self.kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "exit":
            sys.exit(0)
        elif self.kind == "loop":
            numbers = torch.ones(10)
            while bool(numbers.sum() > 0):
                numbers = numbers * 1.0

    def _together(self, *, hang: bool) -> None:
        """Two collectives of all ranks in two groups."""
        wrong = hang and self.guilty
        small, large = torch.ones(self.size), torch.ones(20 * self.size)
        if wrong and self.kind == "deadlock":
            dist.all_reduce(large, group=self.group)
            dist.all_reduce(small)
            return
        if not (wrong and self.kind == "skipped"):
            dist.all_reduce(torch.ones(self.wrong if wrong and self.kind == "shapes" else self.size))
        dist.all_reduce(large, group=self.group)

    def _break_the_data(self, trainer: Trainer) -> None:
        loader, read_end = trainer.loader, os.pipe()[0]
        whole = loader.step

        def step(number: int):
            if number == self.step and self.kind == "read":
                os.read(read_end, 1)
            while number == self.step:  # a disk that needs a moment for every block, and has very many of them
                time.sleep(0.01)
            return whole(number)

        loader.step = step
