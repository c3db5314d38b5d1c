"""The trainer's view of an engine: its steps, bad numbers of a step, and numbers on their way from a device.

Nothing here knows DeepSpeed."""

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from megatron.checkpoint.format.fragment import Fragment
from megatron.config import Config
from megatron.data.batch import StepBatch
from megatron.model.embedding_and_head import Reader

LOSS, NORM = "loss", "gradient norm"
REPORT, SKIP, CLIP, ROLLBACK, STOP = "report", "skip", "clip", "rollback", "stop"


@dataclass(frozen=True)
class Spike:
    """A bad number, and the action taken."""

    name: str  # LOSS or NORM
    value: float  # of the step
    limit: float | None  # upper bound of normal values. None where the value is no number.
    action: str  # one of the constants above. Only `report` and `clip` apply the update.

    @property
    def finite(self) -> bool:
        return math.isfinite(self.value)

    @property
    def leaves_out(self) -> bool:
        return self.action in (SKIP, ROLLBACK, STOP)


_arrived: dict[tuple[int, int], int] = {}  # by thread and stream, the number of the last copy that was waited for
_numbers = itertools.count(1)


class Arriving:
    """Values of a tensor, copied to the host in the background. Reading them waits only for this copy, and for none
    after a later copy of the same thread and stream was read. Values on a CPU are not copied.

    Args:
        values: may change after the call if they are on a GPU.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.device.type == "cuda" and not is_fake(values):
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event, stream = torch.cuda.Event(), torch.cuda.current_stream()
            self._event.record(stream)
            self._queue, self._number = (threading.get_ident(), stream.cuda_stream), next(_numbers)

    def read(self) -> Tensor:
        if self._event is not None:
            if self._number > _arrived.get(self._queue, 0):
                self._event.synchronize()
                _arrived[self._queue] = self._number
            self._event = None
        return self._values

    def __float__(self) -> float:
        return float(self.read())


class ArrivingEntry(Mapping[str, Any]):
    """A mapping with one entry, computed from a device's numbers when it is read."""

    def __init__(self, name: str, values: Tensor, compute: Callable[[Tensor], Any]) -> None:
        self.source, self._arriving = values, Arriving(values)
        self._name, self._compute = name, compute

    def __iter__(self) -> Iterator[str]:
        yield self._name

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: str) -> Any:
        if key != self._name:
            raise KeyError(key)
        return self._compute(self._arriving.read())


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step. Numbers may be 0-d tensors on the device, so that nothing waits for them.

    Attributes:
        loss: mean loss over the labels that this rank reports, in nats. Undefined where it reports none.
        tokens: weight of the labels that this rank reports. Exactly one rank reports each label of the global batch, so
            this is 0 on all but the last pipeline stage and on tensor parallel ranks above 0.
        grad_norm: norm of the whole gradient before clipping, equal on all ranks. None if not computed.
        skipped: whether the update was skipped (overflow of fp16 gradients).
        spike: a bad number of the step and the action taken, equal on all ranks. See `Spike`.
        unlabelled: whether no label of the global batch counts. Nothing was computed, and nothing changed, not even the
            optimizer's states.
        extras: further numbers for the record, equal on all ranks.
    """

    loss: torch.Tensor | float
    tokens: torch.Tensor | float
    grad_norm: torch.Tensor | float | None = None
    skipped: bool = False
    unlabelled: bool = False
    spike: Spike | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def updated(self) -> bool:
        return not (self.skipped or self.unlabelled or (self.spike is not None and self.spike.leaves_out))


@dataclass(frozen=True)
class LabelGroups:
    """Groups of labels whose losses are added up separately.

    Attributes:
        ids: int64 [A, M, S, K], the K groups of each label of a batch.
        sums: float64 [2, G] on the engine's device: each group's sum of losses and of weights. Ranks that report
            labels add to it.
    """

    ids: torch.Tensor
    sums: torch.Tensor


class StepDropped(Exception):
    """A step was dropped between two of its micro-batches, on all ranks. No weight or optimizer state has changed.

    Attributes:
        requests: the reasons.
        done: share of its work that is lost.
        left: seconds that the rest would have taken.
    """

    def __init__(self, requests: set[str], done: float, left: float) -> None:
        super().__init__(f"dropped after {done:.0%} of its work")
        self.requests, self.done, self.left = requests, done, left


class RunState(Protocol):
    """The run's state in an engine: masters, optimizer states, buffers."""

    def fragments(self) -> Iterator[Fragment]:
        """Fragments that this rank saves. Each element is saved by exactly one rank."""


class Engine(Protocol):
    """Runs the model on this rank's part of a batch. All ranks call every method together."""

    @property
    def module(self) -> torch.nn.Module:
        """This rank's layers."""

    @property
    def state(self) -> RunState:
        """This rank's part of the state in checkpoints."""

    def step(self, batch: StepBatch, lr: float, look: Callable[[int, int], None] | None = None) -> StepResult:
        """Forward, backward and update on a `StepBatch`, with `lr` as the rate of `optimizer.lr`.

        Args:
            look: called on all ranks with (parts done, parts in all) where the step can be dropped. It drops the
                step by raising `StepDropped`. The engine is then good for saving, and for no further step.
        """

    def foresee(self, batch: StepBatch) -> None:
        """`step` will get this batch, whose labels have weights, after the next one. Add up their weight now."""

    def evaluate(
        self, batch: StepBatch, groups: LabelGroups | None = None
    ) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        """The sum of the losses of the labels that this rank reports, and their weight (see `StepResult.tokens`).

        Args:
            groups: add the losses up by groups too.
        """

    def read(self, batch: StepBatch, readers: Sequence[Reader]) -> list[Any]:
        """Result of each reader, from the head's input of its micro-batch. An empty list on ranks without the head.

        No gradient is computed and no dropout applied. Batches may have any size and length that the layout can cut."""

    def begin_average(self) -> None:
        """Set the average of the weights (`training.weight_average`) to the weights."""

    def advance_average(self, coefficient: float) -> None:
        """average = coefficient * average + (1 - coefficient) * weights, in fp32."""

    def averaged(self) -> AbstractContextManager[None]:
        """Evaluate with the average inside this context. Restores the weights afterwards, bit for bit."""


@runtime_checkable
class ReadsOn(Protocol):
    """An engine that can read a text in pieces, from the state after the earlier pieces."""

    @property
    def config(self) -> Config: ...

    def new_state(self) -> list[Any]:
        """The empty state, one entry per block."""

    def read_on(self, tokens_BS: torch.Tensor, reader: Reader, state: list[Any], begin: int | torch.Tensor) -> Any:
        """Result of the reader, from the head's input of tokens that follow the `begin` tokens of `state`. The state
        grows by them. No gradient is computed and no dropout applied.

        Args:
            begin: as in `Model.forward`.
        """
