"""Saves to the levels on the hosts: copies that are nearer than the folder of checkpoints."""

import time
from collections.abc import Callable, Iterable

from megatron.checkpoint import Fragment, Meta
from megatron.checkpoint.format.durable import number_of
from megatron.checkpoint.levels import Levels
from megatron.checkpoint.save.store import Store
from megatron.config.sections.output import LevelSection
from megatron.worker.beacon import SAVE

from ..exchange import StepReport
from ..hook import Hook, HookContext
from ..trainer import Trainer
from .checkpoint import Interval, failures_answered, intact_state

FIRST = 10  # steps until a level of `every: auto` is saved for the first time, which measures the cost
GROWTH = 4  # largest ratio of two consecutive intervals: the first steps are slower than the rest


class LevelsHook(Hook):
    """Decides when to save to which level. As with a checkpoint, only an inspected state is copied.

    Args:
        contents, inspect: as in `CheckpointHook`.
    """

    def __init__(
        self,
        sections: list[LevelSection],
        levels: Levels,
        store: Store,
        contents: Callable[[int], tuple[Iterable[Fragment], Meta]],
        inspect: Callable[[list[Fragment]], list[str]],
    ) -> None:
        self._sections, self._levels, self._store = sections, levels, store
        self._contents, self._inspect = contents, inspect
        self._next: dict[int, int] = {}  # of levels with `every: auto`: the step after which they are due
        self._last: dict[int, int] = {}
        self._intervals: dict[int, Interval] = {}  # likewise, on rank 0
        self._began = (0, 0.0)
        self._told: set[int] = set()

    @classmethod
    def of(cls, parts: HookContext) -> "LevelsHook | None":
        world, options = parts.world, parts.config.checkpoint
        if parts.levels is None or parts.contents is None or world is None:
            return None
        store = Store(options.dir, world.communicator)
        return cls(list(options.near), parts.levels, store, parts.contents, parts.inspect)

    def on_start(self, trainer: Trainer) -> None:
        self._began = (trainer.start, time.monotonic())
        for number, section in enumerate(self._sections):
            if section.every != "auto":
                continue
            self._last[number], self._next[number] = trainer.start, trainer.start + FIRST
            if trainer.is_main:
                ranks = trainer.mesh.layout.world_size
                self._intervals[number] = Interval(trainer.config, ranks, failures_answered(self._sections, number))

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        due = [number for number in range(len(self._sections)) if self._due(number, trainer.completed)]
        if not due or trainer.last or trainer.back is not None:  # a run that ends saves to its folder
            return
        trainer.settle()
        if trainer.back is not None or trainer.stop_reason is not None:
            return
        trainer.check_state()
        with trainer.aside(SAVE):
            fragments, meta = intact_state(trainer, self._contents, self._inspect)
            for number in due:
                self._save(trainer, number, fragments, meta)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.error is not None or trainer.back is not None:
            return
        saved = self._levels.hosts.rank == 0 and self._has(trainer.completed)
        if trainer.exchange.sum([float(saved)])[0]:
            self._levels.remove()
        else:
            trainer.log("checkpoint.levels: the copies stay, since the end of the run was not saved")

    def _has(self, step: int) -> bool:
        """Whether the folder of checkpoints has a step, as far as it can be read."""
        try:
            return any(number_of(path) == step for path in self._store.paths())
        except OSError:
            return False

    def _due(self, number: int, completed: int) -> bool:
        every = self._sections[number].every
        return completed >= self._next[number] if every == "auto" else completed % int(every) == 0

    def _save(self, trainer: Trainer, number: int, fragments: list[Fragment], meta: Meta) -> None:
        name, begin = self._sections[number].title, time.monotonic()
        problem = self._levels.save(number, trainer.completed, fragments, meta)
        stall = time.monotonic() - begin
        if problem is not None:
            trainer.record("checkpoint_failed", path=name, problem=problem)
            trainer.log(f"warning: {problem}\ncontinuing without this level. Next attempt: its next save")
        elif number not in self._told:  # only once per start
            self._told.add(number)
            trainer.record("level_written", level=name, step=trainer.completed, stall_seconds=stall)
            trainer.log(f"saved step {trainer.completed} in the {name} in {stall:.2f} s")
        if number in self._next:
            self._schedule(trainer, number, stall)

    def _schedule(self, trainer: Trainer, number: int, stall: float) -> None:
        """Choose the level's next save. Rank 0, by whose clock, sends the number of steps."""
        steps = 0.0
        if trainer.is_main:
            interval = self._intervals[number]
            interval.saved(stall)
            first, began = self._began
            pace = max(time.monotonic() - began, 1e-9) / max(trainer.completed - first, 1)
            most = GROWTH * max(trainer.completed - self._last[number], 1)
            steps = min(max(interval.least_waste(trainer.clock.total) / pace, 1.0), most)
        steps = int(trainer.exchange.sum([float(int(steps))])[0])
        self._last[number], self._next[number] = trainer.completed, trainer.completed + max(steps, 1)
