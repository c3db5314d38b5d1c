"""Looks for bits that have changed by themselves: ranks that must hold the same compare hashes of it."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.checkpoint.communicator import Communicator
from megatron.engine.replicas import PieceHashes
from megatron.engine.state import EngineState
from megatron.worker.job import CORRUPT

from ..corruption import differences, guilty
from ..exchange import StepReport
from ..hook import Hook, HookContext
from ..trainer import Trainer

SHOWN = 3  # names of tensors in a message


class Corruption(RuntimeError):
    """Ranks that must hold equal bits do not.

    Attributes:
        step: number of the update after which it was found.
        status: the exit status of the process.
    """

    status = CORRUPT

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step


class HashesHook(Hook):
    """Compares every n steps, and before each save, so that a checkpoint is never made of a state that differs.

    Args:
        every: n.
        state: of the engine.
        communicator: of all ranks.
        hosts: of each rank.

    Raises:
        Corruption: on every rank.
    """

    def __init__(self, every: int, state: EngineState, communicator: Communicator, hosts: Sequence[str]) -> None:
        self._every, self._communicator, self._hosts = every, communicator, list(hosts)
        self._pieces = PieceHashes(state)
        self._good: int | None = None  # updates after which all was equal
        self._alone: frozenset[int] = frozenset()  # pieces that no other rank holds
        self._rows: int | None = None  # pieces that a rank compares, at most

    @classmethod
    def of(cls, parts: HookContext) -> HashesHook | None:
        every, world, engine = parts.config.training.hashes, parts.world, parts.engine
        if every is None or world is None or world.mesh.layout.world_size == 1:
            return None
        state: EngineState = getattr(engine, "state")  # noqa: B009  (the protocol does not have it)
        return cls(every, state, world.communicator, world.communicator.gather(socket.gethostname()))

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        if trainer.completed % self._every == 0:
            self._compare(trainer)

    def before_save(self, trainer: Trainer) -> None:
        self._compare(trainer)

    def _compare(self, trainer: Trainer) -> None:
        if self._good == trainer.completed:
            return
        with trainer.clock.pause():
            own, names = self._pieces.take(trainer.exchange.device, self._alone)
            everyone = self._gathered(own)
            found = differences(everyone)
        if found:
            codes = {each.code for each in found}
            mine = sorted({name for (code, _), name in zip(own.tolist(), names, strict=True) if code in codes})
            odd, certain = guilty(found)
            self._raise(trainer, odd, certain, sorted({name for each in self._told(mine) for name in each}))
        self._good = trainer.completed

    def _gathered(self, own: torch.Tensor) -> list[list[tuple[int, int]]]:
        """The rows of all ranks, which may have different numbers of them; nothing where no two differ, as is the rule:
        ten thousand ranks have millions of rows.
        """
        first = self._rows is None
        if self._rows is None:
            self._rows = self._most(len(own), own.device)
        if not self._rows:  # nothing is held twice
            return []
        padded = torch.full((self._rows, 2), -1, dtype=torch.int64, device=own.device)
        padded[: len(own)] = own
        everyone = torch.empty(len(self._hosts), *padded.shape, dtype=torch.int64, device=own.device)
        dist.all_gather_into_tensor(everyone, padded[None])
        codes, values = everyone.flatten(0, 1).unbind(1)
        if first:  # who holds what does not change: from now on, what cannot be compared is not hashed
            known, holders = codes[codes >= 0].unique(return_counts=True)
            shared = known[holders > 1]
            self._alone = frozenset(own[:, 0][~torch.isin(own[:, 0], shared)].tolist())
            self._rows = int(torch.isin(everyone[:, :, 0], shared).sum(1).max())
        codes, order = codes.sort()
        values = values[order]
        if not ((codes[1:] == codes[:-1]) & (values[1:] != values[:-1]) & (codes[1:] >= 0)).any():
            return []
        return [[(code, value) for code, value in each if code >= 0] for each in everyone.tolist()]

    @staticmethod
    def _most(rows: int, device: torch.device) -> int:
        most = torch.tensor([rows], device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def _told(self, names: list[str]) -> list[list[str]]:
        return self._communicator.gather(names[:SHOWN])

    def _raise(self, trainer: Trainer, odd: list[int], certain: bool, names: list[str]) -> None:
        who = ", ".join(f"{rank} on {self._hosts[rank]}" for rank in odd)
        if certain and len(odd) == 1:
            who = f"rank {who} holds other bits than the others"
        elif certain:
            who = f"ranks {who} hold other bits than the others"
        else:
            who = f"one of ranks {who} holds wrong bits; so few cannot tell which"
        since = "the start" if self._good is None else f"{self._good} updates"
        shown = ", ".join(names[:SHOWN]) + (" and more" if len(names) > SHOWN else "")
        trainer.record(
            "corruption",
            step=trainer.completed - 1,
            ranks=odd,
            hosts=[self._hosts[rank] for rank in odd],
            certain=certain,
            tensors=names[:SHOWN],
            good=self._good,
        )
        raise Corruption(
            f"after {trainer.completed} updates {who}, in {shown}. All was equal after {since}, and nothing was saved "
            "since it was not. Memory or a device of that host may be bad (tools/doctor.py); the run can be started "
            "again from its newest checkpoint",
            trainer.completed - 1,
        )
