"""Messages, their bytes and their times, counted or predicted: the entries of accounts. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple


class Call(NamedTuple):
    """Sender, group and type of messages."""

    phase: str  # forward, recompute, backward, update, exchange (the trainer's sums), or a name of work between steps
    layer: str  # `embedding`, `layers.3.attention`, `head`. Empty for messages of no layer, such as sums of gradients.
    # tensor, context, data, pipeline, expert, expert_data, world, or axes joined by `+`. An algorithm in levels also
    # has `data/inside` (ranks of a host) and `data/between` (a rank of each host).
    group: str
    ranks: int  # of the group. 2 for sends between a pair.
    operation: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, send, recv, barrier, ...
    dtype: str  # fp32, bf16, ...


# Bytes of a number, by the names of types in accounts.
SIZES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "uint8": 1}


class Tally:
    """Messages and bytes by call."""

    def __init__(self, entries: Iterable[tuple[Call, int, int]] = ()) -> None:
        self._counts: dict[Call, list[int]] = {}
        for call, messages, size in entries:
            self.add(call, messages, size)

    def add(self, call: Call, messages: int, size: int) -> None:
        """`messages` more calls of `size` bytes in all."""
        count = self._counts.get(call)
        if count is None:
            self._counts[call] = [messages, size]
        else:
            count[0] += messages
            count[1] += size

    def __iter__(self) -> Iterator[tuple[Call, int, int]]:
        for call, (messages, size) in self._counts.items():
            yield call, messages, size

    def __len__(self) -> int:
        return len(self._counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tally) and self._counts == other._counts

    def __add__(self, other: Tally) -> Tally:
        return Tally([*self, *other])

    def by(self, *fields: str) -> dict[tuple, tuple[int, int]]:
        """(messages, bytes) by some fields of the calls, sorted. Entries without messages are skipped."""
        sums: dict[tuple, tuple[int, int]] = {}
        for call, messages, size in self:
            key = tuple(getattr(call, field) for field in fields)
            before = sums.get(key, (0, 0))
            sums[key] = before[0] + messages, before[1] + size
        return {key: sums[key] for key in sorted(sums) if sums[key][0]}

    def take(self) -> Tally:
        """Return the counts so far, and clear them."""
        taken = Tally()
        taken._counts, self._counts = self._counts, {}
        return taken

    def rows(self) -> list[list[Any]]:
        """For files: [phase, layer, group, ranks, operation, dtype, messages, bytes], sorted."""
        return sorted([*call, messages, size] for call, messages, size in self)

    @classmethod
    def of_rows(cls, rows: Iterable[list[Any]]) -> Tally:
        """Read `rows`.

        Raises:
            ValueError: a row is damaged.
        """
        tally = cls()
        for row in rows:
            texts = isinstance(row, list) and len(row) == 8 and all(isinstance(row[at], str) for at in (0, 1, 2, 4, 5))
            if not texts or not all(type(row[at]) is int and row[at] >= 0 for at in (3, 6, 7)):
                raise ValueError(f"not a row of an account: {row!r}")
            tally.add(Call(*row[:6]), row[6], row[7])
        return tally


SPLIT, LATER = "split", "later"  # kinds of messages that a table of algorithms handles separately


class Messages:
    """Predicted messages by call and size, by which a table of algorithms chooses.

    Iterates as a `Tally`, with an entry for each size."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Call, int, str], int] = {}

    def add(self, call: Call, messages: int, size: int, kind: str = "") -> None:
        """`messages` more calls of `size` bytes in all, each of the same size.

        Args:
            kind: `SPLIT`, where the caller gives the size of each rank's part, which may differ. `LATER`, where one
                wait is for all of them.

        Raises:
            ValueError: `messages` does not divide `size`.
        """
        if messages and size % messages:
            raise ValueError(f"{size} bytes are no {messages} messages of one size: {call}")
        if messages:
            key = call, size // messages, kind
            self._counts[key] = self._counts.get(key, 0) + messages

    def __iter__(self) -> Iterator[tuple[Call, int, int]]:
        for (call, each, _), messages in self._counts.items():
            yield call, messages, each * messages

    def each(self) -> Iterator[tuple[Call, int, int, str]]:
        """(call, messages, bytes of one, kind)."""
        for (call, each, kind), messages in self._counts.items():
            yield call, messages, each, kind


# Share of S bytes that a rank sends with a ring of n ranks (nccl-tests, PERFORMANCE.md).
_WIRE = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "all_to_all": lambda n: Fraction(n - 1, n),
    "recv": lambda n: Fraction(0),
}


def wire_bytes(operation: str, ranks: int, size: int) -> float:
    """Bytes that one rank of `ranks` sends, on average, for a call of `size` bytes. 0 for `recv`."""
    factor = _WIRE.get(operation)
    return float(size * factor(ranks)) if factor else float(size)


def crossing_bytes(operation: str, ranks: Sequence[int], hosts: Sequence[Hashable], rank: int, size: int) -> int:
    """Bytes that a rank sends to other hosts for a call of `size` bytes.

    An all-to-all goes from each rank to each. Other operations are rings in the order of the group, in which a rank
    sends only to the next one. (A backend may take another way.)

    Args:
        ranks: of the group in its order, or sender and receiver of a message.
        hosts: of each rank of the job.
        rank: this rank.
    """
    there = [hosts[each] != hosts[rank] for each in ranks]
    if operation == "all_to_all":
        return size * sum(there) // len(ranks)
    after = there[(ranks.index(rank) + 1) % len(ranks)]
    return round(wire_bytes(operation, len(ranks), size)) if after else 0


class MessageKind(NamedTuple):
    """Messages that are summed."""

    phase: str  # phase, group, operation, dtype: as in `traffic.Call`
    group: str
    members: str  # ranks of the group, or sender and receiver, as text: "0 2 4"
    operation: str
    dtype: str


class Duration(NamedTuple):
    """Sums over messages of a rank."""

    messages: int = 0  # number of timed messages. Each sum is over all of them, except `waiting`.
    bytes: int = 0  # nccl-tests' S
    seconds: float = 0.0  # from each call to its end
    exposed: float = 0.0  # seconds that computation did not hide
    waiting: float = 0.0  # seconds until the last rank started the message. 0 where unknown.
    split: int = 0  # messages with known `waiting`
    last: int = 0  # messages that this rank started last

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
