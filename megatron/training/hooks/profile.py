"""A window of steps under torch's profiler, and a snapshot of the accelerator's memory."""

import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from megatron.report.trace import FACTS, FOLDER, MARK
from megatron.worker.beacon import HOOKS, NAMES, Beacon

from ..exchange import StepReport
from ..hook import Hook, HookContext
from ..trainer import Trainer


class ProfileHook(Hook):
    """Profiles steps `start` ... `start + steps - 1` on some ranks.

    Writes `<folder>/profile/trace_rank<r>.json` (chrome://tracing, Perfetto, `deepy profile`) and, with `memory` on
    a GPU, `memory_rank<r>.pickle` (pytorch.org/memory_viz)."""

    def __init__(self, parts: HookContext) -> None:
        self._options, self._folder = parts.config.logging.profile, Path(parts.config.run.dir) / FOLDER
        self._profiler: torch.profiler.profile | None = None
        self._marks: PhaseMarks | None = None
        self._first = self._last = 0  # recorded steps

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
        self._first, self._marks = step, PhaseMarks(trainer.beacon)

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
        waiting = self._marks.end() if self._marks is not None else 0.0
        facts = {"first": self._first, "steps": trainer.completed - self._first, "waiting": waiting}
        profiler.add_metadata_json(FACTS, json.dumps(facts))
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        rank = trainer.mesh.rank
        profiler.export_chrome_trace(str(self._folder / f"trace_rank{rank}.json"))
        if self._options.memory and trainer.exchange.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory_rank{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        trainer.log(f"profile: {self._folder}")


class PhaseMarks:
    """Marks the phases of a rank in the profiler's trace, beginning with the current one.

    Args:
        beacon: of the rank, which reports every phase.
    """

    def __init__(self, beacon: Beacon) -> None:
        self._beacon, self._waited = beacon, beacon.waited
        self._mark = record_function(MARK + NAMES[HOOKS])
        self._mark.__enter__()
        beacon.told = self._next

    def _next(self, phase: int) -> None:
        self._mark.__exit__(None, None, None)
        self._mark = record_function(MARK + NAMES[phase])
        self._mark.__enter__()

    def end(self) -> float:
        """End the marks. Returns the seconds in collectives since the first."""
        self._beacon.told = None
        self._mark.__exit__(None, None, None)
        return self._beacon.waited - self._waited
