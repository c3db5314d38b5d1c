"""A part of the engine: one feature's share in a step, called at the points that it defines.

A run imports and builds only the parts that it wants (`parts/__init__.py`). A point that no part defines costs a step
nothing. In the order of a run:

    module_made        this rank's layers exist, the optimizer does not
    before_deepspeed   the optimizer exists, DeepSpeed has not seen it
    attach             DeepSpeed's engine and the state exist
    restore            a checkpoint was read
    start_at           the run is at an update: at its start, after a resume or a rollback
    before_passes      the batch of a step is known, and nothing of the step has begun
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

from torch import Tensor, nn

from megatron.data.batch import StepBatch

if TYPE_CHECKING:
    from .base import BaseEngine
    from .micro_batches import MicroBatch
    from .protocol import Spike


@dataclass
class Update:
    """End of a step. Parts may correct it for the parts after them.

    Attributes:
        applied: whether weights have changed.
        weight: of this rank's labels, float64 0-d.
        spike: for `StepResult.spike`.
    """

    applied: bool
    weight: Tensor
    spike: Spike | None = None


def defined_points(base: type, cls: type) -> frozenset[str]:
    """Names of the methods of `base` that a subclass overrides."""
    methods = {name: method for name, method in vars(base).items() if isfunction(method)}
    return frozenset(name for name, method in methods.items() if getattr(cls, name) is not method)


class EnginePart:
    """Base of all parts. All ranks call every point, in the order of `parts.PARTS`.

    Attributes:
        points: the points that the class defines. Only these are called.
    """

    points: ClassVar[frozenset[str]] = frozenset()

    @property
    def trial(self) -> bool:
        """Whether the current step is computed without its update."""
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.points = defined_points(EnginePart, cls)

    def module_made(self, engine: BaseEngine, module: nn.Module) -> None:
        """This rank's layers exist, with their parameters. A part may change them, or freeze parameters."""

    def before_deepspeed(self, engine: BaseEngine) -> None:
        """`engine.optimizer` and `engine.clipping` exist, and `engine.deepspeed` does not."""

    def attach(self, engine: BaseEngine) -> None:
        """The whole engine exists. DeepSpeed's methods may be replaced."""

    def start_at(self, step: int) -> None:
        """The next update is number `step`, from 0, and evaluations before it are of the weights at this step."""

    def before_passes(self, batch: StepBatch) -> None:
        """The batch of a step is known. `engine.read` may read others."""

    def before_step(self, step: int, micro_batches: int) -> None:
        """Update number `step` begins, with this number of micro-batches."""

    def check_batch(self, batch: StepBatch) -> None:
        """A batch of a step or an evaluation is about to be read.

        Raises:
            DataError: the batch cannot be used.
        """

    def forward_inputs(self, micro: MicroBatch) -> Mapping[str, Any]:  # type: ignore[empty-body]
        """Further arguments of the model's forward pass in training. Only the plain engine has this point."""

    def after_micro_batch(self, ce_BS: Tensor, weights_BS: Tensor, *more: Tensor) -> None:
        """Cross-entropy and weights of a micro-batch's labels, and further outputs of the model, each [B, S]."""

    def losses_known(self) -> None:
        """The last forward pass of a step is done, its backward pass is not. Only the plain engine has this point."""

    def before_update(self) -> None:
        """The optimizer is about to step: once, or once per group (ZeRO 1 to 3). Not called if a part prevents the
        update."""

    def after_update(self, update: Update) -> Mapping[str, Any]:  # type: ignore[empty-body]
        """Close a step. Returns numbers for the record, equal on all ranks. They may be read from the device later."""

    def state(self) -> Any:  # type: ignore[empty-body]
        """JSON values that checkpoints keep under the part's name."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. An empty one is that of a new run."""


def part_of(engine: Any, name: str) -> Any:
    """The part of this name. None where the engine has no such part, or no parts at all."""
    return getattr(engine, "parts", {}).get(name)
