"""A part of the engine: one feature's share in a step, called at the points that it defines.

A run builds the parts that it wants (`parts.py`). The module of any other part is not imported, and a point that no
part defines costs a step nothing. In the order of a run:

    before_deepspeed   the optimizer exists, DeepSpeed has not seen it
    attach             DeepSpeed's engine and the state exist
    restore            a checkpoint was read
    start_at           the run is at an update: at its start, after a resume or a rollback
    before_step        a step begins
    check_batch        a batch is about to be cut into micro-batches
    forward_inputs     a micro-batch is about to be read
    after_micro_batch  the losses of a micro-batch are known, on ranks that have the head
    losses_known       this rank has all losses of the step, and not all of its gradients
    before_update      the optimizer is about to change masters
    after_update       the step has ended, with an update or without
    state              a checkpoint is about to be written
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import isfunction
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from megatron.data.batch import StepBatch

if TYPE_CHECKING:
    from .base import BaseEngine
    from .micro_batches import MicroBatch
    from .spike import Spike


@dataclass
class Update:
    """How a step ended, which parts may correct for those after them.

    Attributes:
        applied: whether weights have changed.
        weight: of the labels that this rank has seen, float64 0-d.
        spike: for `StepResult.spike`.
    """

    applied: bool
    weight: Tensor
    spike: Spike | None = None


class EnginePart:
    """Base of all parts; all ranks call every point, in the order of `parts.PARTS`.

    Attributes:
        points: the points that the class defines; the others are not called.
    """

    points: ClassVar[frozenset[str]] = frozenset()

    @property
    def trial(self) -> bool:
        """Whether the current step is computed without its update."""
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        usual = {name: method for name, method in vars(EnginePart).items() if isfunction(method)}
        cls.points = frozenset(name for name, method in usual.items() if getattr(cls, name) is not method)

    def before_deepspeed(self, engine: BaseEngine) -> None:
        """`engine.optimizer` and `engine.clipping` exist; `engine.deepspeed` does not."""

    def attach(self, engine: BaseEngine) -> None:
        """All of the engine exists; DeepSpeed's methods may be replaced."""

    def start_at(self, step: int) -> None:
        """The next update is number `step`, from 0, and evaluations before it are of the weights at this step."""

    def before_step(self, step: int, micro_batches: int) -> None:
        """Update number `step` begins, on so many micro-batches."""

    def check_batch(self, batch: StepBatch) -> None:
        """A batch of a step or an evaluation is about to be read.

        Raises:
            DataError: it cannot be.
        """

    def forward_inputs(self, micro: MicroBatch) -> Mapping[str, Any]:  # type: ignore[empty-body]
        """Further arguments of the model's forward pass in training; the plain engine alone has this point."""

    def after_micro_batch(self, ce_BS: Tensor, weights_BS: Tensor, *more: Tensor) -> None:
        """Cross-entropy and weights of a micro-batch's labels, and what else the model gave, each [B, S]."""

    def losses_known(self) -> None:
        """The last forward pass of a step is done, its backward pass is not; the plain engine alone has this point."""

    def before_update(self) -> None:
        """The optimizer is about to step: once, or once for each of its groups (ZeRO 1 to 3). Not called where a part
        prevents the update."""

    def after_update(self, update: Update) -> Mapping[str, Any]:  # type: ignore[empty-body]
        """Close a step. Returns numbers for the record, equal on all ranks, which may be read from the device later."""

    def state(self) -> Any:  # type: ignore[empty-body]
        """What a checkpoint keeps, as JSON values, under the part's name."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """From `state`; nothing of it is the beginning."""


def part_of(engine: Any, name: str) -> Any:
    """The part of this name; None where the engine has none, or is none of ours."""
    return getattr(engine, "parts", {}).get(name)
