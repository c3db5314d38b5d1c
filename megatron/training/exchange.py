"""The one small message of every step: all ranks add up their losses, batch hashes and requests in a single all-reduce.

If updates are checked before they are applied, the message is sent then, since the decision depends on its sums. If
each rank knows the gradient norm by itself, it is sent before the last backward pass, and its sums are read at the
update. By then the ranks have met in the sum of their gradients, so none waits again.

A request is a word that one rank sends to all, such as "SIGTERM arrived here". Since every rank reads the same sums,
all decide alike. The sums stay on the device until they are read."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.config.features.feature import wanted_features
from megatron.engine.protocol import Arriving, StepResult
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.messages.account import group_name, phase
from megatron.parallel.messages.traffic import Call, Messages

REQUESTS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "wall time", "save")
STOPS = REQUESTS[:-1]  # these end the run
Number = torch.Tensor | float
_LIMBS = 4  # a 64-bit hash is sent as four 16-bit numbers, whose sums a float64 holds exactly
_NORM = 2 + _LIMBS + len(REQUESTS) + 1  # numbers of every step. The gradient norm follows them


@dataclass(frozen=True)
class StepReport:
    """Numbers of a step that all ranks know. They are on their way from the device, and the first read waits for them.

    Attributes:
        step: number of the update, from 0.
        sums: float64 sums over ranks: loss times tokens, tokens, limbs of the batch hash, one count per request, rank
            0's seconds, and its gradient norm if that is exchanged.
        shared: float64 [ranks, n], the numbers of each rank's `Trainer.share`. None without any.
    """

    step: int
    lr: float
    result: StepResult
    sums: torch.Tensor
    shared: torch.Tensor | None = None
    _norm_is_last: bool = field(init=False, repr=False, compare=False)
    _numbers: Arriving = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        norm = self.result.grad_norm
        numbers, here = self.sums, False
        if isinstance(norm, torch.Tensor) and norm.device == numbers.device:
            numbers, here = torch.cat([numbers, norm.detach().to(numbers.dtype).view(1)]), True
        object.__setattr__(self, "_norm_is_last", here)
        object.__setattr__(self, "_numbers", Arriving(numbers))

    @cached_property
    def _values(self) -> list[float]:
        return self._numbers.read().tolist()

    @property
    def loss(self) -> float:
        """Mean loss over all labels of the global batch, in nats. nan without labels."""
        return mean_loss(self._values)

    @cached_property
    def grad_norm(self) -> float | None:
        if self._norm_is_last:
            return self._values[-1]
        return None if self.result.grad_norm is None else float(self.result.grad_norm)

    @property
    def batch_hash(self) -> int:
        """Sum modulo 2**64 of the hashes of all data parallel ranks."""
        return joined(self._values[2 : 2 + _LIMBS])

    @property
    def requests(self) -> set[str]:
        """Requests of at least one rank."""
        return {request for request, count in zip(REQUESTS, self._values[2 + _LIMBS :], strict=False) if count}

    @property
    def seconds(self) -> float:
        """Duration of the step, by rank 0's clock. 0 if not measured."""
        return self._values[2 + _LIMBS + len(REQUESTS)]


def report_traffic(config: Config, layout: Layout, rank: int, shared: int = 0) -> Messages:
    """A rank's messages for the report of a step, with `shared` further numbers."""
    features = wanted_features(config).values()
    numbers = _NORM + sum(feature.shares(config, layout) for feature in features) + shared
    call = ("exchange", "")
    found = Messages()
    if layout.world_size > 1:
        group = group_name(range(layout.world_size), layout, layout.coordinates(rank))
        found.add(Call(*call, group, layout.world_size, "all_reduce", "fp64"), 1, 8 * numbers)
    return found


