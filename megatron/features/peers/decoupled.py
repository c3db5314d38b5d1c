"""Decoupled DiLoCo (arXiv 2604.21428): each peer trains at its own pace, and no transfer stops a step.

A peer sends a fragment and trains on. A thread of rank 0 uploads it, waits for the line of the round, and reads the
contributions of the line. The peer applies them after the step that it is at by then. A round needs `peers.quorum`
contributions. It is open for others until all awaited ones are there, or a contributor has trained for `peers.delay`
further steps. There is no process for the merge: the first contributor that sees the round complete writes its line,
and each peer computes the merge of the line.

A contribution has the completed steps of its peer, and those since the peer has received the fragment. Both are in the
line, and give the weights. It also has the steps after which its peer has applied earlier rounds (`jumps`). So a ledger
is enough to repeat a run, although each peer had a clock of its own. A peer that starts again from a checkpoint repeats
its part of the ledger in the same way."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron.config.problems import UserError
from megatron.training.exchange import StepReport
from megatron.training.trainer import Trainer

from .decoupled_rounds import DecoupledRounds, Watch
from .folder import Unreadable
from .hook import PeersHook
from .line import JUMPS, Line
from .messages import Refused

LINE, AHEAD, CLOSED, END = "line", "ahead", "closed", "end"


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
