"""The ledger of rounds in the shared folder: who contributes, and who took part. Rank 0 of each peer uses it.

- `run.json`: values that all peers share.
- `lives/<peer>`: the process that has started last with this name.
- `announced/<round>/<peer>`: this peer trains for the round.
- `contributions/<round>/<peer>`: its tensors.
- `rounds/<round>.json`: the line of the ledger, with the contributions of the round in order.
- `states/<round>`: weights after a round, for peers that return.

A line is written once, by the first peer that sees the round complete, and before any peer applies it. All peers apply
what it names. So the result of a run is a function of its configuration and its lines."""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import save
from torch import Tensor

from megatron.config.problems import UserError
from megatron.config.registry import load

from .folder import SharedFolder, Unreadable, folder_of
from .line import Line, Waiting, jumps_can_be
from .messages import HEAD_LIMIT, Expected, Refused, check_tensors, checked, limit, seal, shown, tensors_of, unseal
from .options import PeersSection
from .part import OuterState
from .signing import Signer

Offered = tuple[dict[str, Any], dict[str, Tensor]]  # checked facts and tensors of a contribution or a gradient
ENDED = 99_999_999  # announced by peers that have applied the last line


class TooFew(RuntimeError):
    """Too few contributions for too long. str() is the reason of the stop."""


# (round, common weights, differences of each peer) -> the reason for each peer whose contribution is refused.
Scorer = Callable[[int, Mapping[str, Tensor], Mapping[str, Mapping[str, Tensor]]], Mapping[str, str]]


def number(round: int) -> str:
    return f"{round:08d}"


