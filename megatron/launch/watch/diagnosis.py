"""Who waits for whom, and which rank is at fault: one sentence from where all ranks are.

A rank inside a collective waits for the members of the group with fewer calls in the group. Following these arrows from
rank to rank ends at one that does not wait (it computes, reads, or is stopped), or in a circle. If all have come and
none gets on, they have not called the same thing, or the network between them is cut."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from megatron.worker.beacon import NAMES, ranks_of, ranks_text

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_SIZES_DIFFER = ("all_to_all", "all_to_all_single", "gather", "scatter", "all_gather", "reduce_scatter", "barrier")
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass(frozen=True)
class Waiting:
    """The call that a rank is inside of. `number` counts the calls of the group, this one included. It is `new` if the
    rank called something else at this place of the step before."""

    key: str
    group: str
    operation: str
    number: int
    elements: int
    peer: int
    new: bool
    age: float
    members: tuple[int, ...]
    form: str = ""

    @property
    def text(self) -> str:
        if self.peer >= 0:
            purpose = f" for {self.form}" if self.form else ""
            return f"{self.operation} {'to' if self.operation == 'send' else 'from'} rank {self.peer}{purpose}"
        return f"{self.operation} {self.number:,} of {self.group}"


@dataclass(frozen=True)
class Rank:
    """The known facts of a rank."""

    rank: int
    host: str
    pid: int = 0
    # Of its process: "running", "waiting", "stopped", "in the disk or the network", "ended", or "silent" where its host
    # does not answer
    state: str = "running"
    step: int = -1
    phase: str = ""
    part: int = 0
    parts: int = 0
    detail: str = ""
    layer: int = -1
    age: float = 0.0  # seconds in the phase. limit: seconds that it may take.
    limit: float = float("inf")
    waiting: Waiting | None = None  # the call that it is inside of
    calls: dict[str, int] = field(default_factory=dict)  # operations called so far by the key of their group
    stack: str = ""  # of its main thread, where it was asked for

    @property
    def late(self) -> bool:
        return self.age > self.limit

    @property
    def call(self) -> Waiting:
        """The call that it waits in. ValueError where it does not wait."""
        if self.waiting is None:
            raise ValueError(f"rank {self.rank} waits in no call")
        return self.waiting

    @property
    def progress(self) -> tuple[int, int, int]:
        """Sorts ranks by how far they are."""
        return self.step, NAMES.index(self.phase) if self.phase in NAMES else -1, self.part

    @property
    def where(self) -> str:
        """ "forward of layer 17 of step 12 (micro-batch 2 of 4)". A pipeline's instruction is a detail after it."""
        if not self.phase:
            return "imports"
        what = "micro-batch " * (self.phase in ("forward", "backward") and not self.detail)
        part = f" ({what}{self.part} of {self.parts})" if self.parts else ""
        layer = f" of layer {self.layer}" if self.layer >= 0 else ""
        step = f" of step {self.step}" if self.step >= 0 and self.phase not in ("start", "setup", "end") else ""
        return f"{self.phase}{layer}{step}{part}" + (f": {self.detail}" if self.detail else "")


@cache
def _form() -> TypeAdapter[Rank]:
    from pydantic import TypeAdapter  # only the launcher loads it, which has loaded it already

    return TypeAdapter(Rank)


@dataclass(frozen=True)
class Diagnosis:
    """One sentence about all ranks."""

    # "working", "busy" (some wait for one that is at work), "stopped", "skipped", "mismatch", "deadlock", "network",
    # "silent"
    kind: str
    culprits: tuple[int, ...]  # ranks at fault, or that the others wait for
    sentence: str
    late: bool  # whether one of them is over its limit, so that the run hangs


def rank_of(known: dict[str, Any], host: str) -> Rank:
    """A rank's sight from an agent's message. Invalid values are dropped."""
    calls = [each for each in known.get("calls", []) if isinstance(each, dict)]
    waiting = None
    for each in calls:
        if each.get("inside"):
            peer = int(each["peer"])
            members = ranks_of(each["members"]) if peer < 0 else [known["rank"], peer]
            waiting = {"new": False, **each, "group": each["name"], "members": members}
    counts = {each["key"]: each["number"] for each in calls}
    return _form().validate_python({**known, "host": host, "waiting": waiting, "calls": counts})


