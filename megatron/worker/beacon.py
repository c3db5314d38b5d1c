"""Where a rank is, kept in a piece of memory that its agent reads: also while the rank is stuck, stopped or dead.

The agent makes the memory before it starts the rank, which inherits the descriptor (`JOB_BEACON`). It has no name in
any file system and goes with the processes. A rank writes without locks and without system calls, about a microsecond
per change. No other process ever waits for it, nor it for another.

The place (step, phase, ...) is written to two slots in turn, between two copies of its number. A slot whose copies
differ is being written. The other one then has the place before, also where the rank is stopped in the middle."""

import faulthandler
import mmap
import os
import signal
import struct
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TextIO

# Phases, in the order in which a step goes through them.
NAMES = (
    "start",  # imports, before the rank has said anything
    "setup",  # joining the others, building data, model and engine, reading a checkpoint
    "data",
    "forward",
    "backward",
    "reduce",  # of gradients over data parallel ranks
    "optimizer",
    "exchange",  # the numbers of a step
    "hooks",  # outside of steps, without a phase of its own
    "evaluate",
    "save",
    "end",
)
START, SETUP, DATA, FORWARD, BACKWARD, REDUCE, OPTIMIZER, EXCHANGE, HOOKS, EVALUATE, SAVE, END = range(len(NAMES))
DONE = b"its work is done"  # the detail of the end without which a rank must not end with status 0

BEACON, STACKS = "JOB_BEACON", "JOB_STACKS"  # variables with descriptors that a rank inherits
STACK_SIGNAL, ALL_STACKS_SIGNAL = signal.SIGRTMIN + 9, signal.SIGRTMIN + 10  # ask for the main thread's, for all stacks

SIZE = 12288
BRIEF = 0.05  # seconds of a micro-batch that is not reported by itself: a report may take a thousandth of it
GROUPS = 40  # process groups that are followed, and in slot 0 messages between two ranks
PEERS = 0
_HEAD = struct.Struct("=4siq")  # mark, process, whether stacks can be asked for
_MARK = b"dp01"
_WORDS, _WORDS_AT = struct.Struct("=qq"), 32
_INSIDE, _LAYER = 0, 1  # slot of the group in whose call the rank is. For the layer, see below
_LAYERS = 1 << 20  # the number of the place times this, and the layer's from 1 on
_PLACE, _PLACE_AT = struct.Struct("=QdqqiiB96sQ"), (64, 256)
_LONGEST, _LONGEST_AT = struct.Struct("=d"), 512
_GROUP_NAME = struct.Struct("=24s40s96s")  # key, name, members
_GROUP_CALL = struct.Struct("=24sdqqBQ24s")  # operation, when, elements, peer, whether it is new, calls so far, form
_GROUPS_AT = tuple(range(1024, 1024 + 256 * GROUPS, 256))
_CALLS_AT = tuple(at + _GROUP_NAME.size for at in _GROUPS_AT)


@dataclass(frozen=True)
class GroupCall:
    """The last operation of a rank in a process group."""

    key: str  # the same for all members of the group, and for no other group
    name: str  # of the group
    members: str  # global ranks as text, see `ranks_of`. Empty where they are too many for the slot.
    operation: str  # operation, elements: the call, and its elements
    elements: int
    number: int  # how many calls there were in this group, this one included
    peer: int  # the other rank of a message, or -1 for a collective
    new: bool  # whether the call at this place of the step before was another one
    at: float  # when it was called (`time.monotonic`)
    inside: bool  # whether it has not returned
    form: str = ""  # further facts that all members must have in common: "float32", "float32 from rank 0"


