"""Rounds of peers that do not wait for each other, and the thread that watches one. See `decoupled`."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron.config.problems import UserError

from .hook import PAUSE
from .line import Line
from .messages import Refused
from .part import OuterState
from .rounds import Rounds, TooFew, retried

COUNTS = ("completed", "steps")


class DecoupledRounds(Rounds):
    """The ledger of peers that do not wait for each other.

    Attributes:
        last: number of rounds of the run. A peer that announces this round has no steps left.
        total: steps of the run.
        grace: set once a round with enough contributions is not open for others any more.
    """

    noted = (*Rounds.noted, *COUNTS)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.last, self.total, self.grace = 0, 1 << 53, threading.Event()

    def finished(self, name: str) -> bool:
        return bool(self._announced(self.last, name))

    def end_of(self, name: str) -> int:
        """The round before which a peer ends: fewer than all have lines if it no longer waits for the others."""
        end = self._announced(self.last, name).get("end")
        return end if type(end) is int and 0 <= end < self.last else self.last

    def excluded(self, round: int) -> bool:
        before = self.line(round - 1)
        return before is not None and before.strikes.get(self.name, 0) >= self.own.strikes

    def refused(self, round: int) -> bool:
        return round in self._waiting and self.name in self._waiting[round].bad

    def over(self) -> bool:
        return all(map(self.finished, self.own.members))

    def _least(self) -> int:
        return 1  # others may have no steps left

    def _quorum(self) -> int:
        left = sum(not self.finished(name) for name in self.own.members)
        return max(1, min(self.own.quorum, left))

    def _late(self, waited: float) -> bool:
        return self.grace.is_set() or super()._late(waited)

    def _awaits(self, round: int, name: str, before: Line | None) -> bool:
        return not self.finished(name) and super()._awaits(round, name, before)

    def _check(self, line: Line) -> None:
        super()._check(line)
        if not all(map(self._can_be, line.members)):
            raise Refused("steps that cannot be")

    def contribution(
        self, round: int, name: str, form: OuterState, **bound: Any
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        found = super().contribution(round, name, form, **bound)
        if not self._can_be(found[0]):
            raise Refused("steps that cannot be")
        return found

    def _can_be(self, facts: Mapping[str, Any]) -> bool:
        completed, steps = (facts.get(key) for key in COUNTS)
        return type(completed) is int and type(steps) is int and 1 <= steps <= completed <= self.total


class Watch(threading.Thread):
    """The exchange of one round, during the steps. No other thread uses the ledger while it runs.

    Args:
        base: hash of the common weights before the round.
        read: reads the contributions of a line. None while one cannot be read.
        work: what is to be done before.
        is_there: whether the contribution of this peer is in the folder already.

    Attributes:
        found: the line and its contributions, once they are here.
        takes_part: whether this peer has a contribution to the round.
        refused: whether it is refused.
        over: this peer ends before the round, which has no line. No peer has steps left, or
        quiet: peers.timeout has passed.
        ahead: whether the others are further, or the contributions of the line were deleted.
        error: why the peer cannot continue.
        problem: the last error of the transport.
    """

    def __init__(
        self,
        rounds: DecoupledRounds,
        round: int,
        base: str,
        form: OuterState,
        read: Callable[[Line], Sequence[Mapping[str, Tensor]] | None],
        work: list[Callable[[], None]],
        is_there: bool,
    ) -> None:
        super().__init__(name="peers", daemon=True)
        self._rounds, self._round, self._base, self._form, self._read = rounds, round, base, form, read
        self._offer: Callable[[], None] | None = None
        self.takes_part, self._woken, self._work = is_there, threading.Event(), work
        self._announced = self._ended = False
        self._until: float | None = None  # end of the wait for others
        self.refused = self.over = self.quiet = self.ahead = False
        self.found: tuple[Line, Sequence[Mapping[str, Tensor]]] | None = None
        self.error: Exception | None = None
        self.problem = ""

    def offer(self, send: Callable[[], None]) -> None:
        self._offer, self.takes_part = send, True
        self._woken.set()

    def finish(self) -> None:
        """This peer has no steps left, and no good contribution to the round."""
        if self._until is None:
            self._until = time.monotonic() + self._rounds.own.timeout
            self._woken.set()

    def end(self, wait: float | None = None) -> None:
        self._ended = True
        self._woken.set()
        self.join(wait)

    def run(self) -> None:
        pause = PAUSE / 64
        try:
            while self.found is None and not self.over and not self._ended:
                retried(self._look, lambda text: setattr(self, "problem", text))
                if self.found is None and self._woken.wait(pause):
                    self._woken.clear()
                    pause = PAUSE / 64
                pause = min(1.5 * pause, PAUSE)
        except (UserError, TooFew) as error:
            self.error = error

    def _look(self) -> None:
        rounds = self._rounds
        if not self._announced:
            while self._work:
                self._work.pop(0)()
            rounds.announce(self._round)
            self._announced = True
        if self._offer is not None:
            self.takes_part = not rounds.excluded(self._round)  # else no line would have the contribution
            if self.takes_part:
                self._offer()
            self._offer = None
        over = quiet = False
        if self._until is not None:
            self.takes_part = False
            quiet = time.monotonic() > self._until  # before the line is read: this process may be halted at any point
            if not rounds.finished(rounds.name):
                rounds.announce(rounds.last)
            over = rounds.over()
        decides = self.takes_part or rounds.given is not None
        line = rounds.decide(self._round, self._base, self._form) if decides else rounds.line(self._round)
        self.refused = decides and line is None and rounds.refused(self._round)
        if self.quiet or (line is None and (over or quiet)):  # the last peer announces its end after the last line
            self.quiet |= not over
            if self.quiet:  # others may continue: the next starts of this peer, and replays, end here too
                rounds.announce(rounds.last, end=self._round)  # this may arrive although it fails: no line counts then
            self.over = True
        elif line is not None:
            contributions = self._read(line)
            self.ahead = rounds.passed(line) if contributions is None else rounds.line(self._round + 1) is not None
            if contributions is not None:
                self.found = line, contributions