def diagnose(ranks: Sequence[Rank]) -> Diagnosis:
    """Say what a run is doing, and who holds it up.

    Args:
        ranks: all of them, at about the same moment.
    """
    here = {each.rank: each for each in ranks}
    waits = {each.rank: _absent(each, here) for each in ranks if each.waiting is not None and _well(each)}
    kind, culprits = _culprits(here, waits)
    guilty = [here[rank] for rank in culprits]
    late = any(each.late or (each.waiting is not None and each.waiting.age > each.limit) for each in guilty)
    others = [each for rank, each in sorted(here.items()) if rank in waits and rank not in culprits]
    return Diagnosis(kind, tuple(culprits), _sentence(kind, guilty, others, ranks), late)


def disagreement(ranks: Sequence[Rank]) -> Diagnosis | None:
    """Whether ranks have failed because they called different things as one operation of a group, and who did.

    Args:
        ranks: the failed ones, each inside of its last call.
    """
    here = {each.rank: each for each in ranks if each.waiting is not None}
    culprits = _differing(here, dict.fromkeys(here, []))
    if not culprits:
        return None
    guilty = [here[rank] for rank in culprits]
    meeting = {(each.call.key, each.call.number) for each in guilty}
    others = [each for each in here.values() if each not in guilty and (each.call.key, each.call.number) in meeting]
    return Diagnosis("mismatch", tuple(culprits), _sentence("mismatch", guilty, others, ranks), late=True)


def _well(rank: Rank) -> bool:
    return rank.state not in ("stopped", "silent", "ended")


def _absent(rank: Rank, here: dict[int, Rank]) -> list[int]:
    """The ranks that have not come to where a rank waits."""
    call = rank.call
    if call.peer >= 0:
        other = here.get(call.peer)
        if other is None:
            return []
        facing = other.waiting is not None and other.call.peer == rank.rank and _well(other)
        facing = facing and {call.operation, other.call.operation} == {"send", "recv"}
        return [] if facing else [call.peer]
    members = call.members or [each for each, seen in here.items() if call.key in seen.calls]
    return [
        each
        for each in members
        if each != rank.rank
        and each in here
        and (here[each].calls.get(call.key, 0) < call.number or not _well(here[each]))
    ]


def _culprits(here: dict[int, Rank], waits: dict[int, list[int]]) -> tuple[str, list[int]]:
    if not waits:
        return _without_waiting(here)
    ends = {target for each in waits.values() for target in each if target not in waits}
    if ends:
        return _of_ends([here[each] for each in sorted(ends)])
    differing = _differing(here, waits)
    if differing:
        return "mismatch", differing
    circle = sorted(rank for rank in waits if waits[rank] and _reaches(rank, rank, waits))
    if past := _gone_past(here, waits):
        return "mismatch", past
    if not circle:
        return "network", _stuck(here, waits)
    return _of_circle([here[each] for each in circle])


def _without_waiting(here: dict[int, Rank]) -> tuple[str, list[int]]:
    for state, kind in (("silent", "silent"), ("stopped", "stopped")):
        found = sorted(each.rank for each in here.values() if each.state == state)
        if found:
            return kind, found
    late = [each for each in here.values() if each.late]
    if not late:
        return "working", []
    first = min(each.progress for each in late)
    return "busy", sorted(each.rank for each in late if each.progress == first)


def _of_ends(ends: list[Rank]) -> tuple[str, list[int]]:
    """Among ranks that others wait for and that do not wait: stopped ones, else late ones, else the ones furthest
    behind."""
    for state in ("silent", "stopped", "ended"):
        found = [each.rank for each in ends if each.state == state]
        if found:
            return {"ended": "ended"}.get(state, state), found
    chosen = [each for each in ends if each.late] or ends
    first = min(each.progress for each in chosen)
    return "busy", [each.rank for each in chosen if each.progress == first]


