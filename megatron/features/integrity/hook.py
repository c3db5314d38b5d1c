"""Finds bits that have changed by themselves. Ranks that must hold equal state compare hashes of it, and each rank
compares hashes of its own state after an update and before the next."""

import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.checkpoint.format.communicator import Communicator
from megatron.engine.part import part_of
from megatron.training.exchange import StepReport
from megatron.training.hook import Hook, HookContext
from megatron.training.trainer import Trainer

from .options import HASHES_KEYS, AtRest
from .part import ADVICE, SHOWN, StateAtRest, Suspects, differences, guilty

HASHES = "hashes"  # the engine's part

REST = 0  # a code for the number of pieces that a rank has found changed at rest


class HashesHook(Hook):
    """Compares every n steps, and before each save, so that a checkpoint is never made of a state that differs.

    Args:
        every: n.
        at_rest: updates before which a rank's own state is checked. "due": only before a comparison.

    Raises:
        Corruption: on every rank.
    """

    def __init__(
        self, every: int, at_rest: AtRest, rest: StateAtRest, communicator: Communicator, hosts: Sequence[str]
    ) -> None:
        self._every, self._at_rest, self._communicator, self._hosts = every, at_rest, communicator, list(hosts)
        assert rest.pieces is not None
        self._rest, self._pieces = rest, rest.pieces
        self._good: int | None = None  # updates after which all was equal
        self._alone: frozenset[int] | None = None  # pieces that only this rank holds, once known
        self._rows: int | None = None  # largest number of pieces that a rank compares

    @classmethod
    def of(cls, parts: HookContext) -> "HashesHook | None":
        keys, world, engine = HASHES_KEYS.of(parts.config), parts.world, parts.engine
        every = keys.hashes
        if every is None or world is None:
            return None
        rest: StateAtRest = part_of(engine, HASHES)
        hosts = world.communicator.gather(socket.gethostname())
        return cls(every, keys.hashes_at_rest, rest, world.communicator, hosts)

    def on_start(self, trainer: Trainer) -> None:
        self._rest.forget()
        self._begin_rest(trainer)

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        if trainer.completed % self._every == 0:
            self._compare(trainer)
        self._begin_rest(trainer)

    def _begin_rest(self, trainer: Trainer) -> None:
        if self._rests(trainer.completed):
            with trainer.clock.pause():
                self._rest.begin(None if self._at_rest == "always" else self._alone)

    def before_save(self, trainer: Trainer) -> None:
        # Work before a save, such as an evaluation, takes time: check again, if possible.
        if self._good != trainer.completed or self._rests(trainer.completed):
            with trainer.clock.pause():
                self._pieces.find()  # an evaluation may have replaced the trained weights
                self._rest.look()
            self._compare(trainer)

    def _rests(self, completed: int) -> bool:
        """Whether the state is watched after this update."""
        return self._at_rest == "always" or (self._at_rest == "due" and (completed + 1) % self._every == 0)

    def _compare(self, trainer: Trainer) -> None:
        with trainer.clock.pause():
            own, names = self._pieces.take(trainer.exchange.device, self._alone or ())
            changed = torch.zeros(1, 2, dtype=torch.int64, device=own.device)
            changed[0, 1] = self._rest.count(own.device)
            everyone = self._gathered(torch.cat([own, changed]))
        self._judge_rest(trainer, everyone)
        if found := differences([[each for each in rows if each[0] != REST] for rows in everyone]):
            codes = {each.code for each in found}
            mine = sorted({name for (code, _), name in zip(own.tolist(), names, strict=True) if code in codes})
            self._judge(trainer, *guilty(found), self._told(mine))
        self._good = trainer.completed

    def _judge_rest(self, trainer: Trainer, everyone: list[list[tuple[int, int]]]) -> None:
        """A rank whose own state has changed at rest is at fault."""
        ranks = [rank for rank, rows in enumerate(everyone) if (REST, 0) not in rows]
        if not ranks:
            return
        suspects = Suspects(ranks, self._of(ranks), True, "rest", self._told(self._rest.changed()))
        who = suspects.text(*["held other bits before an update than after the previous one"] * 3)
        where = f"{who}, in {self._shown(suspects.tensors)}. Nothing was saved since. {ADVICE}"
        text = f"until {trainer.completed} updates were done {where}"
        suspects.give_up(trainer, trainer.completed - 1, self._good, text)

    def _gathered(self, own: torch.Tensor) -> list[list[tuple[int, int]]]:
        """The rows of all ranks, which may have different numbers of them. Empty if all agree, since ten thousand
        ranks have millions of rows."""
        if len(self._hosts) == 1:
            self._alone = self._alone or frozenset(own[own[:, 0] != REST, 0].tolist())
            return [[(code, value) for code, value in own.tolist()]]
        first = self._rows is None
        if self._rows is None:
            most = torch.tensor([len(own)], device=own.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            self._rows = int(most)
        padded = torch.full((self._rows, 2), -1, dtype=torch.int64, device=own.device)
        padded[: len(own)] = own
        everyone = torch.empty(len(self._hosts), *padded.shape, dtype=torch.int64, device=own.device)
        dist.all_gather_into_tensor(everyone, padded[None])
        codes, values = everyone.flatten(0, 1).unbind(1)
        if first:  # holders do not change: from now on, pieces without another holder are not hashed
            known, holders = codes[codes >= 0].unique(return_counts=True)
            shared = known[holders > 1]
            self._alone = frozenset(own[:, 0][~torch.isin(own[:, 0], shared)].tolist())
            self._rows = int(torch.isin(everyone[:, :, 0], shared).sum(1).max())
        at_rest = not ((codes == REST) & (values != 0)).any()
        codes, order = codes.sort()
        values = values[order]
        if at_rest and not ((codes[1:] == codes[:-1]) & (values[1:] != values[:-1]) & (codes[1:] >= 0)).any():
            return []
        return [[(code, value) for code, value in each if code >= 0] for each in everyone.tolist()]

    def _told(self, names: list[str]) -> list[str]:
        return sorted({name for each in self._communicator.gather(names[:SHOWN]) for name in each})

    def _of(self, ranks: Sequence[int]) -> list[str]:
        return [self._hosts[rank] for rank in ranks]

    @staticmethod
    def _shown(names: Sequence[str]) -> str:
        return ", ".join(names[:SHOWN]) + (" and more" if len(names) > SHOWN else "")

    def _judge(self, trainer: Trainer, odd: list[int], certain: bool, names: list[str]) -> None:
        suspects = Suspects(odd, self._of(odd), certain, "comparison", names)
        who = suspects.text(
            "holds other bits than the others",
            "hold other bits than the others",
            "holds wrong bits, without a majority to say which",
        )
        since = "the start" if self._good is None else f"{self._good} updates"
        text = f"after {trainer.completed} updates {who}, in {self._shown(names)}. All was equal after {since}, and "
        text += f"nothing was saved since it was not. {ADVICE}"
        suspects.give_up(trainer, trainer.completed - 1, self._good, text)