@dataclass
class Meeting:
    """A message with a step's numbers, which may still be on its way."""

    vector: torch.Tensor  # float64, the sums of a `StepReport`, followed by the shared numbers of all ranks
    shares: int = 0  # number of shared numbers per rank
    work: Any = None  # handle to wait for, if any

    def sums(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.vector

    def shared(self, ranks: int) -> torch.Tensor | None:
        """The shared numbers of each rank, [ranks, shares]."""
        return self.vector[-ranks * self.shares :].view(ranks, -1) if self.shares else None

    def loss_and_norm(self, norm: Number | None = None) -> tuple[float, float]:
        """The mean loss, and the given norm of this rank or the norm that rank 0 has sent. The host waits once."""
        numbers, place = self.sums(), _NORM
        if norm is not None:
            own = torch.as_tensor(norm, dtype=torch.float64, device=self.vector.device)
            numbers, place = torch.cat([numbers, own.view(1)]), -1
        values = Arriving(numbers).read().tolist()
        return mean_loss(values), values[place]


class Exchange:
    """Adds numbers over all ranks.

    Args:
        mesh: this rank's place. One rank of each data parallel index reports the hash of its batch, which has whole
            samples.
        device: of the engine's numbers, "cpu" for gloo.
    """

    def __init__(self, mesh: Mesh, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._ranks, self._rank = mesh.layout.world_size, mesh.rank
        self._reports_hash = mesh.at.tensor == mesh.at.context == mesh.at.pipeline == 0

    def sum(self, values: Sequence[Number]) -> torch.Tensor:
        """Sums over all ranks, float64 [len(values)], on the device. Every rank calls it."""
        vector = self._vector(values)
        if self._ranks > 1:
            dist.all_reduce(vector)
        return vector

    def _vector(self, values: Sequence[Number]) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.tensor([_read(value) for value in values], dtype=torch.float64)
        # From pinned memory the copy does not wait for the device, which may still be busy with the step.
        numbers = [0.0 if isinstance(value, torch.Tensor) else float(value) for value in values]
        host = torch.tensor(numbers, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        vector = host.to(self.device, non_blocking=True)
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                vector[index] = value.detach().to(self.device, torch.float64)
        return vector

    def limbs(self, batch_hash: int) -> list[float]:
        """This rank's part of the sum from which `joined` gets the hash of the global batch."""
        code = batch_hash % 2**64 if self._reports_hash else 0
        return [float(code >> (16 * index) & 0xFFFF) for index in range(_LIMBS)]

    def look(self, requests: Collection[str], elapsed: float) -> tuple[set[str], float]:
        """Requests of all ranks within a step, and rank 0's `elapsed`. Every rank calls it, and waits."""
        with phase("look"):
            sums = self.sum([*(request in requests for request in REQUESTS), elapsed * (self._rank == 0)])
        *counts, seconds = sums.tolist()
        return {request for request, count in zip(REQUESTS, counts, strict=True) if count}, seconds

    @phase("exchange")
    def report(
        self, step: int, lr: float, result: StepResult, batch_hash: int, requests: Collection[str], seconds: float = 0.0
    ) -> StepReport:
        """Exchange a step's numbers. Every rank calls it once per step."""
        met = self.meet(result.loss, result.tokens, batch_hash, requests, seconds)
        return StepReport(step, lr, result, met.sums())

    def meet(
        self,
        loss: Number,
        tokens: Number,
        batch_hash: int,
        requests: Collection[str],
        seconds: float,
        *norm: Number,
        share: Sequence[float] = (),
        early: bool = False,
    ) -> Meeting:
        """Send the numbers of a `StepReport`. Every rank calls it.

        Args:
            share: numbers of this rank for all others, the same number on each rank.
            early: do not wait for the others.
        """
        first = self._rank == 0
        vector = self._vector([
            *weighted(loss, tokens),
            *self.limbs(batch_hash),
            *[request in requests for request in REQUESTS],
            *[each if first else 0.0 for each in (seconds, *norm)],
        ])
        if share:
            others = torch.zeros(self._ranks, len(share), dtype=torch.float64, device=self.device)
            others[self._rank] = torch.tensor(share, dtype=torch.float64)
            vector = torch.cat([vector, others.flatten()])
        work = dist.all_reduce(vector, async_op=early) if self._ranks > 1 else None
        return Meeting(vector, len(share), work)


def mean_loss(sums: Sequence[float]) -> float:
    """Mean loss from the sums of a `StepReport`. nan without labels."""
    total, tokens = sums[:2]
    return total / tokens if tokens else math.nan


def joined(limbs: Sequence[float]) -> int:
    """The sum of hashes modulo 2**64, from the sums of their limbs."""
    return sum(int(limb) << (16 * index) for index, limb in enumerate(limbs)) % 2**64


def weighted(loss: Number, tokens: Number) -> tuple[Number, Number]:
    """Loss times tokens, and tokens, as float64. A rank that reports no tokens adds nothing, whatever its loss is."""
    if isinstance(tokens, torch.Tensor) and tokens.device.type != "cpu":
        labels = tokens.detach().double()
        product = torch.as_tensor(loss, device=labels.device).detach().double() * labels
        return torch.where(labels > 0, product, torch.zeros_like(product)), labels
    count = _read(tokens)
    if not count:
        return 0.0, 0.0
    if isinstance(loss, torch.Tensor) and loss.device.type != "cpu":
        return loss.detach().double() * count, count
    return _read(loss) * count, count


def _read(value: Number) -> float:
    return value.item() if isinstance(value, torch.Tensor) else float(value)