def _differing(here: dict[int, Rank], waits: dict[int, list[int]]) -> list[int]:
    """Ranks that have called something else than the others as the same operation of their group."""
    meetings: dict[tuple[str, int], list[Rank]] = {}
    for rank in waits:
        call = here[rank].call
        if call.peer < 0:
            meetings.setdefault((call.key, call.number), []).append(here[rank])
    for _, members in sorted(meetings.items()):
        what = {each.rank: _what(each.call) for each in members}
        counts = Counter(what.values()).most_common()
        if len(counts) < 2:
            continue
        if counts[0][1] > counts[1][1]:
            return sorted(rank for rank, each in what.items() if each != counts[0][0])
        if new := _new(members):
            return new
        ahead = max(each.progress for each in members)
        further = sorted(each.rank for each in members if each.progress == ahead)
        return further if len(further) < len(members) else sorted(what)
    return []


def _gone_past(here: dict[int, Rank], waits: dict[int, list[int]]) -> list[int]:
    """Ranks that have got on from an operation in which others of their group, to which all have come, still are. On
    other hosts that may be the network's fault, but then they stand in the next one."""
    found = set()
    for rank, absent in waits.items():
        call = here[rank].call
        if absent or call.peer >= 0:
            continue
        for other in call.members:
            if other in here and here[other].waiting is not None and other != rank:
                further = here[other].calls.get(call.key, 0) - call.number
                if further > (here[other].host != here[rank].host):
                    found.add(other)
    return sorted(found)


def _new(ranks: list[Rank]) -> list[int]:
    """Ranks that do not repeat the calls of the step before, where others do: up to half of them."""
    new = sorted(each.rank for each in ranks if each.call.new)
    return new if len(new) * 2 <= len(ranks) else []


def _what(call: Waiting) -> tuple[str, int, str]:
    return call.operation, 0 if call.operation in _SIZES_DIFFER else call.elements, call.form


def _reaches(start: int, goal: int, waits: dict[int, list[int]]) -> bool:
    seen, todo = set(), list(waits.get(start, ()))
    while todo:
        rank = todo.pop()
        if rank == goal:
            return True
        if rank not in seen:
            seen.add(rank)
            todo += waits.get(rank, ())
    return False


def _stuck(here: dict[int, Rank], waits: dict[int, list[int]]) -> list[int]:
    """All have come to where they wait: the members of the call that has lasted longest."""
    oldest = max((here[rank].call for rank, absent in waits.items() if not absent), key=lambda call: call.age)
    return sorted(
        rank
        for rank in waits
        if here[rank].call.key == oldest.key and (oldest.peer < 0 or rank in oldest.members or not oldest.members)
    )


def _of_circle(circle: list[Rank]) -> tuple[str, list[int]]:
    """Ranks that wait for each other in different calls. A rank that is further on in the program has skipped a call.
    So has one against the majority. Otherwise the orders of their calls differ."""
    if new := _new(circle):
        return "skipped", new
    ahead = max(each.progress for each in circle)
    further = [each.rank for each in circle if each.progress == ahead]
    if len(further) * 2 <= len(circle):
        return "skipped", further
    behind = [each.rank for each in circle if each.progress != ahead]
    if behind and len(behind) * 2 < len(circle):
        return "skipped", further if len({each.call.key for each in circle if each.rank in further}) > 1 else behind
    calls = Counter((each.call.key, each.call.number) for each in circle).most_common()
    if len(calls) > 1 and calls[0][1] > sum(count for _, count in calls[1:]):
        return "skipped", [each.rank for each in circle if (each.call.key, each.call.number) != calls[0][0]]
    return "deadlock", [each.rank for each in circle]


# ---- words


