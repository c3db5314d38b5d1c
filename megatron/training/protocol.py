"""What the trainer asks of an engine and offers to hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from .exchange import StepReport
    from .trainer import Trainer


@dataclass(frozen=True)
class StepResult:
    """What an engine says about one optimizer step. Numbers may be 0-d tensors on the device: nobody waits for them.

    Attributes:
        loss: mean loss over the labels that this rank reports, in nats; anything where it reports none.
        tokens: weight of the labels that this rank reports. Each label of the global batch is reported by one rank, so
            this is 0 on all but the last pipeline stage and on tensor parallel ranks above 0.
        grad_norm: norm of the whole gradient before clipping, equal on all ranks; None if it was not computed.
        skipped: the update was left out (overflow of fp16 gradients).
        extras: further numbers for the record, equal on all ranks.
    """

    loss: torch.Tensor | float
    tokens: torch.Tensor | float
    grad_norm: torch.Tensor | float | None = None
    skipped: bool = False
    extras: Mapping[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """Runs the model on this rank's part of a batch; every method is called by all ranks together."""

    def step(self, batch, lr: float) -> StepResult:
        """Forward, backward and update on a `StepBatch`, with `lr` as the rate of `optimizer.lr`."""

    def evaluate(self, batch) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        """The sum of the losses of the labels that this rank reports, and their weight (see `StepResult.tokens`)."""


class Hook(Protocol):
    """One concern of a run. All methods are optional; each is called on all ranks, for the hooks in their order.

    `step` is the number of the update, from 0; after it `step + 1` updates are done.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step."""

    def before_step(self, trainer: Trainer, step: int) -> None:
        """The batch is there, the engine has not seen it."""

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        """A step's numbers have arrived, of all ranks. On an accelerator that is one step after the step itself, unless
        somebody called `trainer.settle()`."""

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        """The update is done. Reading a number of `report` waits for the device."""

    def on_end(self, trainer: Trainer) -> None:
        """The loop is over, also after an error (`trainer.error`): no collectives then. The last hook comes first."""
