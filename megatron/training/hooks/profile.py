"""A window of steps under torch's profiler, and a picture of the accelerator's memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from megatron.config.sections.output import ProfileOptions

from ..exchange import StepReport
from ..hook import Hook, Parts
from ..trainer import Trainer


class ProfileHook(Hook):
    """Profiles steps `start` ... `start + steps - 1` on some ranks.

    Writes `<folder>/profile/trace_rank<r>.json` (chrome://tracing, Perfetto) and, with `memory` on a GPU,
    `memory_rank<r>.pickle` (pytorch.org/memory_viz).

    Args:
        options: `logging.profile`.
        folder: the run's directory.
    """

    def __init__(self, options: ProfileOptions, folder: str | Path) -> None:
        self._options, self._folder = options, Path(folder) / "profile"
        self._profiler: torch.profiler.profile | None = None
        self._last = 0  # step of what is recorded

    @classmethod
    def of(cls, parts: Parts) -> ProfileHook:
        return cls(parts.config.logging.profile, parts.config.run.dir)

    def before_step(self, trainer: Trainer, step: int) -> None:
        options = self._options
        if options.start is None or not options.start <= step < options.start + options.steps:
            return
        if self._profiler is not None or trainer.mesh.rank not in options.ranks:
            return
        activities = [ProfilerActivity.CPU]
        if trainer.exchange.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            if options.memory:
                torch.cuda.memory._record_memory_history()
        self._last = options.start + options.steps - 1
        self._profiler = profiler = torch.profiler.profile(
            activities=activities, record_shapes=True, profile_memory=options.memory
        )
        profiler.start()

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        if self._profiler is not None and step >= self._last:
            self._write(trainer, self._profiler)

    def on_end(self, trainer: Trainer) -> None:
        if self._profiler is not None:
            self._write(trainer, self._profiler)

    def _write(self, trainer: Trainer, profiler: torch.profiler.profile) -> None:
        self._profiler = None
        if trainer.exchange.device.type == "cuda":
            torch.cuda.synchronize(trainer.exchange.device)
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        rank = trainer.mesh.rank
        profiler.export_chrome_trace(str(self._folder / f"trace_rank{rank}.json"))
        if self._options.memory and trainer.exchange.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory_rank{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        trainer.log(f"profile: {self._folder}")