@dataclass(frozen=True)
class RankProgress:
    """Where a rank is."""

    pid: int  # of the rank
    stacks: bool  # whether it answers a signal with its stack
    step: int  # number of the update, from 0, or -1 before the first
    done: int  # steps since this start of the process
    phase: str  # one of `NAMES`.
    # part, parts: micro-batch, or instruction of a pipeline's schedule, from 1, or 0 of 0 where there are none
    part: int
    parts: int
    detail: str  # more, in words
    since: float  # when the phase began (`time.monotonic`)
    longest: dict[str, float]  # seconds of the longest stay in each phase so far, after the first two steps
    calls: list[GroupCall]  # by group.
    # Of the model, from 0, that a forward or backward pass has come to. -1 where it is in none, or layers are brief.
    layer: int = -1


class Beacon:
    """The rank's side.

    Args:
        memory: shared with the agent. Without one, no process reads the beacon, but times are still kept.

    Attributes:
        born: when it was made (`time.monotonic`).
        brief: whether the micro-batches of this step are reported together. See `tells_of`.
        pace: seconds of the last step.
    """

    # No dictionary: to look something up in one takes half as long again where a step has filled the caches.
    __slots__ = (
        *("born", "brief", "pace", "shared", "told", "_memory", "_words", "_number", "_phase", "_since"),
        *("_longest", "_spent", "_waited", "_waiting_since", "_step", "_done", "_begun", "_parts", "_calls", "_now"),
        *("_before", "_free", "_stack_file"),
    )

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._memory = bytearray(SIZE) if memory is None else memory
        self.shared = memory is not None
        self._words = memoryview(self._memory)[_WORDS_AT : _WORDS_AT + 16].cast("q")  # one write is one instruction
        self._spent = [0.0] * len(NAMES)  # seconds by phase, and those in collectives
        self._waited = [0.0] * len(NAMES)
        self._waiting_since = 0.0
        self.told: Callable[[int], None] | None = None  # called at each phase that begins, as by a profiler
        self._number, self._phase, self._since = 0, START, monotonic()
        self.born = self._since
        self._longest = [0.0] * len(NAMES)
        self._step, self._done = -1, 0
        self._begun, self._parts = self._since, 0  # of the step
        self.brief, self.pace = False, 0.0  # whether the parts of the last one were brief, and how long it was
        self._calls = [0] * GROUPS
        self._now: list[tuple] = []  # what was called in this step, in all groups, and in the one before
        self._before: list[tuple] = []
        self._free = 1
        self._stack_file: TextIO | None = None
        self._words[_INSIDE] = -1
        _GROUP_NAME.pack_into(self._memory, _GROUPS_AT[PEERS], b"peers", b"messages", b"")
        _HEAD.pack_into(self._memory, 0, _MARK, os.getpid(), 0)

    @classmethod
    def inherited(cls, environment: MutableMapping[str, str] = os.environ) -> "Beacon":
        """The beacon that the agent made for this rank, with answers to its questions for stacks, or our own without an
        agent. The descriptors are not passed on to this process's own children."""
        numbers = [environment.pop(name, "") for name in (BEACON, STACKS)]
        if not all(number.isdigit() for number in numbers):
            return cls()
        memory, stacks = map(int, numbers)
        try:
            beacon = cls(mmap.mmap(memory, SIZE))
            os.close(memory)
            os.set_inheritable(stacks, False)
        except (OSError, ValueError):  # numbers of another job
            return cls()
        beacon.answer(stacks)
        return beacon

    def answer(self, descriptor: int) -> None:
        """Write stacks to this descriptor when the agent's signals come: in the signal's handler itself, below Python,
        so that a main thread that is stuck in a call answers too."""
        self._stack_file = os.fdopen(descriptor, "w")
        faulthandler.register(STACK_SIGNAL, self._stack_file, all_threads=False)
        faulthandler.register(ALL_STACKS_SIGNAL, self._stack_file, all_threads=True)
        _HEAD.pack_into(self._memory, 0, _MARK, os.getpid(), 1)

    def at(self, phase: int, part: int = 0, parts: int = 0, detail: bytes = b"") -> None:
        """The rank enters a phase."""
        now, before = monotonic(), self._phase
        stay = now - self._since
        self._spent[before] += stay
        if stay > self._longest[before] and self._done > 1:
            self._longest[before] = stay
            _LONGEST.pack_into(self._memory, _LONGEST_AT + 8 * before, stay)
        self._phase, self._since = phase, now
        self._number = number = self._number + 1
        _PLACE.pack_into(
            self._memory, _PLACE_AT[number & 1], number, now, self._step, self._done, part, parts, phase, detail, number
        )
        if self.told is not None:
            self.told(phase)

    def begin(self, step: int) -> None:
        """A step begins, with its data."""
        now = monotonic()
        self.pace, self._begun = now - self._begun, now
        self.brief, self._parts = self.pace < BRIEF * self._parts, 0
        self._step = step
        self._before, self._now = self._now, []
        self.at(DATA)

    def tells_of(self, parts: int) -> bool:
        """Whether the rank reports each of a step's micro-batches. Brief ones are reported together, as one forward
        phase: a report takes a microsecond, but ten or more where a model's code has filled the processor's caches."""
        self._parts = parts
        return not self.brief

    def in_layer(self, index: int) -> None:
        """The rank's pass, forward or backward, has come to this layer of the model, or -1 after the last."""
        self._words[_LAYER] = self._number * _LAYERS + index + 1  # only of this phase

    def done(self) -> None:
        """A step has ended."""
        self._done += 1

    def spent(self) -> list[float]:
        """Seconds in each phase so far, waiting for others included. They sum to the time since the beacon was made."""
        found = list(self._spent)
        found[self._phase] += monotonic() - self._since
        return found

    def waits(self) -> list[float]:
        """Seconds in collectives by phase so far. On gloo a rank waits there for the others. On NCCL it does not."""
        return list(self._waited)

    @property
    def waited(self) -> float:
        """Seconds in collectives so far."""
        return sum(self._waited)

    @property
    def own(self) -> list[float]:
        """Seconds in each phase that has ended, without those in collectives."""
        return [spent - waited for spent, waited in zip(self._spent, self._waited)]

    def total(self, phase: int) -> float:
        """Seconds in a phase that the rank is not in now."""
        return self._spent[phase]

    @contextmanager
    def during(self, phase: int, detail: bytes = b"") -> Iterator[None]:
        """A phase inside another one, which continues afterwards."""
        place = _PLACE.unpack_from(self._memory, _PLACE_AT[self._number & 1])
        before, (part, parts, _, words) = self._phase, place[4:8]
        self.at(phase, 0, 0, detail)
        try:
            yield
        finally:
            self.at(before, part, parts, words)

    # ---- collectives

    def group(self, key: str, name: str, members: str) -> int:
        """Follow a process group, and return its slot, or -1 if there is no place left."""
        if self._free == GROUPS:
            return -1
        slot, self._free = self._free, self._free + 1
        texts = [text.encode() for text in (key, name, members)]
        if len(texts[2]) > 96:
            texts[2] = b""
        _GROUP_NAME.pack_into(self._memory, _GROUPS_AT[slot], texts[0][:24], texts[1][:40], texts[2])
        return slot

    def enter(
        self, slot: int, operation: bytes, elements: int, peer: int = -1, *, sized: bool = True, form: bytes = b""
    ) -> None:
        """The rank calls an operation of a group and waits in it.

        Args:
            sized: whether all members must bring the same number of elements.
            form: type and root, where there are any.
        """
        calls, before = self._now, self._before
        what, place = (slot, operation, elements if sized else 0, form), len(calls)
        calls.append(what)
        new = before[place] != what if place < len(before) else bool(before)
        self._waiting_since = now = monotonic()
        self._calls[slot] = number = self._calls[slot] + 1
        _GROUP_CALL.pack_into(self._memory, _CALLS_AT[slot], operation, now, elements, peer, new, number, form)
        self._words[_INSIDE] = slot

    @contextmanager
    def message(self, operation: bytes, elements: int, peer: int, purpose: str) -> Iterator[None]:
        """The rank waits for a message between two ranks that was begun earlier.

        Args:
            operation: send or recv.
            purpose: the instruction of a pipeline that needs it.
        """
        self.enter(PEERS, operation, elements, peer, form=purpose.encode())
        try:
            yield
        finally:
            self.leave()

    @property
    def inside(self) -> bool:
        """Whether the rank is in a call."""
        return self._words[_INSIDE] >= 0

    def wait(self, slot: int) -> None:
        """The rank waits for an operation that was called earlier."""
        self._waiting_since = monotonic()
        self._words[_INSIDE] = slot

    def leave(self) -> None:
        """The operation has returned."""
        self._waited[self._phase] += monotonic() - self._waiting_since
        self._words[_INSIDE] = -1


