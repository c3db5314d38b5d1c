"""What the trainer asks of an engine. Nothing here knows DeepSpeed, and the trainer knows nothing else of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from megatron.checkpoint.format.fragment import Fragment
from megatron.data.batch import StepBatch
from megatron.model.embedding_and_head import Reader

if TYPE_CHECKING:
    from .spike import Spike


@dataclass(frozen=True)
class StepResult:
    """What an engine says about one optimizer step. Numbers may be 0-d tensors on the device: nobody waits for them.

    Attributes:
        loss: mean loss over the labels that this rank reports, in nats; anything where it reports none.
        tokens: weight of the labels that this rank reports. Each label of the global batch is reported by one rank, so
            this is 0 on all but the last pipeline stage and on tensor parallel ranks above 0.
        grad_norm: norm of the whole gradient before clipping, equal on all ranks; None if it was not computed.
        skipped: the update was left out (overflow of fp16 gradients).
        spike: what was found wrong with the step's numbers and what was done, equal on all ranks; see `engine.spike`.
        unlabelled: no label of the global batch counts, on any rank: nothing was computed and nothing changed, neither
            weights nor the optimizer's states.
        extras: further numbers for the record, equal on all ranks.
    """

    loss: torch.Tensor | float
    tokens: torch.Tensor | float
    grad_norm: torch.Tensor | float | None = None
    skipped: bool = False
    unlabelled: bool = False
    spike: Spike | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LabelGroups:
    """Groups whose losses are wanted apart.

    Attributes:
        ids: int64 [A, M, S, K], the K groups of each label of a batch.
        sums: float64 [2, G] on the engine's device: each group's sum of losses and of weights, which is added to on
            ranks that report labels.
    """

    ids: torch.Tensor
    sums: torch.Tensor


class StepDropped(Exception):
    """A step is given up between two of its micro-batches, on all ranks: no weight and no optimizer state has changed.

    Attributes:
        requests: why.
        done: share of its work that is lost.
        left: seconds that the rest would have taken.
    """

    def __init__(self, requests: set[str], done: float, left: float) -> None:
        super().__init__(f"dropped after {done:.0%} of its work")
        self.requests, self.done, self.left = requests, done, left


class RunState(Protocol):
    """What an engine keeps of a run: masters, optimizer states, buffers."""

    def fragments(self) -> Iterator[Fragment]:
        """What this rank saves of it: each element is in the fragments of one rank alone."""


class Engine(Protocol):
    """Runs the model on this rank's part of a batch; every method is called by all ranks together."""

    @property
    def module(self) -> torch.nn.Module:
        """This rank's layers."""

    @property
    def state(self) -> RunState:
        """This rank's part of what checkpoints keep."""

    def step(self, batch: StepBatch, lr: float, look: Callable[[int, int], None] | None = None) -> StepResult:
        """Forward, backward and update on a `StepBatch`, with `lr` as the rate of `optimizer.lr`.

        Args:
            look: called on all ranks with (parts done, parts in all) where the step can be given up, which it does by
                raising `StepDropped`. The engine is then good for saving, and for no further step.
        """

    def evaluate(
        self, batch: StepBatch, groups: LabelGroups | None = None
    ) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        """The sum of the losses of the labels that this rank reports, and their weight (see `StepResult.tokens`).

        Args:
            groups: add them up by groups too.
        """

    def read(self, batch: StepBatch, readers: Sequence[Reader]) -> list[Any]:
        """What each reader computes from the head's input of its micro-batch; an empty list on ranks without the head.

        No gradient is computed and no dropout applied. Batches may have any size and length that the layout can cut.
        """

    def begin_average(self) -> None:
        """The average of the weights (`training.weight_average`) becomes what the weights are."""

    def advance_average(self, coefficient: float) -> None:
        """average = coefficient * average + (1 - coefficient) * weights, in fp32."""

    def averaged(self) -> AbstractContextManager[None]:
        """While this is open, the engine evaluates with the average; afterwards the weights are back, bit for bit."""


@runtime_checkable
class ReadsOn(Protocol):
    """An engine that can read a text in pieces, from the state that the pieces before it have left."""

    def new_state(self) -> list[Any]:
        """The empty state, one entry per block."""

    def read_on(self, tokens_BS: torch.Tensor, reader: Reader, state: list[Any], begin: int) -> Any:
        """What the reader computes from the head's input of tokens that follow the `begin` tokens of `state`, which
        grows by them. No gradient is computed and no dropout applied."""