def _sentence(kind: str, guilty: list[Rank], others: list[Rank], ranks: Sequence[Rank]) -> str:
    if kind == "working":
        return _all_at_work(ranks)
    parts = [f"{_who(some)} {_verb(some, 'wait')} in {_call(some)}" for some in _together(others)]
    if kind == "mismatch":
        meeting = [each for each in (*guilty, *others) if each.call.key == guilty[0].call.key]
        if len({each.call.number for each in meeting}) > 1:
            gone = [f"{_who(some)} {_is(some)} already in {_call(some)}" for some in _together(guilty)]
            return "; ".join(parts + gone) + ", and did not call the same thing before"
        call, rest = guilty[0].call, [each for each in meeting if each not in guilty]
        said, but = ([f"{_who(some)} {_brings(some)}" for some in _together(who, sizes=True)] for who in (rest, guilty))
        words = ", but ".join(filter(None, ("; ".join(said), "; ".join(but))))
        return f"ranks do not call the same thing as operation {call.number:,} of {call.group}: {words}"
    if kind == "network":
        call, hosts = guilty[0].call, sorted({each.host for each in guilty})
        between = f"the network between {' and '.join(hosts)} is cut" if len(hosts) > 1 else "the connection is stuck"
        return f"{_who(guilty)} have all come to {call.text} and none gets on{_since(_ages(guilty))}: {between}"
    if kind == "deadlock":
        parts += [f"{_who(some)} {_verb(some, 'wait')} in {_call(some)}" for some in _together(guilty)]
        return "; ".join(parts) + f": {_who(guilty)} wait for each other, since they call these in different orders"
    if kind == "skipped":
        missed = f", and {_verb(guilty, 'has')} skipped the call that the others wait in" if others else ""
        if all(each.call.new for each in guilty):
            missed += f", where {'it' if len(guilty) == 1 else 'they'} called something else in the step before"
        return "; ".join(parts + [f"{_who(some)} {_is(some)} in {_call(some)}{missed}" for some in _together(guilty)])
    return "; ".join(parts + [_standing(some) for some in _alike(guilty)])


def _standing(some: list[Rank]) -> str:
    """Ranks that do not wait, in one place."""
    first, since = some[0], _since([each.age for each in some])
    on = f" on {', '.join(sorted({each.host for each in some}))}" if first.state in ("silent", "stopped") else ""
    if first.state == "silent":
        return f"{_who(some)}{on} {_is(some)} silent{since}"
    if first.state == "ended":
        return f"{_who(some)} {_verb(some, 'has')} ended in {first.where}"
    text = f"{_who(some)}{on} {_is(some)} in {first.where}{since}"
    if first.state == "stopped":
        return f"{text}, stopped by a signal (SIGSTOP)"
    if first.state == "in the disk or the network":
        text += ", waiting for a disk"
    main = first.stack.find("Current thread")  # the one that took the signal: the main thread
    frame = _FRAME.search(first.stack, max(main, 0))
    return text + (f", at {frame[1]}:{frame[2]} in {frame[3]}" if frame else "")


def _all_at_work(ranks: Sequence[Rank]) -> str:
    if not ranks:
        return "no rank has started"
    known = [each for each in ranks if each.phase]
    if not known:
        return "no rank has said where it is"
    last = max(known, key=lambda each: each.progress)
    return f"{_who(list(ranks))} {_is(list(ranks))} at work: {last.where}"


def _together(ranks: Iterable[Rank], *, sizes: bool = False) -> list[list[Rank]]:
    found: dict[Any, list[Rank]] = {}
    for each in ranks:
        call = each.call
        key = (call.key, call.number if call.peer < 0 else each.rank, call.operation, _what(call) if sizes else 0)
        found.setdefault(key, []).append(each)
    return list(found.values())


def _alike(ranks: Iterable[Rank]) -> list[list[Rank]]:
    found: dict[Any, list[Rank]] = {}
    for each in ranks:
        found.setdefault((each.where, each.state), []).append(each)
    return list(found.values())


def _call(some: list[Rank]) -> str:
    return some[0].call.text + _since(_ages(some))


def _brings(some: list[Rank]) -> str:
    call = some[0].call
    return f"{_verb(some, 'call')} {call.operation} with {call.elements:,} elements" + f" of {call.form}" * bool(
        call.form
    )


def _ages(some: list[Rank]) -> list[float]:
    return [each.call.age for each in some]


def _since(ages: list[float]) -> str:
    longest = max(ages, default=0.0)
    return f" since {longest:,.0f} s" if longest >= 1 else ""


def _who(some: list[Rank]) -> str:
    return f"{'rank' if len(some) == 1 else 'ranks'} {ranks_text([each.rank for each in some]).replace(',', ', ')}"


def _is(some: list[Rank]) -> str:
    return "is" if len(some) == 1 else "are"


def _verb(some: list[Rank], word: str) -> str:
    if word == "has":
        return "has" if len(some) == 1 else "have"
    return word + "s" * (len(some) == 1)
