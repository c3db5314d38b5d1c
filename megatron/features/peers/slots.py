"""The ledger of a run whose peers exchange gradients in each step. Rank 0 of each peer uses it.

A step has a fixed number of *slots*, equal shares of its batch. The gradient of a slot is a function of the weights and
of the step, so any peer can compute it. In addition to the files of `rounds`:

- `contributions/<step>/<slot>.<peer>`: the gradient of a slot.
- `rounds/<step>.json`: the line: the peer and the hash of each slot, and the peers of the next step's slots.
- `wanted/<peer>`: this peer lacks gradients of lines, and asks for a state.
- `states/<step>/`: the state after a step, in pieces, from a living peer."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from megatron.config.problems import UserError

from .folder import Unreadable
from .messages import HEAD_LIMIT, Expected, Refused, digest, limit, tensors_of, unseal
from .options import slots_of
from .rounds import Offered, Rounds, TooFew, number

PIECE = 16 << 20  # bytes of a piece of a state
PIECES = 1 << 20
KEPT = 1000  # lines that are kept in memory
ASKS = 10  # times peers.state_every: gradients are kept so long for a peer that asks for a state
ALIKE = 0.1  # share of a gradient by which another computation of it may differ


@dataclass
class StepLine:
    """A line of the ledger.

    Attributes:
        slots: peer, hash and weight of the labels of each slot. None: the slot was skipped.
        next: the peer of each slot in the next step.
        base: hash of all that the weights before this step follow from.
        serve: whether `peer`, which wrote the line, sends its state after this step.
    """

    round: int
    slots: list[dict[str, Any] | None]
    next: list[str]
    absent: dict[str, str]
    strikes: dict[str, int]
    base: str
    serve: bool
    peer: str

    @property
    def used(self) -> dict[int, dict[str, Any]]:
        return {slot: each for slot, each in enumerate(self.slots) if each is not None}

    @property
    def names(self) -> list[str]:
        return sorted({each["peer"] for each in self.used.values()})


@dataclass
class Open:
    """A step that is not decided: what was read so far."""

    since: float = field(default_factory=time.monotonic)
    good: dict[int, dict[str, Offered]] = field(default_factory=dict)  # by slot, then by peer
    bad: dict[tuple[int, str], str] = field(default_factory=dict)
    announced: set[str] = field(default_factory=set)
    deals: int = 0  # how often missing slots were dealt to the others


def deal(names: Sequence[str], slots: int) -> list[str]:
    """The peer of each slot: neighbouring slots, in equal numbers where that is possible."""
    return [names[slot * len(names) // slots] for slot in range(slots)]


class SlotLedger(Rounds):
    """Reads and writes the files of a run."""

    given: "SlotLedger | None"
    line_type = StepLine

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.count = slots_of(self.own)
        self._open: dict[int, Open] = {}
        self._deleted: int | None = None  # this peer's files of steps below it are gone

    def jumps(self) -> dict[int, int]:
        return {}  # a replay has no jumps: it repeats each line

    def state_of(self, round: int) -> Open:
        return self._open.setdefault(round, Open())

    def line(self, round: int) -> StepLine | None:  # type: ignore[override]
        found: Any = super().line(round)
        self._lines.pop(round - KEPT, None)
        return found

    def _check(self, line: Any) -> None:
        members = {*self.own.members}
        if len(line.slots) != self.count or len(line.next) != self.count or not line.used:
            raise Refused("slots that cannot be")
        for each in line.used.values():
            if each["peer"] not in members or not isinstance(each["sha256"], str):
                raise Refused("slots that cannot be")
            if not isinstance(each["weight"], float) or not 0 <= each["weight"] < 1e18:
                raise Refused("weights that cannot be")
        if not {*line.next, *line.absent, *line.strikes} <= members or not isinstance(line.base, str):
            raise Refused("facts of no member")
        if not all(isinstance(each, str) and each.isprintable() and len(each) < 500 for each in line.absent.values()):
            raise Refused("reasons that cannot be")
        if type(line.serve) is not bool or not all(type(each) is int and each >= 0 for each in line.strikes.values()):
            raise Refused("facts that cannot be")

    def newest(self) -> int:
        """The number of lines."""
        names = [each.removesuffix(".json") for each in self.folder.names("rounds")]
        return max((int(each) + 1 for each in names if each.isdecimal()), default=0)

    def assigned(self, round: int) -> list[int]:
        """This peer's slots of a step. In a replay a peer computes all."""
        if self.given is not None:
            line = self.given.line(round)
            if line is None:
                raise UserError(f"peers.replay = {self.own.replay} must have a line of step {round}")
            return list(line.used)
        before = self.line(round - 1)
        peers = before.next if before is not None else deal(self.own.members, self.count)
        return [slot for slot, peer in enumerate(peers) if peer == self.name]

    def offer(self, round: int, slot: int, tensors: Mapping[str, Tensor], **facts: Any) -> None:
        """Send a gradient of this peer, and keep it. One that it has sent before is kept instead: others may have read
        that."""
        message = self.seal("slot", round, save(dict(tensors)), slot=slot, **facts)
        kept, _ = self.unseal(message, "slot", round)
        offered: Offered = {**kept, "norm": _norm(tensors)}, dict(tensors)
        line, name = self.line(round), f"contributions/{number(round)}/{slot}.{self.name}"
        if line is None and not self.folder.create(name, message):
            form = {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}
            try:
                offered = self.gradient(round, slot, self.name, form, base=facts["base"]) or offered
            except (Refused, Unreadable):  # no peer can use it
                self.folder.write(name, message)
        if line is not None and (there := line.used.get(slot)) is not None and not _is(offered, there):
            raise UserError(
                f"step {round}: slot {slot} of the ledger has other bits than this peer computes. Peers that repeat "
                "each other's slots need equal layouts and machines"
            )
        self.state_of(round).good.setdefault(slot, {})[self.name] = offered

    def read(self, round: int, form: Expected, base: str) -> Open:
        """Read the gradients of a step that were not read yet."""
        state = self.state_of(round)
        before = self.line(round - 1)
        for name in self.folder.names(f"contributions/{number(round)}"):
            slot, _, peer = name.partition(".")
            if not slot.isdecimal() or int(slot) >= self.count or not self._allowed(peer, before):
                continue
            key = int(slot), peer
            if key in state.bad or peer in state.good.get(int(slot), {}):
                continue
            try:
                found = self.gradient(round, *key, form, base=base)
            except (Refused, Unreadable) as error:
                state.bad[key] = str(error)
                continue
            except OSError:  # as if it were not there yet
                continue
            if found is not None:
                state.good.setdefault(int(slot), {})[peer] = found
        return state

    def gradient(self, round: int, slot: int, peer: str, form: Expected, **bound: Any) -> Offered | None:
        """Checked facts and tensors of a gradient, or None if it is not there.

        Raises:
            Refused, Unreadable: it cannot be used.
        """
        message = self.folder.read_up_to(f"contributions/{number(round)}/{slot}.{peer}", limit(form))
        if message is None:
            return None
        facts, payload = self.unseal(message, "slot", round, peer=peer, slot=slot, **bound)
        tensors = tensors_of(payload, form)
        if not all(isinstance(facts.get(key), float) and abs(facts[key]) < 1e18 for key in ("weight", "loss")):
            raise Refused("numbers that cannot be")
        if facts["weight"] < 0 or type(facts.get("hash")) is not int or not 0 <= facts["hash"] < 1 << 64:
            raise Refused("numbers that cannot be")
        return {**facts, "norm": _norm(tensors)}, tensors

    def _allowed(self, peer: str, before: StepLine | None) -> bool:
        strikes = before.strikes.get(peer, 0) if before is not None else 0
        return peer in self.own.members and strikes < self.own.strikes

    def chosen(self, state: Open, alone: bool = False) -> dict[int, Offered]:
        """The gradient of each slot that is used. One whose norm is far above the median must have been computed by two
        peers, where there are two."""
        found, most = {}, self._most(state)
        for slot, several in self._in_order(state).items():
            good = [each for each in several if each[0]["norm"] <= most or any(_alike(each, o) for o in several)]
            if good or (alone and several):
                found[slot] = (good or several)[0]
        return found

    def _in_order(self, state: Open) -> dict[int, list[Offered]]:
        """By slot, in the order of the members."""
        return {
            slot: [peers[name] for name in self.own.members if name in peers]
            for slot, peers in sorted(state.good.items())
        }

    def _most(self, state: Open) -> float:
        """Largest norm of a gradient that one peer may give."""
        norms = sorted(each[0][0]["norm"] for each in self._in_order(state).values() if each)
        return (norms[(len(norms) - 1) // 2] if norms else 0.0) * self.own.norm_limit or float("inf")

    def _poison(self, state: Open, used: Mapping[int, Offered]) -> dict[tuple[int, str], str]:
        """Reasons of gradients with a large norm, in whose place the one of another peer is used."""
        found, most = {}, self._most(state)
        for slot, taken in used.items():
            for name, each in state.good[slot].items():
                norm = each[0]["norm"]
                if norm > most and each is not taken and not _alike(each, taken):
                    found[slot, name] = f"norm {norm:.3g} above {most:.3g}"
        return found

    def step_of(self, round: int, base: str, form: Expected) -> StepLine | list[int] | None:
        """The line of a step, which is written if the step is complete. Or slots that this peer takes over.

        Raises:
            TooFew: the quorum was not reached for `peers.patience`.
        """
        if (line := self.line(round)) is not None:
            return line
        state = self.read(round, form, base)
        if self.given is not None:
            return self._repeat_step(round, base, self.chosen(state, alone=True))
        alive, waited = self._alive(round, base, state), time.monotonic() - state.since
        used = self.chosen(state, alone=len(alive) == 1)
        missing = [slot for slot in range(self.count) if slot not in used]
        late = waited > self.own.timeout
        if len(alive) >= self.own.quorum and self.name in alive:  # else it was excluded
            if not missing or (late and used and self.own.lost_slots == "skip"):
                return self._write_step(round, base, state, used, alive)
            if late and waited > self.own.timeout * (1 + state.deals):
                place, state.deals = alive.index(self.name) + state.deals, state.deals + 1
                mine = [slot for at, slot in enumerate(missing) if at % len(alive) == place % len(alive)]
                return [slot for slot in mine if self.name not in state.good.get(slot, {})] or None
            if all(state.good.get(slot) for slot in missing):  # only a second opinion is missing, and no peer is late
                return [slot for slot in missing if self._judges(slot, alive, state)] or None
        if waited > self.own.patience + self.own.timeout:
            few = f"{len(alive)} of {self.own.quorum} peers (peers.quorum)"
            raise TooFew(f"{few if len(alive) < self.own.quorum else 'not all slots'} in step {round} in time")
        return None

    def _judges(self, slot: int, alive: Sequence[str], state: Open) -> bool:
        """Whether this peer computes a slot again whose gradient has a large norm."""
        others = [name for name in alive if name not in state.good[slot]]
        return bool(others) and others[slot % len(others)] == self.name

    def _alive(self, round: int, base: str, state: Open) -> list[str]:
        """Peers that have contributed to a step, or announced that they are at it with these weights, in order."""
        for name in self.folder.names(f"announced/{number(round)}"):
            if name in self.own.members and name not in state.announced:
                if (
                    self.facts(f"announced/{number(round)}/{name}", "announced", round, peer=name, base=base)
                    is not None
                ):
                    state.announced.add(name)
        there = state.announced.union({self.name}, *state.good.values())
        before = self.line(round - 1)
        return [name for name in self.own.members if name in there and self._allowed(name, before)]

    def _write_step(
        self, round: int, base: str, state: Open, used: Mapping[int, Offered], alive: Sequence[str]
    ) -> StepLine | None:
        before = self.line(round - 1)
        strikes = dict(before.strikes) if before is not None else {}
        absent = dict[str, str]()
        for (slot, name), reason in sorted({**state.bad, **self._poison(state, used)}.items()):
            if name not in absent:
                strikes[name] = strikes.get(name, 0) + 1
            absent[name] = f"slot {slot}: {reason}"
        ahead = before.next if before is not None else deal(self.own.members, self.count)
        absent |= dict.fromkeys([name for name in ahead if name not in alive and name not in absent], "silent")
        after = [name for name in alive if strikes.get(name, 0) < self.own.strikes] or [self.name]
        slots = [
            {key: used[slot][0][key] for key in ("peer", "sha256", "weight")} if slot in used else None
            for slot in range(self.count)
        ]
        line = StepLine(round, slots, deal(after, self.count), absent, strikes, base, self._is_asked(round), self.name)
        return self._create(line)

    def _create(self, line: StepLine) -> StepLine | None:
        facts = {key: getattr(line, key) for key in ("slots", "next", "absent", "strikes", "base", "serve")}
        self.folder.create(f"rounds/{number(line.round)}.json", self.seal("line", line.round, **facts))
        return self.line(line.round)  # this peer's, or an earlier one's

    def _repeat_step(self, round: int, base: str, used: Mapping[int, Offered]) -> StepLine | None:
        assert self.given is not None
        line = self.given.line(round)
        if line is None:
            raise UserError(f"peers.replay = {self.own.replay} must have a line of step {round}")
        if line.base != base:
            raise UserError(f"the replay of step {round} differs: the weights before it are others")
        for slot, each in line.used.items():
            if slot not in used:
                return None
            if not _is(used[slot], each):
                raise UserError(f"the replay of step {round} differs: slot {slot} of {each['peer']} has other bits")
        return self._create(StepLine(round, line.slots, line.next, line.absent, line.strikes, base, False, self.name))

    def gradients(self, line: StepLine, form: Expected) -> tuple[dict[int, Offered], list[int]]:
        """The gradients of a line's slots, and the slots whose gradient is gone or cannot be read."""
        state, found, gone = self.state_of(line.round), dict[int, Offered](), []
        for slot, each in line.used.items():
            offers = state.good.setdefault(slot, {})
            offer = next((o for o in offers.values() if _is(o, each)), None)
            if offer is None:
                try:
                    offer = self.gradient(line.round, slot, each["peer"], form, base=line.base)
                except (Refused, Unreadable, OSError):
                    offer = None
            if offer is not None and _is(offer, each):
                offers[each["peer"]] = found[slot] = offer
            else:
                gone.append(slot)
        return found, gone

    def done(self, round: int) -> None:
        """A line was applied: forget its gradients, and delete this peer's old files."""
        for each in [each for each in self._open if each <= round]:
            del self._open[each]
        old, longest = round - self.own.state_every, round - ASKS * self.own.state_every
        if self.given is None and self._asks(round):  # a peer that takes a state applies all later lines
            old = min(old, max([longest, *(each - 1 for each in self._states())]))
        for each in self.with_files(old) if self._deleted is None else range(self._deleted, old + 1):
            place = f"contributions/{number(each)}"
            for name in self.folder.names(place):
                if name.partition(".")[2] == self.name:
                    self.folder.delete(f"{place}/{name}")
            self.folder.delete(f"announced/{number(each)}/{self.name}")
            self.folder.delete_empty(place)
            self.folder.delete_empty(f"announced/{number(each)}")
        self._deleted = max(self._deleted or 0, old + 1)
        self.folder.forget("contributions", old)
        if round % self.own.state_every == 0:
            self.folder.forget("states", min(self._states(), default=0) - 1)

    def behind(self, round: int) -> bool:
        """Whether gradients of the next line are gone, so that a state of another peer is needed."""
        line = self.line(round)
        if line is None or self.given is not None:
            return False
        there = {*self.folder.names(f"contributions/{number(round)}")}
        return not {f"{slot}.{each['peer']}" for slot, each in line.used.items()} <= there

    def ask(self) -> int:
        """Ask for a state. Returns the least number of steps that it must have."""
        first = self.newest()
        self.folder.write(f"wanted/{self.name}", self.seal("wanted", first))
        return first

    def no_longer_ask(self) -> None:
        self.folder.delete(f"wanted/{self.name}")

    def _is_asked(self, round: int) -> bool:
        """Whether a peer asks for a state, and no line since then has promised one."""
        for first in self._asks(round):
            lines = (self.line(each) for each in range(first, round))
            if first <= round and not any(line is not None and line.serve for line in lines):
                return True
        return False

    def _asks(self, round: int) -> list[int]:
        """Steps at which other peers have asked for a state. One that does not ask again is gone."""
        found = []
        for name in self.folder.names("wanted"):
            if name == self.name or name not in self.own.members:
                continue
            try:
                message = self.folder.read_up_to(f"wanted/{name}", HEAD_LIMIT) or b""
                first = unseal(self.signer, message, kind="wanted", run=self.own.run, peer=name)[0].get("round")
            except (Refused, Unreadable):
                continue
            if type(first) is int and first >= round - ASKS * self.own.state_every:
                found.append(max(first, 0))
        return found

    def send_state(self, round: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write the state after `round` steps in pieces, and its head last. Deletes earlier states."""
        content = memoryview(save(dict(tensors)))
        place, hashes = f"states/{number(round)}", list[str]()
        for at in range(0, len(content), PIECE):
            piece = bytes(content[at : at + PIECE])
            self.folder.write(f"{place}/{len(hashes):06d}.{self.name}", piece)
            hashes.append(digest(piece))
        head = self.seal("state", round, json.dumps(facts).encode(), pieces=hashes)
        self.folder.write(f"{place}/head.{self.name}", head)
        for old in (each for each in self._states() if each < round):
            for name in self.folder.names(f"states/{number(old)}"):
                self.folder.delete(f"states/{number(old)}/{name}")
            self.folder.delete_empty(f"states/{number(old)}")

    def sent(self, least: int) -> int:
        """Number of pieces of states of at least this number of steps that are there."""
        return sum(len(self.folder.names(f"states/{number(each)}")) for each in self._states() if each >= least)

    def take_state(self, least: int) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
        """The newest whole state of at least this number of steps, checked. None if there is none."""
        for round in (each for each in reversed(self._states()) if each >= least):
            for name in self.folder.names(f"states/{number(round)}"):
                if not name.startswith("head.") or name[5:] == self.name:
                    continue
                try:
                    return round, *self._state(round, name[5:])
                except Exception:  # of a transport, JSON or safetensors: it must not hide an older state
                    continue
        return None

    def _state(self, round: int, peer: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        place = f"states/{number(round)}"
        message = self.folder.read_up_to(f"{place}/head.{peer}", 64 * HEAD_LIMIT) or b""
        facts, content = self.unseal(message, "state", round, peer=peer)
        hashes, whole = facts.get("pieces"), bytearray()
        if not isinstance(hashes, list) or len(hashes) > PIECES:
            raise Refused("pieces that cannot be")
        for at, expected in enumerate(hashes):
            piece = self.folder.read_up_to(f"{place}/{at:06d}.{peer}", PIECE) or b""
            if digest(piece) != expected:
                raise Refused("damaged: a piece is missing, or its hash differs")
            whole += piece
        found = json.loads(content)
        if not isinstance(found, dict):
            raise Refused("facts that cannot be")
        return load(bytes(whole)), found


def _is(offer: Offered, slot: Mapping[str, Any]) -> bool:
    """Whether a gradient is the one that a line names. Its hash is that of the tensors, which the weight is no part
    of."""
    return bool(offer[0]["sha256"] == slot["sha256"] and offer[0]["weight"] == slot["weight"])


def _alike(one: Offered, other: Offered) -> bool:
    """Whether two peers have computed about the same. Other layouts round differently."""
    if one[0]["peer"] == other[0]["peer"]:
        return False
    gap = _norm({name: each.double() - other[1][name].double() for name, each in one[1].items()})
    return gap <= ALIKE * float(one[0]["norm"])


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(sum(each.double().square().sum() for each in tensors.values())) ** 0.5


def chained(base: str, line: StepLine) -> str:
    """The base of the step after a line: a hash of all that its weights follow from."""
    slots = json.dumps(line.slots, sort_keys=True)
    return hashlib.sha256(f"{base} {slots}".encode()).hexdigest()