def read(memory: mmap.mmap | bytes) -> RankProgress | None:
    """The agent's side: the rank's place, or None before the first.

    The bytes of a rank are not trusted: any bytes give a place or None."""
    mark, pid, stacks = _HEAD.unpack_from(memory)
    place = _whole(memory) if mark == _MARK else None
    if place is None or place[6] >= len(NAMES):
        return None
    number, since, step, done, part, parts, phase, detail, _ = place
    phase_of, layer = divmod(_WORDS.unpack_from(memory, _WORDS_AT)[_LAYER], _LAYERS)
    told = struct.unpack_from(f"={len(NAMES)}d", memory, _LONGEST_AT)
    longest = {name: seconds for name, seconds in zip(NAMES, told) if 0 < seconds < 1e9}
    words = _text(detail)
    return RankProgress(
        *(pid, bool(stacks), step, done, NAMES[phase], part, parts, words, since, longest, list(_calls(memory))),
        layer=layer - 1 if phase_of == number else -1,
    )


def _whole(memory: mmap.mmap | bytes) -> tuple | None:
    """The newest place, read again where the rank has written both meanwhile."""
    for _ in range(1000):
        places = [_PLACE.unpack_from(memory, at) for at in _PLACE_AT]
        whole = [place for place in places if place[0] == place[-1] > 0]
        if whole:
            return max(whole)
        if not any(place[0] or place[-1] for place in places):
            return None
    return None


