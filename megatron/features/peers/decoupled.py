"""Decoupled DiLoCo (arXiv 2604.21428): each peer trains at its own pace, and no transfer stops a step.

A peer sends a fragment and trains on. A thread of rank 0 uploads it, waits for the line of the round, and reads the
contributions of the line. The peer applies them after the step that it is at by then. A round needs `peers.quorum`
contributions. It is open for others until all awaited ones are there, or a contributor has trained for `peers.delay`
further steps. There is no process for the merge: the first contributor that sees the round complete writes its line,
and each peer computes the merge of the line.

A contribution has the completed steps of its peer, and those since the peer has received the fragment. Both are in the
line, and give the weights. It also has the steps after which its peer has applied earlier rounds (`jumps`). So a ledger
is enough to repeat a run, although each peer had a clock of its own. A peer that starts again from a checkpoint repeats
its part of the ledger in the same way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron.config.problems import UserError
from megatron.training.exchange import StepReport
from megatron.training.trainer import Trainer

from .folder import Unreadable
from .hook import PAUSE, PeersHook
from .line import JUMPS, Line
from .messages import Refused
from .part import OuterState
from .rounds import Rounds, TooFew, retried

LINE, AHEAD, CLOSED, END = "line", "ahead", "closed", "end"
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


class DecoupledHook(PeersHook):
    """A peer that trains on while it exchanges."""

    ledger = DecoupledRounds
    rounds: DecoupledRounds | None  # type: ignore[assignment]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._watch: Watch | None = None  # on rank 0
        self._plan: list[list[int]] = []  # (completed steps, next round) of rounds that the ledger has this peer apply
        self._sends: dict[int, int] = {}  # completed steps -> round of contributions that the ledger has
        self._horizon = self._end = self._known = 0  # steps until which the ledger is repeated, its rounds and lines
        self._closed = False  # whether this peer contributes nothing after the horizon
        self._flight = False  # whether the round of its last contribution is not applied
        self._later: list[Callable[[], None]] = []  # work for the next watch

    def on_start(self, trainer: Trainer) -> None:
        part = self.part
        self._begin(trainer)
        facts = self._wait(trainer, lambda: self._retried(trainer, lambda: self._ledger_of(trainer)))
        if facts is None:  # a request to stop
            return
        self._plan, self._horizon, self._end, self._closed, self._flight, newest = facts[1:]
        self._sends = {completed: round for completed, round in facts[0]}
        before = part.round
        if newest > part.round:
            self._catch_up(trainer, newest)
        else:
            self._start_watch(trainer)
        self._at_border(trainer)
        trainer.moved = trainer.completed >= trainer.steps and part.round > before

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        if trainer.back is None:
            self._at_border(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if self._watch is not None:
            self._watch.end(self.own.timeout)
        super().on_end(trainer)

    def _open(self, trainer: Trainer, identity: Mapping[str, Any]) -> list[list[int]]:
        super()._open(trainer, identity)
        assert self.rounds is not None
        ledgers: list[Any] = [self.rounds, self.rounds.given or self.rounds]
        for each in ledgers:
            each.total = self.config.training.steps
            each.last = each.total // self.part.interval
        return []

    def _ledger_of(self, trainer: Trainer) -> list[Any]:
        """On rank 0: what the ledger says about this peer from the completed steps on."""
        rounds, part, completed = self.rounds, self.part, trainer.completed
        assert rounds is not None
        given: Any = rounds.given or rounds
        # The others may have ended since an earlier start of this peer had no steps left.
        closed, end = rounds.given is not None or rounds.finished(rounds.name), given.end_of(rounds.name)
        lines = min(given.decided_up_to(part.round), end)
        mine = given.mine(part.round)
        if rounds.given is None:
            try:
                mine.append((lines, rounds.contribution(lines, rounds.name, part)[0]))
            except (Refused, Unreadable, FileNotFoundError):  # there is none
                pass
            except OSError:  # with a second one of other bits, the ledger could not be repeated
                if self._waited < self.own.timeout:
                    raise
        flight = any(round == part.round and each["completed"] == part.sent for round, each in mine)
        sends = [[each["completed"], round] for round, each in mine if each["completed"] > completed]
        plan = [list(jump) for _, each in mine for jump in each["jumps"] if jump[1] > part.round]
        known = all(jump[0] >= completed for jump in plan) and all(
            each["completed"] > completed or each["completed"] == part.sent for _, each in mine
        )
        if rounds.given is None and sends:
            # Another life of this peer may have gone another way, or the others may have deleted their contributions.
            whole = (line is None or rounds.has_all(line) for line in map(rounds.line, range(part.round, lines)))
            if not known or not all(whole):
                sends, plan = [], []
        horizon = max((each for each, _ in sends), default=completed if closed else -1)
        newest, end = (lines, end) if rounds.given is None else (part.round, lines)
        self._known = max((round + 1 for round, _ in mine), default=lines)
        return [sends, plan if sends else [], horizon, end, closed, flight, part.round if sends or flight else newest]

    def _start_watch(self, trainer: Trainer) -> None:
        rounds, part, self._watch = self.rounds, self.part, None
        if rounds is None or part.round >= rounds.last:
            return
        rounds.grace.clear()
        self._watch = Watch(rounds, part.round, part.base(part.round), part, self._read, self._later, self._flight)
        self._watch.start()

    def _at_border(self, trainer: Trainer) -> None:
        """Between two steps: apply what has arrived, then send."""
        part, completed = self.part, trainer.completed
        while self._plan and self._plan[0][0] <= completed and trainer.stop_reason is None:
            self._repeat(trainer, self._plan.pop(0)[1])
        if completed > self._horizon:
            self._take(trainer)
        if trainer.stop_reason is not None:
            return
        ended = completed >= (self._horizon if self._closed else trainer.steps) or part.round >= self._end
        if ended or self._may_send(trainer):
            trainer.settle()  # its numbers may demand to go back: before they are shared
        if trainer.back is not None:
            return
        if self._may_send(trainer):
            self._send(trainer)
        if self.rounds is not None and self._flight and completed - part.sent >= self.own.delay:
            self.rounds.grace.set()
        if ended:
            self._finish(trainer)

    def _may_send(self, trainer: Trainer) -> bool:
        part, completed = self.part, trainer.completed
        if completed <= self._horizon:
            return self._sends.get(completed) == part.round
        is_time = completed - part.sent >= part.interval or completed >= trainer.steps
        new = completed > max(part.received[part.round % self.own.fragments], part.sent)
        return is_time and new and not self._flight and not self._closed and part.round < self._end

    def _send(self, trainer: Trainer) -> None:
        part, round, completed = self.part, self.part.round, trainer.completed
        local = part.gathered(part.names(round))
        steps = completed - part.received[round % self.own.fragments]
        part.sent, self._flight = completed, True
        rounds, watch = self.rounds, self._watch
        if rounds is None or watch is None:
            return
        if not all(bool(each.isfinite().all()) for each in local.values()):
            trainer.log(f"warning: round {round}: no contribution, since weights are not finite")
            return
        if len(part.jumps) > JUMPS:  # refused by the others, as a strike
            trainer.log(
                f"warning: round {round}: no contribution, since {rounds.name} was in none of the last {JUMPS} rounds "
                "that it applied. It is too slow for peers.delay, for which rounds wait"
            )
            return
        tensors = part.contribution(round, local)
        facts = {"base": part.base(round), "jumps": [*part.jumps], "completed": completed, "steps": steps}

        def send() -> None:
            if not rounds.contribute(round, tensors, **facts):
                watch.problem = f"round {round} has another contribution of {rounds.name}, which counts"

        rounds.grace.clear()
        watch.offer(send)

    def _state(self) -> str | None:
        """On rank 0: whether a line can be applied, and whether the others are further. Raises the watch's error."""
        watch = self._watch
        if watch is None:
            return None
        if watch.error is not None:
            raise watch.error
        return AHEAD if watch.ahead else LINE if watch.found is not None else None

    def _take(self, trainer: Trainer) -> None:
        """Apply what is here. Does not wait."""
        answer: list[Any] = [None, None, None]
        if self._watch is not None:
            if self._watch.problem:
                self._tell(trainer, self._watch.problem)
            self._waited = 0.0
            answer = self._looked(trainer, self._state)
        found, failure, stop = self.world.communicator.broadcast(answer)
        if failure is not None:
            raise UserError(failure)
        if stop is not None:
            trainer.stop(stop)
        self._apply(trainer, found)

    def _apply(self, trainer: Trainer, found: str | None) -> None:
        if found == LINE:
            self._apply_found(trainer)
        elif found == AHEAD:
            self._catch_up(trainer, None)

    def _repeat(self, trainer: Trainer, to: int) -> None:
        """Apply rounds below `to`, as the ledger says."""
        if self._may_send(trainer):  # the peer has contributed, started again at this step, and then applied them
            self._send(trainer)
        if to == self.part.round + 1:
            here = lambda: LINE if self._state() and self._watch and self._watch.found else None  # noqa: E731
            self._apply(trainer, self._wait(trainer, here))
        else:
            self._catch_up(trainer, to)

    def _apply_found(self, trainer: Trainer) -> None:
        part, round = self.part, self.part.round

        def use() -> None:
            assert self._watch is not None and self._watch.found is not None
            line, contributions = self._watch.found
            self._use(trainer, line, contributions)
            self._publish(line)

        self._from_rank_0(use)
        part.round = round + 1
        self._adopt(trainer, round)

    def _publish(self, line: Line) -> None:
        """On rank 0: have the next watch publish the common weights from time to time, and delete old files."""
        rounds, part, done = self.rounds, self.part, line.round
        assert rounds is not None
        if (done + 1) % self.own.state_every:
            return
        if line.peer == rounds.name:
            weights = {name: each.clone() for name, each in part.to_publish().items()}
            self._later.append(lambda: rounds.publish(done, weights))
        self._later.append(lambda: rounds.clean(done))

    def _weights(self, trainer: Trainer, line: Line) -> list[float]:
        """Tokens times tokens per step, as published."""
        steps = [(each["completed"], each["steps"]) for each in line.members]
        tokens = [float(trainer.tokens(end) - trainer.tokens(end - count)) for end, count in steps]
        return [each * each / count for each, (_, count) in zip(tokens, steps, strict=True)]

    def _catch_up(self, trainer: Trainer, to: int | None) -> None:
        """Apply the rounds below `to`, by default all that are decided."""
        rounds, part, before = self.rounds, self.part, self.part.round
        if self._watch is not None:
            self._watch.end()

        def decided() -> Any:
            assert rounds is not None
            return self._retried(trainer, lambda: rounds.decided_up_to(before))

        end = self._wait(trainer, decided) if to is None else to
        if end is not None:
            self._wait(trainer, lambda: self._caught_up(trainer, min(end, self._end)) or None)
        part.round = self.world.communicator.broadcast(part.round)  # a stop may end it earlier
        self._adopt(trainer, before)
        if part.round > before + 1:
            trainer.record("peers_jump", step=trainer.completed, round=part.round)
            trainer.log(f"applied {part.round - before} rounds at once, and is at round {part.round}")

    def _adopt(self, trainer: Trainer, before: int) -> None:
        """Train from the common weights of the fragments that rounds since `before` have changed."""
        rounds, part = self.rounds, self.part

        def took_part() -> bool:
            assert rounds is not None
            lines = [each for each in map(rounds.line, range(before, part.round)) if each and each.has(rounds.name)]
            mine = [(each.round, each.members[each.names.index(rounds.name)]["completed"]) for each in lines]
            late = [each for each in mine if each[0] >= self._known and each != (before, part.sent)]
            if late:
                raise UserError(
                    f"round {late[0][0]} has a contribution of {rounds.name} after {late[0][1]} steps that this "
                    "process has not made. It arrived late from an earlier start. Start this peer again: it repeats it"
                )
            return bool(mine)

        if part.round > before:
            if self._from_rank_0(took_part):
                part.jumps = []
            fragments = {round % self.own.fragments for round in range(before, part.round)}
            for each in sorted(fragments):
                part.set_masters(part.fragments[each], self.own.alpha if part.round == before + 1 else 0.0)
                part.received[each] = trainer.completed
            part.jumps = [*part.jumps, [trainer.completed, part.round]]
            self._flight = False
        self._start_watch(trainer)

    def _finish(self, trainer: Trainer) -> None:
        """No steps are left, or no rounds: wait for the rounds of the others, and end with the common weights."""
        part = self.part

        def look() -> str | None:
            watch, found = self._watch, self._state()
            if found or watch is None or self.own.replay is not None or (watch.takes_part and not watch.refused):
                return found
            watch.finish()
            return END if watch.over else None if self._closed else CLOSED

        while part.round < self._end:
            found = self._wait(trainer, look)
            if found is None:
                trainer.open = trainer.completed >= trainer.steps
                return
            self._closed |= found == CLOSED
            if found == END:
                if self._watch is not None and self._watch.quiet:
                    trainer.log(
                        f"warning: no round for {self.own.timeout:g} s (peers.timeout): the run ends with the common "
                        f"weights of round {part.round} of {self._end}"
                    )
                break
            self._apply(trainer, found)
            if self._may_send(trainer):
                self._send(trainer)
        part.set_masters(list(part.shapes))
        if trainer.completed < trainer.steps:
            trainer.record("peers_jump", step=trainer.completed, round=part.round)
            trainer.log(f"the run ends at round {part.round}, after {trainer.completed} steps of this peer")
            trainer.completed = trainer.steps
            part.engine.start_at(trainer.steps)
            trainer.request("save")
