"""Peers meet between steps: contribute, wait for the line of the round, apply it, skip rounds that ended earlier."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import megatron
from megatron.checkpoint.format.communicator import from_rank_0
from megatron.config import Config
from megatron.config.parts import resolve_import
from megatron.config.problems import UserError
from megatron.config.registry import SCORER, load
from megatron.config.tree import thaw
from megatron.data.hashing import sample_hash
from megatron.engine.part import part_of
from megatron.training.exchange import STOPS, StepReport
from megatron.training.hook import Hook, HookContext
from megatron.training.trainer import Trainer
from megatron.training.world import World
from megatron.worker.beacon import HOOKS

from .folder import Unreadable
from .line import Line
from .messages import Expected, Refused
from .options import DECOUPLED, FEATURE, TCP, peers_of
from .part import OuterState
from .rounds import Rounds, TooFew, retried

PAUSE = 0.2  # seconds between two checks of the folder
SAMPLES = 16  # samples of the stream that peers compare
PEERS = "peers"
PASSED = "passed"  # the others are well beyond the round, and have deleted its contributions
# Keys in which peers may differ, although they belong to sections that must be equal.
_OWN = {
    "training": ("micro_batch_size", "stop_at_step", "stop_after", "accumulation", "activation_checkpointing"),
    "model": ("kernels", "fused_attention"),
    "data": ("cache", "workers", "prefetch", "train", "validation", "test", "phases"),
    "peers": (
        "name", "folder", "listen", "key_file", "public_keys", "timeout", "patience", "replay", "run", "signature",
    ),
}  # fmt: skip
# Sections of a machine, a layout or an output. All other sections, also of features, must be equal.
_MAY_DIFFER = {
    "run", "parallel", "zero", "checkpoint", "evaluation", "logging", "launch", "watch", "hooks", "deepspeed",
}  # fmt: skip


def identity_of(config: Config, samples: str) -> dict[str, Any]:
    """The values that all peers must have, by key. Reads no secret.

    Args:
        samples: hash of samples of the stream.
    """
    values = thaw(config.model_dump(mode="json"))
    found: dict[str, Any] = {}
    for section, value in values.items():
        if section not in _MAY_DIFFER:
            found |= {f"{section}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {section: value}
    for section, keys in _OWN.items():
        for key in keys:
            found.pop(f"{section}.{key}", None)
    found["peers.listen"] = peers_of(config).listen is not None
    return {**found, "samples": samples, "version": megatron.__version__}


def samples_of(plan: Any) -> str:
    """Hash of samples that are evenly spaced in the stream of all peers."""
    grows = any(source.opened.grows for source in getattr(plan, "sources", ()))
    count = 1 if grows else plan.batches.before(plan.steps)  # the end of a growing file is not there yet
    numbers = sorted({count * each // SAMPLES for each in range(SAMPLES)})
    found = hashlib.sha256()
    for number in numbers:
        found.update(f"{sample_hash(number, plan.sample(number).tokens):016x}".encode())
    return found.hexdigest()[:16]


class PeersHook(Hook):
    """The rounds of a peer. Rank 0 reads and writes the folder, and all ranks wait for it."""

    ledger = Rounds

    def __init__(self, config: Config, part: OuterState, world: World) -> None:
        self.config, self.own, self.part, self.world = config, peers_of(config), part, world
        self.rounds: Rounds | None = None  # on rank 0
        self.jumps: dict[int, int] = {}
        self._problem, self._waited = "", 0.0

    @classmethod
    def of(cls, parts: HookContext) -> "PeersHook | None":
        if not FEATURE.wanted(parts.config) or parts.world is None:
            return None
        decoupled = peers_of(parts.config).algorithm == DECOUPLED
        made: type[PeersHook] = load(f"{__package__}.decoupled:DecoupledHook") if decoupled else cls
        return made(parts.config, part_of(parts.engine, PEERS), parts.world)

    def on_start(self, trainer: Trainer) -> None:
        part = self.part
        self._begin(trainer)
        before = part.round
        if trainer.completed >= (part.round + 1) * part.interval:  # it stopped while it waited for this round
            if self.own.delay == 0:
                self._send(trainer)
            self._meet(trainer)
        else:
            self._jump(trainer)
        trainer.moved = trainer.completed >= trainer.steps and part.round > before
        self._announce(trainer)

    def _begin(self, trainer: Trainer) -> None:
        """Meet the run, and take the common weights from the engine's in a new one."""
        part = self.part
        identity = identity_of(self.config, samples_of(trainer.loader.plan)) if self.world.is_main else {}
        self.jumps = {step: to for step, to in self._from_rank_0(lambda: self._open(trainer, identity))}
        if part.fresh:
            weights = part.gathered(list(part.shapes))
            for name, values in weights.items():
                part.states["outer_weights"][name].copy_(values)
            part.fresh = False
        trainer.log(
            f"peer {self.own.name} of {', '.join(self.own.members)}: {part.bytes_of_round(part.round):,} bytes in a "
            f"round of {part.interval} steps, at round {part.round}"
        )

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        interval, completed = self.part.interval, trainer.completed
        if (completed + self.own.delay) % interval == 0 or completed % interval == 0:
            trainer.settle()  # its numbers may demand to go back, or end the run: before they are shared
        if trainer.back is not None:
            return
        if (completed + self.own.delay) % interval == 0:
            self._send(trainer)
        if completed % interval == 0:
            self._meet(trainer)
            if trainer.stop_reason is None:
                self._announce(trainer)
        elif completed in self.jumps:
            self._jump(trainer)

    def on_end(self, trainer: Trainer) -> None:
        def asked() -> bool:
            trainer.ask(trainer.completed)
            return any(name in trainer.requests for name in STOPS)

        if self.rounds is not None:
            whole = trainer.finished and trainer.error is None and trainer.back is None
            self.rounds.end(self.own.timeout if whole else 0.0, asked)

    def _open(self, trainer: Trainer, identity: Mapping[str, Any]) -> list[list[int]]:
        """Join the run. A server may come later than its peers, or be cut off from a peer that returns."""
        end = time.monotonic() + (min(self.own.patience, 60.0) if (self.own.folder or "").startswith(TCP) else 0.0)
        while True:
            try:
                if self.rounds is None:
                    self.rounds = self.ledger.of(self.own, Path(self.config.run.dir) / "peers")
                if self.own.scorer is not None:
                    self.rounds.scorer = resolve_import(self.config, "peers.scorer", SCORER, self.own.scorer)
                self.rounds.check_size(self._largest())
                self.rounds.join(identity)
                return [[step, to] for step, to in self.rounds.jumps().items()]
            except UserError:
                raise
            except Exception as error:  # fsspec passes on the errors of any library. Other ranks wait for an answer
                text = f"{type(error).__name__}: {error}"
                if not isinstance(error, OSError) or time.monotonic() > end:
                    raise UserError(
                        f"peers.folder = {self.own.folder} must be a folder that can be read and written: {text}. "
                        "Check the path, its permissions and the package of its protocol"
                    ) from error
                self._tell(trainer, text)
                time.sleep(PAUSE)

    def _largest(self) -> Expected:
        """Tensors of the largest message, on rank 0."""
        return self.part.whole_state()

    def _from_rank_0(self, work: Callable[[], Any]) -> Any:
        """Rank 0's result, which is JSON. Its error is one of all ranks."""
        found, failure = from_rank_0(self.world.communicator, work, UserError, OSError, ValueError)
        if failure is not None:
            raise UserError(failure)
        return found

    def _announce(self, trainer: Trainer) -> None:
        rounds, round = self.rounds, self.part.round

        def announce() -> None:
            assert rounds is not None
            self._retried(trainer, lambda: rounds.announce(round))

        if trainer.completed < trainer.steps:
            self._from_rank_0(announce)  # another process may have the name: an error of all ranks

    def _send(self, trainer: Trainer) -> None:
        part = self.part
        local = part.gathered(part.names(part.round))
        if self.rounds is None:
            return
        if not all(bool(each.isfinite().all()) for each in local.values()):
            trainer.log(f"warning: round {part.round}: no contribution, since weights are not finite")
            return
        rounds, tensors = self.rounds, part.contribution(part.round, local)

        def offer() -> bool:
            facts = {"base": part.base(part.round), "jumps": part.jumps, "completed": trainer.completed}
            if not rounds.contribute(part.round, tensors, **facts):
                trainer.log(
                    f"warning: round {part.round} has another contribution of {rounds.name}: a second peer has its "
                    "name, or this machine does not repeat its own bits"
                )
            return True

        self._until(trainer, lambda: retried(offer, lambda text: self._tell(trainer, text)))

    def _until(self, trainer: Trainer, work: Callable[[], Any]) -> None:
        """Try an upload again for a while. A contribution that cannot be uploaded is late, and no error."""
        end = time.monotonic() + min(self.own.timeout, 60.0)
        while not work() and time.monotonic() < end:
            time.sleep(PAUSE)

    def _tell(self, trainer: Trainer, problem: str) -> None:
        if problem != self._problem:
            trainer.log(f"peers: {self.own.folder}: {problem}\nit will be tried again")
        self._problem = problem

    def _meet(self, trainer: Trainer) -> None:
        """Wait for the line of the round, and apply it. A request to stop leaves the round open."""
        part = self.part
        found = self._wait(trainer, lambda: self._decided(trainer))
        if found is None:
            trainer.open = trainer.completed >= trainer.steps
        elif found == PASSED:
            self._jump(trainer)
        else:
            part.jumps = found
            part.set_masters(part.names(part.round), self.own.alpha)
            part.round += 1
            self._after_round(trainer)
            self._jump(trainer)

    def _wait(self, trainer: Trainer, look: Callable[[], Any]) -> Any:
        """Have rank 0 look until it finds something (JSON). None if the run stops instead."""
        first, pause = time.monotonic(), PAUSE / 64
        with trainer.aside(HOOKS, "waiting for peers"):
            while True:
                answer = None
                if self.world.is_main:
                    self._waited = time.monotonic() - first
                    answer = self._looked(trainer, look)
                found, failure, stop = self.world.communicator.broadcast(answer)
                if failure is not None:
                    raise UserError(failure)
                if found is not None:
                    return found
                trainer.beacon.at(HOOKS, detail=b"waiting for peers")
                trainer.ask(trainer.completed)
                asked = [name in trainer.requests for name in STOPS]
                signals = [name for name, is_asked in zip(STOPS, self.world.communicator.any_rank(asked)) if is_asked]
                if signals or stop:
                    reason = stop or (f"signal {signals[0]}" if signals[0].startswith("SIG") else signals[0])
                    trainer.stop(reason)
                    return None
                time.sleep(pause)
                pause = min(1.5 * pause, PAUSE)

    def _looked(self, trainer: Trainer, look: Callable[[], Any]) -> list[Any]:
        try:
            found = look()
            late = found is None and self._waited > self.own.patience + self.own.timeout
            return [found, None, f"peers: no round for {self.own.patience:.0f} s" if late else None]
        except TooFew as few:
            return [None, None, f"peers: {few}"]
        except UserError as error:
            return [None, str(error), None]

    def _decided(self, trainer: Trainer) -> list[list[int]] | str | None:
        """On rank 0: apply the round's line, if it is there. Returns the jumps since the last own contribution, or
        PASSED if its contributions were deleted."""
        rounds, part = self.rounds, self.part
        assert rounds is not None
        line = self._retried(trainer, lambda: rounds.decide(part.round, part.base(part.round), part))
        if line is None:
            return None
        if not self._apply_line(trainer, line):
            passed = self.own.replay is None and self._retried(trainer, lambda: rounds.passed(line))
            return PASSED if passed else None
        return [] if line.has(rounds.name) else part.jumps

    def _retried(self, trainer: Trainer, work: Callable[[], Any]) -> Any:
        return retried(work, lambda text: self._tell(trainer, text))

    def _apply_line(self, trainer: Trainer, line: Line) -> bool:
        """Apply a line to the common weights, once. Returns False while a contribution cannot be read."""
        contributions = self._retried(trainer, lambda: self._read(line))
        if contributions is not None:
            self._use(trainer, line, contributions)
        return contributions is not None

    def _use(self, trainer: Trainer, line: Line, contributions: Sequence[Mapping[str, Tensor]]) -> None:
        if line.base != self.part.base(line.round):
            raise self._other_weights(line.round, line.peer)
        # No second attempt after an error: a part of the weights may have changed.
        mine = line.names.index(self.own.name) if self.own.name in line.names else None
        self.part.apply(line.round, contributions, mine, self._weights(trainer, line))
        self._record(trainer, line)

    def _weights(self, trainer: Trainer, line: Line) -> list[float] | None:
        """Weights of the contributions of a line. None: they count alike."""
        return None

    def _other_weights(self, round: int, peer: str) -> UserError:
        return UserError(
            f"round {round}: the common weights of {peer} and {self.own.name} differ, so one of "
            "them did not start from the same weights. Start both from the same checkpoint or seed"
        )

    def _read(self, line: Line) -> list[Mapping[str, Tensor]] | None:
        """Contributions of a line, in its order. None while one cannot be read."""
        assert self.rounds is not None
        try:
            return self.rounds.named(line, self.part)
        except (Refused, Unreadable, FileNotFoundError):
            return None

    def _record(self, trainer: Trainer, line: Line) -> None:
        absent = "".join(f", {name} excluded: {reason}" for name, reason in line.absent.items())
        trainer.log(f"round {line.round}: {', '.join(line.names)}{absent}")
        if self.own.name in line.absent and line.strikes.get(self.own.name, 0) >= self.own.strikes:
            trainer.log(f"warning: {self.own.name} is excluded for good (peers.strikes). Its steps are not used")
        trainer.record(
            "peers_round", step=trainer.completed, round=line.round, members=line.names, absent=line.absent,
            decided_by=line.peer, **({"strikes": line.strikes} if line.strikes else {}),
        )  # fmt: skip

    def _after_round(self, trainer: Trainer) -> None:
        """Publish the common weights from time to time, and delete old files."""
        rounds, part, done = self.rounds, self.part, self.part.round - 1
        if rounds is None or part.round % self.own.state_every:
            return
        line = rounds.line(done)
        if line is not None and line.peer == rounds.name:
            retried(lambda: rounds.publish(done, part.to_publish()), lambda text: self._tell(trainer, text))
        retried(lambda: rounds.clean(done), lambda text: self._tell(trainer, text))

    def _jump(self, trainer: Trainer) -> None:
        """Skip rounds that the others have finished without this peer: take their weights, and their step."""
        part, completed = self.part, trainer.completed
        given, before = self.jumps.get(completed), part.round
        if (self.own.replay is not None and given is None) or trainer.stop_reason is not None:
            return
        to = self._from_rank_0(lambda: self._retried(trainer, lambda: self._target(given)))
        if to is None:
            return
        self._wait(trainer, lambda: self._caught_up(trainer, to) or None)
        part.round = self.world.communicator.broadcast(part.round)  # a stop may end it earlier
        if part.round == before:
            return
        part.jumps = [*part.jumps, [completed, part.round]]
        part.set_masters(list(part.shapes))
        trainer.record("peers_jump", step=completed, round=part.round)
        trainer.completed = part.round * part.interval
        trainer.log(f"skipped from step {completed} to {trainer.completed}: the other peers were at round {part.round}")
        part.engine.start_at(trainer.completed)
        trainer.request("save")  # the next contribution follows from this state

    def _target(self, given: int | None) -> int | None:
        """The round to skip to, or None."""
        rounds, part = self.rounds, self.part
        assert rounds is not None
        if given is not None:
            return given
        line = rounds.line(part.round)
        if line is None or (line.has(rounds.name) and rounds.has_all(line)):
            return None  # the round is open, or this peer repeats its part after a restart
        return int(rounds.decided_up_to(part.round))

    def _caught_up(self, trainer: Trainer, to: int) -> bool:
        """On rank 0: apply the lines below `to`, or take a state of the folder where contributions are gone."""
        rounds, part = self.rounds, self.part
        assert rounds is not None
        part.pending.clear()
        while part.round < to:
            line = self._retried(trainer, lambda: rounds.line(part.round))
            if line is None:
                return False
            if self._apply_line(trainer, line):
                part.round += 1
                continue
            found = self._retried(trainer, lambda: rounds.newest_state(to, part.whole_state()))
            if found is None or found[0] < part.round:
                return False
            part.adopt(found[1])
            part.round = found[0] + 1
        return True