def _calls(memory: mmap.mmap | bytes) -> Iterator[GroupCall]:
    inside = _WORDS.unpack_from(memory, _WORDS_AT)[_INSIDE]
    for slot in range(GROUPS):
        key, name, members = (_text(each) for each in _GROUP_NAME.unpack_from(memory, _GROUPS_AT[slot]))
        operation, when, elements, peer, new, count, form = _GROUP_CALL.unpack_from(memory, _CALLS_AT[slot])
        if key and count:
            what = (_text(operation), elements, count, peer, bool(new), when, slot == inside, _text(form))
            yield GroupCall(key, name, members, *what)


def _text(data: bytes) -> str:
    return "".join(each if each.isprintable() else "?" for each in data.rstrip(b"\0").decode("utf-8", "replace"))


def ranks_text(ranks: list[int] | tuple[int, ...]) -> str:
    """Ranks in few characters: "0-3", "0-12:4" (0, 4, 8, 12), "1,5-6"."""
    parts, left = [], sorted(ranks)
    while left:
        run = [left[0]]
        stride = left[1] - left[0] if len(left) > 1 else 1
        while len(run) < len(left) and left[len(run)] == run[-1] + stride:
            run.append(left[len(run)])
        if len(run) == 2 and stride > 1:
            run = run[:1]
        left = left[len(run) :]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" + (f":{stride}" if stride > 1 else ""))
    return ",".join(parts)


def ranks_of(text: str) -> list[int]:
    """The ranks of a text that `ranks_text` made, or none of any other text."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        span, _, stride = part.partition(":")
        first, _, last = span.partition("-")
        numbers = [first, last or first, stride or "1"]
        if not all(each.isascii() and each.isdigit() and len(each) < 8 for each in numbers) or int(numbers[2]) < 1:
            return []
        found += range(int(numbers[0]), int(numbers[1]) + 1, int(numbers[2]))
    return found
