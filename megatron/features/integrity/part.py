"""State at rest: masters, moments and weights do not change between the end of an update and the next one, so their
hashes must not either. This includes state that only one rank holds. A change shows that this rank's memory is at
fault.

Hashes are compared on the device, and the result is read later, so that nothing waits for a device."""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.checkpoint.format.fragment import AVERAGE
from megatron.engine.base import BaseEngine
from megatron.engine.part import EnginePart
from megatron.engine.replicas import Piece, PieceHashes, hash_bits
from megatron.training.hook import StepError
from megatron.training.trainer import Trainer
from megatron.worker.job import CORRUPT


class StateAtRest(EnginePart):
    """Hashes this rank's state after an update, and again before the next.

    Attributes:
        pieces: of the state. None until the engine has its state.
    """

    def __init__(self) -> None:
        self.pieces: PieceHashes | None = None
        self._source: tuple[list[Piece], Collection[int] | None] = [], None  # the watched pieces were chosen from this
        self._watched: list[Piece] = []
        self._before: Tensor | None = None  # while the state rests: hashes, int64 [watched]
        self._changed: Tensor | None = None  # bool [watched]

    def attach(self, engine: BaseEngine) -> None:
        self.pieces, engine.state.before_change = PieceHashes(engine.state), self.forget

    def before_update(self) -> None:
        if self._before is not None:
            self.look()
            self.forget()

    def begin(self, watched: Collection[int] | None = None) -> None:
        """The state rests from now on. If it does already, since an update was skipped, it continues to rest.

        Args:
            watched: codes of the pieces to watch. None: all.
        """
        if self._before is not None or self.pieces is None:
            return
        found = self.pieces.find()
        if found is not self._source[0] or watched is not self._source[1]:
            self._source, self._changed = (found, watched), None
            # The average of the weights moves on its own, after the update.
            still = [each for each in found if not each.name.endswith(f"({AVERAGE})")]
            self._watched = [each for each in still if watched is None or each.code in watched]
        self._before = _hashes(self._watched)

    def look(self) -> None:
        """Compare with the hashes at the beginning of the rest."""
        if self._before is not None:
            changed = _hashes(self._watched) != self._before
            self._changed = changed if self._changed is None else self._changed | changed

    def forget(self) -> None:
        """The rest is over: the state changes."""
        self._before = None

    def count(self, device: torch.device) -> Tensor:
        """int64, 0-d: number of pieces found changed so far."""
        return torch.zeros((), dtype=torch.int64, device=device) if self._changed is None else self._changed.sum()

    def changed(self) -> list[str]:
        changed = [] if self._changed is None else self._changed.tolist()
        return sorted({each.name for each, bad in zip(self._watched, changed) if bad})


def _hashes(pieces: list[Piece]) -> Tensor:
    return torch.stack([hash_bits(each.values) for each in pieces]) if pieces else torch.zeros(0, dtype=torch.int64)


SHOWN = 3  # names of tensors in a message
ADVICE = (
    "Memory or a device of that host may be bad (deepy doctor). The run can be started again from its newest checkpoint"
)


class Corruption(StepError):
    """A rank holds or has computed wrong bits, found after this update. Raised on all ranks."""

    status = CORRUPT


@dataclass(frozen=True)
class Suspects:
    """Ranks that may be at fault."""

    ranks: Sequence[int]  # one of them, or all
    hosts: Sequence[str]  # of each rank
    certain: bool  # whether all of them are at fault
    found: str  # the check: "comparison" of ranks, "rest" of one rank's own state, or "audit"
    tensors: Sequence[str] = ()  # affected tensors

    def text(self, one: str, more: str, unclear: str) -> str:
        """`rank 3 on node2 {one}`, and the like for several ranks, or for one of several."""
        who = ", ".join(f"{rank} on {host}" for rank, host in zip(self.ranks, self.hosts, strict=True))
        if not self.certain:
            return f"one of ranks {who} {unclear}"
        return f"rank {who} {one}" if len(self.ranks) == 1 else f"ranks {who} {more}"

    def give_up(self, trainer: Trainer, step: int, good: int | None, text: str) -> None:
        """Record it in the ledger and end the run. The launcher restarts from an earlier checkpoint.

        Args:
            step: of the last update that was done.
            good: updates after which all was equal, if known.

        Raises:
            Corruption: always.
        """
        trainer.record(
            "corruption", step=step, ranks=list(self.ranks), hosts=list(self.hosts), certain=self.certain,
            found=self.found, tensors=list(self.tensors[:SHOWN]), good=good,
        )  # fmt: skip
        raise Corruption(text, step)


@dataclass(frozen=True)
class StateDifference:
    """A piece of the state that differs between the ranks that hold it."""

    code: int  # hash of its name
    holders: tuple[int, ...]
    odd: tuple[int, ...]  # holders that differ from the majority. All, without a majority.

    @property
    def certain(self) -> bool:
        """Whether a majority identifies the wrong ranks."""
        return len(self.odd) < len(self.holders)


def differences(ranks: Sequence[Sequence[tuple[int, int]]]) -> list[StateDifference]:
    """Compare the pieces of all ranks, in rank order."""
    held: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, pieces in enumerate(ranks):
        for code, value in pieces:
            held[code].append((rank, value))
    found = []
    for code, each in held.items():
        counts = Counter(value for _, value in each)
        if len(counts) < 2:
            continue
        value, most = counts.most_common(1)[0]
        holders = tuple(rank for rank, _ in each)
        certain = 2 * most > len(each)
        found.append(StateDifference(code, holders, tuple(r for r, v in each if v != value) if certain else holders))
    return found


def guilty(found: Sequence[StateDifference]) -> tuple[list[int], bool]:
    """The ranks at fault, and whether that is certain. One certain piece outweighs all uncertain ones."""
    certain = [each for each in found if each.certain]
    ranks = {rank for each in certain or found for rank in each.odd}
    return sorted(ranks), bool(certain)
