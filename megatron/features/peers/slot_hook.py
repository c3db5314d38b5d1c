"""A step of peers that share gradients: compute the own slots, wait for the line, take over slots, apply the mean."""

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron.config import Config
from megatron.config.problems import UserError
from megatron.data.batch import StepBatch
from megatron.engine.part import part_of
from megatron.engine.protocol import StepDropped, StepResult
from megatron.training.exchange import StepReport, joined, weighted
from megatron.training.hook import HookContext, Look, RunStep
from megatron.training.trainer import Trainer
from megatron.training.world import World
from megatron.worker.beacon import HOOKS

from .gradients import SlotGradients
from .hook import PeersHook, identity_of, retried, samples_of
from .messages import Expected, digest
from .options import SLOTS
from .rounds import Offered
from .slots import SlotLedger, StepLine, chained

NAME = "peer_gradients"
LINE, COMPUTE = "line", "compute"


class SlotHook(PeersHook):
    """Runs the steps of a peer. Rank 0 reads and writes the ledger, and all ranks wait for it."""

    part: SlotGradients  # type: ignore[assignment]
    rounds: SlotLedger | None  # type: ignore[assignment]
    ledger = SlotLedger

    def __init__(self, config: Config, part: Any, world: World) -> None:
        super().__init__(config, part, world)
        self._offers: dict[int, Offered] = {}  # of the line that is applied next
        self._sending: threading.Thread | None = None
        self._serve = self._promised = self._announced = self._dealt = False
        self._asked = -1  # number of lines when no living peer was found

    @classmethod
    def of(cls, parts: HookContext) -> "SlotHook | None":
        if not SLOTS.wanted(parts.config) or parts.world is None:
            return None
        return cls(parts.config, part_of(parts.engine, NAME), parts.world)

    def on_start(self, trainer: Trainer) -> None:
        part = self.part
        if part.round != trainer.completed:
            raise UserError(
                f"peers.algorithm = gradients: the checkpoint after {trainer.completed} steps must be of a run whose "
                f"peers have shared all of them, and not {part.round}. Start a new run from its weights"
            )
        identity = identity_of(self.config, samples_of(trainer.loader.plan)) if self.world.is_main else {}
        self._from_rank_0(lambda: self._open(trainer, identity))
        if not part.chain:
            part.chain = part.hash_of_weights()
        size = sum(each.numel() * each.element_size() for _, each in trainer.engine.module.named_parameters())
        trainer.log(f"peer {self.own.name} of {', '.join(self.own.members)}, at step {part.round}: {size:,} bytes")
        self._heal(trainer)

    def _largest(self) -> Expected:
        return self.part.form  # a state is sent in pieces

    def run_step(self, trainer: Trainer, run: RunStep, batch: StepBatch, lr: float, look: Look) -> StepResult:
        self._announced = self._dealt = False
        while True:
            found = self._wait(trainer, lambda: self._looked_at(trainer))
            if found is None:
                raise StepDropped(set(), 0.0, 0.0)
            what, slots = found
            if what == LINE:
                break
            for slot in slots:
                self._compute(trainer, run, batch, lr, look, slot)
        return self._update(trainer, lr)

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        part, rounds = self.part, self.rounds
        if self._serve:
            self._serve_state(trainer)
        if rounds is not None:
            retried(lambda: rounds.done(step), lambda text: self._tell(trainer, text))
        if part.round < trainer.steps and trainer.stop_reason is None:
            self._heal(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if self._sending is not None:
            self._sending.join(self.own.timeout)
        super().on_end(trainer)

    def _looked_at(self, trainer: Trainer) -> list[Any] | None:
        """On rank 0: the next thing to do in a step. None: wait."""
        rounds, part = self.rounds, self.part
        assert rounds is not None

        def look() -> list[Any] | None:
            line = rounds.line(part.round)
            if line is None:
                if not self._dealt:
                    slots = rounds.assigned(part.round)
                    self._dealt = True
                    if slots:
                        return [COMPUTE, slots]
                if not self._announced:
                    rounds.announce(part.round, base=part.chain)
                    self._announced = True
                found = rounds.step_of(part.round, part.chain, part.form)
                if found is None or isinstance(found, list):
                    return None if found is None else [COMPUTE, found]
                line = found
            if line.base != part.chain:
                raise self._other_weights(line.round, line.peer)
            self._offers, gone = rounds.gradients(line, part.form)
            return [COMPUTE, gone] if gone else [LINE, []]

        found: list[Any] | None = retried(look, lambda text: self._tell(trainer, text))
        return found

    def _compute(self, trainer: Trainer, run: RunStep, batch: StepBatch, lr: float, look: Look, slot: int) -> None:
        """Compute the gradient of a slot, and send it."""
        part, step, loader = self.part, trainer.at, trainer.loader
        own = batch if slot == loader.share else loader.read(step, slot)
        result = run(own, lr, look)
        found = [*weighted(result.loss, result.tokens), *trainer.exchange.limbs(own.hash)]
        loss, weight, *limbs = trainer.exchange.sum(found).tolist()
        tensors, rounds = part.take(), self.rounds
        if rounds is None:
            self._from_rank_0(lambda: None)
            return
        facts = {"base": part.chain, "weight": weight, "loss": loss, "hash": joined(limbs)}

        def offer() -> bool:
            rounds.offer(part.round, slot, tensors, **facts)
            return True

        def send() -> None:
            if not all(bool(each.isfinite().all()) for each in tensors.values()):
                raise ValueError(f"step {step}: the gradient of slot {slot} is not finite. Lower optimizer.lr")
            self._until(trainer, lambda: retried(offer, lambda text: self._tell(trainer, text)))

        self._from_rank_0(send)

    def _update(self, trainer: Trainer, lr: float) -> StepResult:
        """Apply the line of a step, which rank 0 holds with its gradients."""
        part, rounds = self.part, self.rounds
        gradient: dict[str, Tensor] = {}
        facts: dict[str, Any] = {}
        if rounds is not None:
            line = rounds.line(part.round)
            assert line is not None
            gradient, norm, weight = part.mean(rounds.count, self._offers)
            loss, hashed = (sum(each[0][key] for each in self._offers.values()) for key in ("loss", "hash"))
            facts = {
                "norm": norm, "weight": weight, "loss": loss / weight if weight else 0.0, "hash": hashed % 2**64,
                "chain": chained(part.chain, line), "serve": self._may_serve(line),
            }  # fmt: skip
            self._record_line(trainer, line)
            self._offers = {}
        facts = self.world.communicator.broadcast(facts)
        if facts["weight"]:
            part.apply(gradient, lr)
        part.round, part.chain, self._serve = part.round + 1, facts["chain"], facts["serve"]
        if part.round % self.own.state_every == 0:  # peers whose weights differ refuse each other from here on
            part.chain = digest(f"{part.chain} {part.hash_of_weights()}".encode())
        first = self.world.is_main
        trainer.batch = replace(trainer.batch, hash=facts["hash"] if first else 0)
        return StepResult(
            loss=facts["loss"] if first else 0.0,
            tokens=facts["weight"] if first else 0.0,
            grad_norm=facts["norm"],
            unlabelled=not facts["weight"],
        )

    def _record_line(self, trainer: Trainer, line: StepLine) -> None:
        before = self.rounds.line(line.round - 1) if self.rounds is not None else None
        ahead = before.next if before is not None else line.next
        if line.absent or line.next != ahead or len(line.used) < len(line.slots):
            lost = "".join(f", {name} excluded: {reason}" for name, reason in line.absent.items())
            trainer.log(f"step {line.round}: {', '.join(line.names)}{lost}")
            members = sorted({*line.next})
            trainer.record(
                "peers_round", step=line.round, round=line.round, members=line.names, absent=line.absent,
                decided_by=line.peer, next=members, **({"strikes": line.strikes} if line.strikes else {}),
            )  # fmt: skip

    def _may_serve(self, line: StepLine) -> bool:
        """On rank 0: whether a state that this peer's lines have promised is copied now. It waits for the last one."""
        assert self.rounds is not None
        self._promised = self._promised or (line.serve and line.peer == self.rounds.name)
        if not self._promised or (self._sending is not None and self._sending.is_alive()):
            return False
        self._promised = False
        return True

    def _serve_state(self, trainer: Trainer) -> None:
        """Send the state to a peer that asks for it. The ranks wait for the copy in memory only."""
        part, rounds = self.part, self.rounds
        with trainer.aside(HOOKS, "a copy of the state for a peer"):
            tensors, numbers = part.snapshot()
        if rounds is None:
            return
        round, twin = part.round, rounds.twin()

        def send() -> None:
            retried(lambda: twin.send_state(round, tensors, numbers), trainer.log)

        trainer.log(f"sending the state after {round} steps to a peer")
        self._sending = threading.Thread(target=send, name="peer state", daemon=True)
        self._sending.start()

    def _heal(self, trainer: Trainer) -> None:
        """Take the state of a living peer, where gradients of the next steps are gone."""
        part, rounds = self.part, self.rounds

        def behind() -> bool:
            if rounds is None or not self._retried(trainer, lambda: rounds.behind(part.round)):
                return False
            return self._retried(trainer, lambda: rounds.newest() > self._asked) or False

        if not self._from_rank_0(behind):
            return
        first = self._from_rank_0(lambda: self._retried(trainer, lambda: rounds.ask() if rounds is not None else 0))
        if first is None:
            return
        trainer.log(f"the others are at step {first}, and gradients of step {part.round} are gone: asking for a state")
        state: dict[str, Any] = {}
        pieces, came = 0, 0.0  # of a state on its way, and when the last one came

        def look() -> list[int] | None:
            found = self._retried(trainer, lambda: rounds.take_state(first) if rounds is not None else None)
            if found is not None:
                state["tensors"], state["numbers"] = found[1:]
                return [found[0]]
            nonlocal pieces, came
            there = self._retried(trainer, lambda: rounds.sent(first) if rounds is not None else 0) or 0
            if there > pieces:
                pieces, came = there, self._waited
            return [0] if self._waited - came > self.own.timeout else None

        found = self._wait(trainer, look)
        if rounds is not None:
            retried(rounds.no_longer_ask, lambda text: self._tell(trainer, text))
        if found is None or found[0] <= part.round:
            self._asked = first
            return  # no peer is there: the slots are computed again
        before = trainer.completed
        self._install(trainer, state)
        trainer.record("peers_jump", step=before, round=part.round)
        trainer.log(f"took the state after {part.round} steps from another peer")

    def _install(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        part = self.part
        part.install(state.get("tensors", {}), json.loads(json.dumps(state.get("numbers", {}))))
        trainer.completed = part.round
        trainer.moved = True
        part.engine.start_at(part.round)
        trainer.request("save")
