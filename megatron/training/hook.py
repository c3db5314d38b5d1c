"""What happens beside the steps of a run, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isfunction
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megatron.checkpoint import Fragment, Meta
from megatron.checkpoint.levels import Levels
from megatron.checkpoint.save.finite import non_finite
from megatron.checkpoint.save.saver import Saved
from megatron.config import Config
from megatron.config.sections.output import SampleOptions
from megatron.data.batch import StepBatch
from megatron.engine.protocol import Engine, StepResult
from megatron.plan.prediction import Prediction

from .exchange import StepReport

if TYPE_CHECKING:
    from .start.resume import StartPoint
    from .trainer import Batches, Trainer
    from .world import World

Look = Callable[[int, int], None]  # between micro-batches: (done, of)
RunStep = Callable[[StepBatch, float, Look], StepResult]  # as an engine's `step`
Generate = Callable[[list[str], SampleOptions, int], list[str]]


@dataclass(frozen=True)
class ValidationSet:
    """A named set: batches 0 ... `batches`-1 of `loader`, the same ones each time."""

    name: str
    loader: Batches
    batches: int


class SaverProtocol(Protocol):
    """What is used of `megatron.checkpoint.save.saver.Saver`; all ranks call every method."""

    def save(self, step: int, fragments: Iterable[Fragment], meta: Meta) -> float: ...

    def poll(self) -> list[Saved]: ...

    def wait(self) -> list[Saved]: ...

    def close(self) -> list[Saved]: ...


@dataclass(frozen=True)
class HookContext:
    """What hooks are made of.

    Attributes:
        config: of the run.
        flops_per_token: operations of forward and backward per token, over the whole model, in an update.
        validation: the sets to evaluate.
        saver, contents: how to save, and (completed updates) -> what; None in a run without checkpoints.
        inspect: what is wrong with the values of fragments, in sentences.
        generate: (prompts, options, step) -> one continuation per prompt; None where nothing can generate.
        facts: for the ledger's first line.
        engine, world: of the run; None where it has none of ours.
        prediction: what the run was said to need; None where nobody can say, and on other ranks than the first.
        levels: copies of the state that are nearer than its checkpoints; None where there are none.
    """

    config: Config
    flops_per_token: Callable[[int], float] | None = None
    validation: Sequence[ValidationSet] = ()
    saver: SaverProtocol | None = None
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
    """A wish to go back to a checkpoint of before a step.

    Attributes:
        step: of the spike.
        told: what was seen, in words.
        find: (config, world, this, skipped batches, log, levels) -> where the run continues.
    """

    step: int
    told: str
    find: Callable[..., StartPoint]


class Hook:
    """One concern of a run. A subclass defines the methods that it needs; each is called on all ranks.

    `step` is the number of the update, from 0; after it `step + 1` updates are done. A hook sees the run through the
    trainer: its `config`, `engine` (whose `model` a plain engine has), `mesh`, `sinks`, `clock`. It must do the same
    collectives on every rank, or none. One from a user's package is listed in `hooks`, and made with its `options` as
    keyword arguments; one inside is a line of the registry, and made by `of`.

    Attributes:
        points: names of the methods that the class defines: the others, which do nothing, are not called.
    """

    points: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        usual = {name: method for name, method in vars(Hook).items() if isfunction(method)}
        cls.points = frozenset(name for name, method in usual.items() if getattr(cls, name) is not method)

    @classmethod
    def of(cls, parts: HookContext) -> Hook | None:
        """The hook for a run, None if the run has no use for it."""
        raise NotImplementedError(f"{cls.__name__} is made with its options, not from a run")

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step."""

    def before_step(self, trainer: Trainer, step: int) -> None:
        """The batch is there, the engine has not seen it."""

    def run_step(  # type: ignore[empty-body]
        self, trainer: Trainer, run: RunStep, batch: StepBatch, lr: float, look: Look
    ) -> StepResult:
        """Run the step with `run`, the engine's `step` with earlier hooks around it, once or more."""

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        """A step's numbers have arrived, of all ranks. On an accelerator that is one step after the step itself, unless
        somebody called `trainer.settle()`."""

    def during_step(self, trainer: Trainer, step: int) -> None:
        """Between micro-batches of a slow step; who wishes to stop here may have the step dropped. No collectives."""

    def on_drop(self, trainer: Trainer, step: int, requests: set[str]) -> None:
        """The step was dropped for these requests: the state is that of before it, and the run ends."""

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        """The update is done. Reading a number of `report` waits for the device."""

    def before_save(self, trainer: Trainer) -> None:
        """The state is about to be saved. Who finds it wrong raises, on all ranks."""

    def on_end(self, trainer: Trainer) -> None:
        """The loop is over, also after an error (`trainer.error`): no collectives then. The last hook comes first."""