class Rounds:
    """Reads and writes the files of a run.

    Args:
        own: the section `peers`.
        given: the lines to repeat, in a replay.

    Attributes:
        noted: facts of a contribution that its line repeats.
        scorer: `peers.scorer`.
        life: distinguishes this process from another one with its name, once it has joined.
    """

    noted: ClassVar[tuple[str, ...]] = ("sha256", "jumps")
    line_type: ClassVar[type] = Line

    def __init__(self, own: PeersSection, signer: Signer, folder: SharedFolder, given: "Rounds | None" = None) -> None:
        assert own.name is not None
        self.own, self.name, self.signer, self.folder, self.given = own, own.name, signer, folder, given
        self.scorer: Scorer | None = None
        self.life = ""
        self.files: Any = None  # `direct.OwnFiles`, with `peers.listen`
        self._lines: dict[int, Any] = {}
        self._waiting: dict[int, Waiting] = {}
        self._sent: tuple[int, dict[str, Any], dict[str, Tensor]] | None = None  # round, facts and tensors

    @classmethod
    def of(cls, own: PeersSection, place: Path) -> Self:
        """
        Args:
            place: local folder of the files that this peer serves (`peers.listen`).
        """
        signer = Signer.of(own)
        given = cls(own, signer, folder_of(own, signer, own.replay)) if own.replay is not None else None
        files = load(f"{__package__}.direct:OwnFiles")(own, signer, place) if own.listen is not None else None
        assert own.folder is not None
        made = cls(own, signer, folder_of(own, signer, own.folder, files), given)
        made.files = files
        return made

    def twin(self) -> Self:
        """The same for another thread."""
        assert self.own.folder is not None
        return type(self)(self.own, self.signer, folder_of(self.own, self.signer, self.own.folder, self.files))

    def end(self, wait: float, asked: Callable[[], bool]) -> None:
        """End serving files, once all peers have ended, after `wait` seconds or when asked."""
        if self.files is None:
            return
        until = time.monotonic() + wait
        while time.monotonic() < until and not asked() and not retried(self._all_ended, lambda text: None):
            time.sleep(0.2)
        self.files.close()

    def _all_ended(self) -> bool:
        if not self._announced(ENDED, self.name):
            self.announce(ENDED)
        return all(self._announced(ENDED, name) for name in self.folder.names("lives") if name in self.own.members)

    def seal(self, kind: str, round: int, payload: bytes = b"", **facts: Any) -> bytes:
        bound = {"kind": kind, "run": self.own.run, "round": round, "peer": self.name}
        return seal(self.signer, {**facts, **bound}, payload)

    def unseal(self, message: bytes, kind: str, round: int, **bound: Any) -> tuple[dict[str, Any], bytes]:
        facts, payload = unseal(self.signer, message, kind=kind, run=self.own.run, round=round, **bound)
        if facts["peer"] not in self.own.members:
            raise Refused(f"of {shown(facts['peer'])}, which is no member")
        return facts, payload

    def join(self, identity: Mapping[str, Any]) -> None:
        """Compare this peer with the first one of the run.

        Raises:
            UserError: it trains something else, or the folder lets two peers create one file.
        """
        if not self.folder.creates_once(self.name):
            raise UserError(
                f"peers.folder = {self.own.folder} must refuse to create a file twice: peers would read different "
                "lines. Use a file system, or a store whose fsspec class has conditional writes (S3, GCS)"
            )
        if not self.folder.create("run.json", self.seal("run", 0, identity=identity)):
            self._compare(identity)
        # Only now: a process that is refused must not end the one that has this name.
        self.life = secrets.token_hex(8)
        life = self.seal("life", 0, life=self.life, address=self.own.listen)
        self.folder.write(f"lives/{self.name}", life)

    def _compare(self, identity: Mapping[str, Any]) -> None:
        """Compare the values of this peer with the run's."""
        try:
            facts, _ = self.unseal(self.folder.read_up_to("run.json", HEAD_LIMIT) or b"", "run", 0)
        except (Refused, Unreadable) as error:
            raise UserError(
                f"peers.folder = {self.own.folder}: its run.json must be of the run {self.own.run!r}, signed by a "
                f"member ({error}). Use another folder, or the run's keys"
            ) from error
        theirs = found if isinstance(found := facts.get("identity"), dict) else {}
        other = [name for name in sorted({*identity, *theirs}) if identity.get(name) != theirs.get(name)]
        if other:
            lines = "\n".join(f"  {name}: {identity.get(name)!r} here, {theirs.get(name)!r} there" for name in other)
            raise UserError(
                f"peers.folder = {self.own.folder} is of a run that {facts['peer']} began, and all peers must train "
                f"the same. It differs in\n{lines}\nUse the same values, or another folder"
            )

    def check_size(self, form: Expected) -> None:
        """
        Raises:
            UserError: the folder holds no message with these tensors.
        """
        if limit(form) > self.folder.largest:
            raise UserError(
                f"peers.folder = {self.own.folder} must take files of {limit(form):,} bytes, and sockets take at most "
                f"{self.folder.largest:,}. Use a shared folder or an object store"
            )

    def announce(self, round: int, **facts: Any) -> None:
        """This peer trains for a round: others wait for its contribution.

        Raises:
            UserError: another process has started with the name of this peer.
        """
        newest = self.facts(f"lives/{self.name}", "life", 0, peer=self.name) if self.life else None
        if newest is not None and newest.get("life") not in (None, self.life):
            raise UserError(
                f"peers.name = {self.name} must be the name of one process: another one has started with it since, and "
                "both would read one share of the data. Give each peer a name of its own"
            )
        self.folder.write(f"announced/{number(round)}/{self.name}", self.seal("announced", round, **facts))

    def facts(self, name: str, kind: str, round: int, **bound: Any) -> dict[str, Any] | None:
        """Facts of a small file. None if it is not there, or has no such message."""
        try:
            message = self.folder.read_up_to(name, HEAD_LIMIT)
            return None if message is None else self.unseal(message, kind, round, **bound)[0]
        except (Refused, Unreadable):
            return None

    def contribute(self, round: int, tensors: Mapping[str, Tensor], **facts: Any) -> bool:
        """Offer a contribution. Returns False if another one of this peer is there already."""
        message = self.seal("contribution", round, save(dict(tensors)), **facts)
        name = f"contributions/{number(round)}/{self.name}"
        if self.folder.create(name, message):
            self._sent = round, checked(self.signer, message[:HEAD_LIMIT].partition(b"\n")[0]), dict(tensors)
            return True
        try:
            before = self.folder.read_up_to(name, 2 * len(message) + HEAD_LIMIT)
            return unseal(self.signer, before or b"")[0]["sha256"] == unseal(self.signer, message)[0]["sha256"]
        except (Refused, Unreadable):
            return False

    def line(self, round: int) -> Line | None:
        """The line of a round, or None if it is not decided.

        Raises:
            UserError: the file is no line of this run. No peer can continue then.
        """
        if round < 0 or round in self._lines:
            return self._lines.get(round)
        name = f"rounds/{number(round)}.json"
        try:
            message = self.folder.read_up_to(name, HEAD_LIMIT)
            if message is None:
                return None
            facts, _ = self.unseal(message, "line", round)
            line = self.line_type(
                *(round if each.name == "round" else facts[each.name] for each in fields(self.line_type))
            )
            self._check(line)
        except (Refused, Unreadable, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.own.folder}/{name} must be a line of this run's ledger: {error}") from error
        self._lines[round] = line
        return line

    def _check(self, line: Line) -> None:
        """Whether a signed line has facts of the types that its readers use."""
        good = [
            each["peer"] for each in line.members if isinstance(each["sha256"], str) and jumps_can_be(each["jumps"])
        ]
        order = [each for each in self.own.members if each in good]
        if good != order or len(good) != len(line.members) or len(good) < self._least():
            raise Refused("members that cannot be")
        reasons = line.absent.values()
        if not {*line.absent, *line.strikes} <= {*self.own.members} or not isinstance(line.base, str):
            raise Refused("facts of no member")
        if not all(isinstance(each, str) and each.isprintable() and len(each) < 500 for each in reasons):
            raise Refused("reasons that cannot be")
        if not all(type(each) is int and each >= 0 for each in line.strikes.values()):
            raise Refused("strikes that cannot be")

    def decide(self, round: int, base: str, form: OuterState, now: float | None = None) -> Line | None:
        """The line of a round. Writes it if the round is complete.

        Args:
            base: hash of the common weights before the round.
            now: of the clock of `time.monotonic`.

        Raises:
            TooFew: the quorum was not reached for `peers.patience`.
            UserError: a replay differs from its ledger.
        """
        if (line := self.line(round)) is not None:
            return line
        self._waiting = {each: waiting for each, waiting in self._waiting.items() if each >= round}
        before, waiting = self.line(round - 1), self._waiting.setdefault(round, Waiting())
        strikes = dict(before.strikes) if before else {}
        allowed = [each for each in self.own.members if strikes.get(each, 0) < self.own.strikes]
        waited = (time.monotonic() if now is None else now) - waiting.since  # before a halt, in which others arrive
        self._read(round, allowed, base, form, waiting)
        if self.given is not None:
            return self._repeat(round, waiting)
        good, refused = self._within_norm(waiting)
        awaited = [each for each in allowed if self._awaits(round, each, before)]
        missing = [each for each in awaited if each not in good and each not in refused]
        ready = len(good) >= self._quorum() and (not missing or self._late(waited))
        if ready and self.scorer is not None:
            refused |= self._scored(round, good, form, waiting)
            good = {name: each for name, each in good.items() if name not in refused}
        if ready and len(good) >= self._quorum():
            for name in refused:
                strikes[name] = strikes.get(name, 0) + 1
            absent = {**refused, **dict.fromkeys(missing, "silent")}  # no strike: anything may keep a peer away
            return self._write(round, good, absent, strikes, base)
        if waited > self.own.patience:
            raise TooFew(f"{len(good)} of {self.own.quorum} contributions (peers.quorum) to round {round} in time")
        return None

    def _scored(self, round: int, good: Iterable[str], form: OuterState, waiting: Waiting) -> dict[str, str]:
        """Reasons of contributions that the scorer refuses. The line has them, so other peers do not score."""
        assert self.scorer is not None
        names = tuple(good)
        if names not in waiting.scored:
            copies = {name: {key: each.clone() for key, each in waiting.tensors[name].items()} for name in names}
            deltas = {name: form.deltas(each, round) for name, each in copies.items()}
            try:
                found = self.scorer(round, form.common(round), deltas)
                waiting.scored[names] = {name: shown(str(found[name])) for name in names if name in found}
            except Exception as error:  # of a user's package
                raise UserError(
                    f"peers.scorer = {self.own.scorer} fails with {type(error).__name__}: {error}"
                ) from error
        return waiting.scored[names]

    def _least(self) -> int:
        """Least number of members of a line."""
        return self.own.quorum

    def _quorum(self) -> int:
        """Least number of contributions to a round that this peer decides."""
        return self.own.quorum

    def _late(self, waited: float) -> bool:
        """Whether missing contributions are no longer waited for."""
        return waited > self.own.timeout

    def _awaits(self, round: int, name: str, before: Line | None) -> bool:
        return before is None or before.has(name) or bool(self._announced(round, name))

    def _announced(self, round: int, name: str) -> dict[str, Any]:
        """Facts of the message by which a member has announced a round, or none. Others cannot do that in its name."""
        announced = self._waiting.setdefault(round, Waiting()).announced
        if name not in announced:
            found = self.facts(f"announced/{number(round)}/{name}", "announced", round, peer=name)
            announced |= {} if found is None else {name: found}
        return announced.get(name, {})

    def _within_norm(self, waiting: Waiting) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        norms = sorted(each["norm"] for each in waiting.good.values())
        most = (norms[(len(norms) - 1) // 2] if norms else 0.0) * self.own.norm_limit or float("inf")
        high = {name: each["norm"] for name, each in waiting.good.items() if each["norm"] > most}
        refused = {**waiting.bad, **{name: f"norm {norm:.3g} above {most:.3g}" for name, norm in high.items()}}
        return {name: each for name, each in waiting.good.items() if name not in high}, refused

    def _write(
        self, round: int, good: Mapping[str, Any], absent: Mapping[str, str], strikes: Mapping[str, int], base: str
    ) -> Line | None:
        members = [
            {"peer": name, **{key: good[name][key] for key in self.noted}} for name in self.own.members if name in good
        ]
        message = self.seal("line", round, members=members, absent=dict(absent), strikes=dict(strikes), base=base)
        self.folder.create(f"rounds/{number(round)}.json", message)
        return self.line(round)  # this peer's, or an earlier one's

    def _repeat(self, round: int, waiting: Waiting) -> Line | None:
        assert self.given is not None
        line = self.given.line(round)
        if line is None:
            raise UserError(f"peers.replay = {self.own.replay} must have a line of round {round}")
        for each in line.members:
            mine = waiting.good.get(each["peer"])
            if mine is None and each["peer"] not in waiting.bad:
                return None
            if mine is None or mine["sha256"] != each["sha256"]:
                reason = waiting.bad.get(each["peer"], "other bits")
                raise UserError(f"the replay of round {round} differs: the contribution of {each['peer']} has {reason}")
        return self._write(round, {each["peer"]: each for each in line.members}, line.absent, line.strikes, line.base)

    def _read(self, round: int, allowed: Sequence[str], base: str, form: OuterState, waiting: Waiting) -> None:
        here = self.folder.names(f"contributions/{number(round)}")
        for name in allowed:
            if name in here and name not in waiting.good and name not in waiting.bad:
                try:
                    facts, waiting.tensors[name] = self.contribution(round, name, form, base=base)
                    waiting.good[name] = facts
                except (Refused, Unreadable) as error:
                    waiting.bad[name] = str(error)
                except OSError:  # as if it were not there yet: one file must not keep the others from deciding
                    continue

    def contribution(
        self, round: int, name: str, form: OuterState, **bound: Any
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Checked facts and tensors of a contribution. One that this process has sent is not read from the folder.

        Raises:
            Refused, Unreadable: it cannot be used.
            FileNotFoundError: it is not there.
        """
        expected, sent = form.expected(round), self._sent
        if sent is not None and sent[0] == round and {**sent[1], **bound, "peer": name} == sent[1]:
            facts, tensors = sent[1].copy(), sent[2]
            check_tensors(tensors, expected)  # as the others do
        else:
            message = self.folder.read_up_to(f"contributions/{number(round)}/{name}", limit(expected))
            if message is None:
                raise FileNotFoundError(f"round {round} has no contribution of {name}")
            facts, payload = self.unseal(message, "contribution", round, peer=name, **bound)
            tensors = tensors_of(payload, expected)
        if not form.fits(tensors, round):
            raise Refused("indices that cannot be")
        floats = [each.double().norm() for each in tensors.values() if each.is_floating_point()]
        facts["norm"] = float(torch.stack(floats).norm())
        if not jumps_can_be(facts.get("jumps")):
            raise Refused("jumps that cannot be")
        return facts, tensors

    def named(self, line: Line, form: OuterState) -> list[Mapping[str, Tensor]]:
        """Tensors of the contributions that a line names, in its order. They are no longer kept here.

        Raises:
            Refused, Unreadable, FileNotFoundError: one cannot be read.
        """
        waiting = self._waiting.get(line.round, Waiting())
        found: list[Mapping[str, Tensor]] = []
        for each in line.members:
            facts, tensors = waiting.good.get(each["peer"], {}), waiting.tensors.get(each["peer"])
            if tensors is None or facts["sha256"] != each["sha256"]:
                facts, tensors = self.contribution(line.round, each["peer"], form)
            if facts["sha256"] != each["sha256"]:
                raise Refused(f"another contribution of {each['peer']} than the line names")
            found.append(tensors)
        waiting.tensors.clear()
        self._sent = None
        return found

    def decided_up_to(self, first: int) -> int:
        """The first round from `first` on that is not decided."""
        while self.line(first) is not None:
            first += 1
        return first

    def jumps(self) -> dict[int, int]:
        """In a replay, the rounds that this peer skipped: (steps that it had completed) -> next round."""
        mine = self.given.mine(0) if self.given is not None else []
        return {step: to for _, each in mine for step, to in each["jumps"]}

    def mine(self, first: int) -> list[tuple[int, dict[str, Any]]]:
        """Rounds from `first` on to which this peer has contributed, each with the line's entry of it."""
        lines: Iterable[Line | None] = map(self.line, range(first, self.decided_up_to(first)))
        return [(line.round, each) for line in lines if line for each in line.members if each["peer"] == self.name]

    def publish(self, round: int, tensors: Mapping[str, Tensor]) -> None:
        """Offer the state after a round."""
        self.folder.create(f"states/{number(round)}", self.seal("state", round, save(dict(tensors))))

    def clean(self, done: int) -> None:
        """Delete all but the last two states up to round `done`, and this peer's contributions from well before
        them."""
        states = [each for each in self._states() if each <= done]
        for old in states[:-2]:
            self.folder.delete(f"states/{number(old)}")
        last = (states[-2] if len(states) > 1 else -1) - self.own.state_every
        for round in self.with_files(last):
            for kind in ("contributions", "announced"):
                self.folder.delete(f"{kind}/{number(round)}/{self.name}")
                self.folder.delete_empty(f"{kind}/{number(round)}")
        self.folder.forget("contributions", last)
        self.folder.forget("states", min(self._states(), default=0) - 1)

    def with_files(self, last: int) -> list[int]:
        """Rounds up to `last` that still have files, also of an earlier start of this peer."""
        names = {*self.folder.names("contributions"), *self.folder.names("announced")}
        return sorted(int(each) for each in names if each.isdecimal() and int(each) <= last)

    def has_all(self, line: Line) -> bool:
        """Whether the contributions of a line are there."""
        return set(line.names) <= {*self.folder.names(f"contributions/{number(line.round)}")}

    def passed(self, line: Line) -> bool:
        """Whether contributions of a line were deleted, since the others are well beyond it."""
        return not self.has_all(line) and any(each >= line.round for each in self._states())

    def _states(self) -> list[int]:
        return sorted(int(each) for each in self.folder.names("states") if each.isdecimal())

    def newest_state(self, before: int, expected: Expected) -> tuple[int, dict[str, Tensor]] | None:
        """The newest state of a round below `before` that can be used."""
        for round in (each for each in reversed(self._states()) if each < before):
            try:
                message = self.folder.read_up_to(f"states/{number(round)}", limit(expected))
                return round, tensors_of(self.unseal(message or b"", "state", round)[1], expected)
            except (Refused, Unreadable, OSError):  # an older one may be there
                continue
        return None


def retried(work: Callable[[], Any], problem: Callable[[str], None]) -> Any:
    """Result of `work`, or None after an error of the transport, which is reported. It is tried again later."""
    try:
        return work()
    except (UserError, TooFew):
        raise
    except Exception as error:  # fsspec passes on the errors of any library. None of them may stop a peer
        problem(f"{type(error).__name__}: {error}")
        return None
