"""Times of messages: sums for files and tables. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .traffic import wire_bytes


class MessageKind(NamedTuple):
    """Messages that are summed.

    Attributes:
        phase, group, operation, dtype: as in `traffic.Call`.
        members: ranks of the group, or sender and receiver, as text: "0 2 4".
    """

    phase: str
    group: str
    members: str
    operation: str
    dtype: str


class Duration(NamedTuple):
    """Sums over messages of a rank.

    Attributes:
        messages: number of timed messages. Each sum is over all of them, except `waiting`.
        bytes: nccl-tests' S.
        seconds: from each call to its end.
        exposed: seconds that computation did not hide.
        waiting: seconds until the last rank started the message. 0 where unknown.
        split: messages with known `waiting`.
        last: messages that this rank started last.
    """

    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0
    exposed: float = 0.0
    waiting: float = 0.0
    split: int = 0
    last: int = 0

    @property
    def transfer(self) -> float:
        """Seconds after the last rank had started."""
        return self.seconds - self.waiting

    def plus(self, other: Duration) -> Duration:
        """Both together."""
        return Duration._make(mine + theirs for mine, theirs in zip(self, other))


class Durations:
    """Sums by kind of message."""

    def __init__(self, entries: Iterable[tuple[MessageKind, Duration]] = ()) -> None:
        self._sums: dict[MessageKind, Duration] = {}
        for kind, duration in entries:
            self.add(kind, duration)

    def add(self, kind: MessageKind, duration: Duration) -> None:
        """More messages of a kind."""
        before = self._sums.get(kind)
        self._sums[kind] = duration if before is None else before.plus(duration)

    def __iter__(self) -> Iterator[tuple[MessageKind, Duration]]:
        return iter(sorted(self._sums.items()))

    def __len__(self) -> int:
        return len(self._sums)

    def __add__(self, other: Durations) -> Durations:
        return Durations([*self, *other])

    def by(self, *fields: str) -> dict[tuple[str, ...], Duration]:
        """Sums by some fields of the kinds, sorted."""
        sums: dict[tuple[str, ...], Duration] = {}
        for kind, duration in self:
            key = tuple(getattr(kind, each) for each in fields)
            sums[key] = sums[key].plus(duration) if key in sums else duration
        return dict(sorted(sums.items()))

    def rows(self) -> list[list[Any]]:
        """For files: fields of the kind, then of the duration."""
        return [[*kind, *duration] for kind, duration in self]

    @classmethod
    def of_rows(cls, rows: Iterable[Any]) -> Durations:
        """Read `rows`.

        Raises:
            ValueError: a row is damaged.
        """
        found, texts = cls(), len(MessageKind._fields)
        for row in rows:
            right = isinstance(row, list) and len(row) == texts + len(Duration._fields)
            if not right or not all(isinstance(each, str) for each in row[:texts]):
                raise ValueError(f"not a row of durations: {row!r}")
            numbers = row[texts:]
            whole = all(type(numbers[at]) is int for at in (0, 1, 5, 6))
            if not whole or not all(type(each) in (int, float) and 0 <= each < float("inf") for each in numbers):
                raise ValueError(f"not a row of durations: {row!r}")
            found.add(MessageKind(*row[:texts]), Duration(*numbers))
        return found


def members_text(ranks: Iterable[int]) -> str:
    """Ranks for `MessageKind.members`."""
    return " ".join(map(str, sorted(ranks)))


def bus_bandwidth(kind: MessageKind, duration: Duration) -> float | None:
    """Bytes per second by nccl-tests' definition, of only the transfer. None where no transfer is known."""
    if not duration.bytes or duration.split < duration.messages or duration.transfer <= 0:
        return None
    operation = "send" if kind.operation == "recv" else kind.operation
    return wire_bytes(operation, len(kind.members.split()), duration.bytes) / duration.transfer
