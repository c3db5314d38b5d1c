"""Bits that have changed by themselves: the ranks that differ from others, and the consequences."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.worker.job import CORRUPT

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer

Piece = tuple[int, int]  # a hash of its name, and of its values
SHOWN = 3  # names of tensors in a message
ADVICE = (
    "Memory or a device of that host may be bad (deepy doctor). The run can be started again from its newest checkpoint"
)


class Corruption(RuntimeError):
    """A rank holds or has computed wrong bits. Raised on all ranks.

    Attributes:
        step: number of the update after which it was found.
    """

    status = CORRUPT

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step


@dataclass(frozen=True)
class Suspects:
    """Ranks that may be at fault.

    Attributes:
        ranks: one of them, or all.
        hosts: of each rank.
        certain: whether all of them are at fault.
        found: the check: "comparison" of ranks, "rest" of one rank's own state, or "audit".
        tensors: affected tensors.
    """

    ranks: Sequence[int]
    hosts: Sequence[str]
    certain: bool
    found: str
    tensors: Sequence[str] = ()

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
    """A piece of the state that differs between the ranks that hold it.

    Attributes:
        code: hash of its name.
        odd: holders that differ from the majority. All, without a majority.
    """

    code: int
    holders: tuple[int, ...]
    odd: tuple[int, ...]

    @property
    def certain(self) -> bool:
        """Whether a majority identifies the wrong ranks."""
        return len(self.odd) < len(self.holders)


def differences(ranks: Sequence[Sequence[Piece]]) -> list[StateDifference]:
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
