"""Hooks: extension points of the training loop, and the objects that hooks are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.checkpoint import Fragment, Meta
from megatron.checkpoint.levels import Levels
from megatron.checkpoint.save.saver import Saver
from megatron.checkpoint.save.writer import non_finite
from megatron.config import Config
from megatron.config.sections.output import SampleOptions
from megatron.data.batch import StepBatch
from megatron.data.loader import Loader
from megatron.engine.part import defined_points
from megatron.engine.protocol import Engine, StepResult
from megatron.plan.prediction import Prediction

from .exchange import StepReport

if TYPE_CHECKING:
    from .start.resume import StartPoint
    from .trainer import Trainer
    from .world import World

Look = Callable[[int, int], None]  # between micro-batches: (done, of)
RunStep = Callable[[StepBatch, float, Look], StepResult]  # as an engine's `step`
Generate = Callable[[list[str], SampleOptions, int], list[str]]


@dataclass(frozen=True)
class ValidationSet:
    """A named set: batches 0 ... `batches`-1 of `loader`, the same ones each time."""

    name: str
    loader: Loader
    batches: int


@dataclass(frozen=True)
class HookContext:
    """Parts of the run for hooks.

    Attributes:
        flops_per_token: operations of forward and backward per token, over the whole model, in an update.
        contents: (completed updates) -> what to save. None in a run without checkpoints.
        inspect: finds broken values of fragments, in sentences.
        generate: (prompts, options, step) -> one continuation per prompt. None where that is impossible.
        engine, world: None where it has none of ours.
        prediction: predicted needs of the run. None if unknown, and on ranks above 0.
        levels: copies of the state that are nearer than its checkpoints, if any.
    """

    config: Config
    flops_per_token: Callable[[int], float] | None = None
    validation: Sequence[ValidationSet] = ()
    saver: Saver | None = None
    contents: Callable[[int], tuple[Iterable[Fragment], Meta]] | None = None
    inspect: Callable[[list[Fragment]], list[str]] = non_finite
    generate: Generate | None = None
    facts: Mapping[str, Any] | None = None
    engine: Engine | None = None
    world: World | None = None
    prediction: Prediction | None = None
    levels: Levels | None = None


@dataclass(frozen=True)
class RollBack:
    """A request to return to a checkpoint from before a step.

    Attributes:
        reason: as text.
        find: (config, world, this, skipped batches, log, levels) -> where the run continues.
    """

    step: int
    reason: str
    find: Callable[..., StartPoint]


class StepError(RuntimeError):
    """The reason why a run ends at a step.

    Attributes:
        step: number of the update.
    """

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step


class Hook:
    """One concern of a run. A subclass defines the methods that it needs, which are called on all ranks.

    `step` is the number of the update, from 0. After it `step + 1` updates are done. A hook sees the run through the
    trainer: its `config`, `engine` (whose `model` a plain engine has), `mesh`, `sinks`, `clock`. It must do the same
    collectives on every rank, or none. A hook of a user's package is listed in `hooks`, and made with its `options` as
    keyword arguments. One inside is a line of the registry, and made by `of`.

    Attributes:
        points: names of the methods that the class defines. Only these are called.
    """

    points: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.points = defined_points(Hook, cls)

    def __init__(self, parts: HookContext | None = None) -> None:
        pass

    @classmethod
    def of(cls, parts: HookContext) -> Hook | None:
        """The hook for a run, or None if the run does not need it."""
        return cls(parts)

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step."""

    def before_step(self, trainer: Trainer, step: int) -> None:
        """The batch is loaded, and the engine has not used it."""

    def run_step(  # type: ignore[empty-body]
        self, trainer: Trainer, run: RunStep, batch: StepBatch, lr: float, look: Look
    ) -> StepResult:
        """Run the step with `run`, once or more. `run` is the engine's `step` with earlier hooks around it."""

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        """The numbers of a step have arrived from all ranks. On an accelerator that is one step later, unless
        `trainer.settle()` was called."""

    def during_step(self, trainer: Trainer, step: int) -> None:
        """Between micro-batches of a slow step. A request to stop may have the step dropped. No collectives."""

    def on_drop(self, trainer: Trainer, step: int, requests: set[str]) -> None:
        """The step was dropped for these requests. The state is that before the step, and the run ends."""

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        """The update is done. Reading a number of `report` waits for the device."""

    def before_save(self, trainer: Trainer) -> None:
        """The state is about to be saved. A hook that finds it broken raises, on all ranks."""

    def on_end(self, trainer: Trainer) -> None:
        """The loop is over, also after an error (`trainer.error`): no collectives then. The last hook is called
        first."""
