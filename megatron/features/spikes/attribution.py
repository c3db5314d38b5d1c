"""Finds the cause of a bad value, as Megatron-LM's rerun machine does.

A step with a bad loss or gradient norm is computed again in place (`Replay`). If the result differs, the fault was
transient. If it is the same to the last bit, the run ends with status 16, and the launcher starts it again with
every rank in another place. It comes to the same step from its newest checkpoint, with the same weights and the same
batch. If the value is bad there too, the data or the model cause it, and the policy for spikes applies. If it is
good, the rank's former place is at fault.

Steps that are computed again, to check whether the machine repeats itself.

The first time the update is skipped, so the second one begins from the same weights, with the same batch and the
same draws. If two results differ in a bit, hardware has failed for a moment, or a kernel is not deterministic."""

import math
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.format.communicator import Communicator
from megatron.config import Config
from megatron.data.batch import StepBatch
from megatron.engine.protocol import Spike, StepResult
from megatron.report.ledger import read_ledger
from megatron.training.hook import Look, StepError
from megatron.training.trainer import Trainer
from megatron.training.world import World
from megatron.worker.job import CORRUPT, RERUN

from .gate import StepGate
from .options import spikes_of

SHOWN = 8  # ranks in a message


@dataclass(frozen=True)
class Fingerprint:
    """A step on this rank: the sum of its labels' losses, and hashes of the gradients that it computed, before they
    were summed, and of its optimizer's gradients.

    The first two do not depend on other ranks, except for ranks that compute a sample together."""

    loss: float
    own: int
    gradients: int


@dataclass(frozen=True)
class Disagreement:
    """Ranks whose fingerprints of two computations of a step differ, by part."""

    losses: list[int]
    own: list[int]
    gradients: list[int]

    def __bool__(self) -> bool:
        return bool(self.losses or self.own or self.gradients)

    @property
    def ranks(self) -> list[int]:
        """Ranks at fault, or some that one of them has misled: the others only received its results."""
        return self.losses or self.own or self.gradients

    @property
    def text(self) -> str:
        if self.losses:
            return f"{text_of(self.losses)} computed another loss"
        if self.own:
            return f"{text_of(self.own)} computed other gradients"
        return f"{text_of(self.gradients)} got other gradients"


class Replay:
    """Computes steps with a hash of their gradients."""

    def __init__(self, engine: Any, gate: StepGate) -> None:
        self._engine, self._gate = engine, gate

    def run(
        self, batch: StepBatch, lr: float, look: Look | None = None, trial: bool = False, own: bool = False
    ) -> StepResult:
        self.prepare(trial, own)
        return self._engine.step(batch, lr, look)

    def prepare(self, trial: bool = False, own: bool = False) -> None:
        """Hash the next step. With `own` also the gradients that this rank computes."""
        self._gate.prepare(trial=trial, own=self._engine.state.parameters if own else ())

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(float(self._engine.losses.loss), self._gate.own_gradients(), self._gate.gradients())

    def different(self, trainer: Trainer, first: Fingerprint) -> Disagreement:
        """Ranks whose fingerprint has changed."""
        now, ranks, own = self.fingerprint(), trainer.mesh.layout.world_size, trainer.mesh.rank
        flags = [0.0] * (3 * ranks)
        # A nan is equal to itself here.
        flags[own] = float(repr(now.loss) != repr(first.loss))
        flags[ranks + own] = float(now.own != first.own)
        flags[2 * ranks + own] = float(now.gradients != first.gradients)
        found = trainer.exchange.sum(list(flags)).tolist()
        return Disagreement(*([r for r in range(ranks) if found[part * ranks + r]] for part in range(3)))


def text_of(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN])) + (" and others" if len(ranks) > SHOWN else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


SUSPECT, ATTRIBUTION = "suspect", "attribution"  # entries of the ledger
TRANSIENT, HOST, DATA, UNCLEAR = "transient", "host", "data", "unclear"
PLACE = "JOB_PLACE"  # variable of a rank: its host and its slot there


class Elsewhere(StepError):
    """A value must be computed in another place."""

    status = RERUN


class FaultyHost(Elsewhere):
    """A place computes wrong values."""

    status = CORRUPT


def pending(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The value that was to be computed elsewhere, if that has not happened yet."""
    found: dict[str, Any] | None = None
    for entry in entries:
        if entry["event"] == SUSPECT:
            found = dict(entry)
        elif found is not None and entry["event"] == ATTRIBUTION and entry["step"] == found["step"]:
            found = None
    return found


class Attribution:
    """The bad values of a run, across its starts. All ranks call every method.

    Args:
        suspect: the ledger's entry of a value that is to be computed again here.
    """

    def __init__(self, suspect: Mapping[str, Any] | None, communicator: Communicator, place: str) -> None:
        self._suspect, self._communicator, self._place = suspect, communicator, place

    @classmethod
    def of(cls, config: Config, world: World) -> "Attribution | None":
        if not spikes_of(config).attribute:
            return None
        file = Path(config.run.dir) / "ledger.jsonl"
        found = pending(read_ledger(file)) if world.is_main and file.exists() else None
        place = os.environ.get(PLACE) or f"{socket.gethostname()}/{os.environ.get('LOCAL_RANK', '0')}"
        return cls(world.communicator.broadcast(found), world.communicator, place)

    def expects(self, step: int) -> bool:
        """Whether the step was to be computed elsewhere."""
        return self._suspect is not None and self._suspect["step"] == step

    def stays(self, trainer: Trainer, step: int, spike: Spike, loss: float) -> None:
        """A bad value came twice, equal to the last bit.

        Args:
            loss: this rank's own sum.

        Raises:
            Elsewhere: on every rank, if it was not computed in another place yet.
        """
        losses, places = self._everybody(loss)
        suspect = self._suspect if self.expects(step) else None
        if suspect is None:
            facts = {"name": spike.name, "value": repr(spike.value), "losses": losses, "places": places}
            trainer.record(SUSPECT, step=step, **facts)
            raise Elsewhere(
                f"step {step}: the {spike.name} is {spike.value:.4g}, twice and to the last bit (spikes.attribute): "
                "computing it again with every rank in another place, from the newest checkpoint",
                step,
            )
        name = f"the {spike.name} of {spike.value:.4g}"
        if places == suspect["places"]:
            self._report(trainer, step, UNCLEAR, f"{name} is unchanged, and so is the place of every rank")
        elif losses == suspect["losses"]:
            self._report(trainer, step, DATA, f"{name} is of the data or the model: it is there in other places, too")
        else:
            self._blame(trainer, step, losses, places)

    def passes(self, trainer: Trainer, step: int, loss: float) -> None:
        """A step that was bad elsewhere is good here.

        Raises:
            FaultyHost: on every rank, if the host is known and others remain.
        """
        assert self._suspect is not None
        losses, places = self._everybody(loss)
        if places == self._suspect["places"]:
            self._report(trainer, step, TRANSIENT, f"the {self._suspect['name']} is good now, in the same place")
        else:
            self._blame(trainer, step, losses, places)

    def _blame(self, trainer: Trainer, step: int, losses: list[str], places: list[str]) -> None:
        """Ranks have other losses in other places: the place with the worse loss is at fault."""
        suspect = self._suspect or {}
        moved = zip(suspect["losses"], suspect["places"], losses, places, strict=True)
        wrong = {there if _worse(was, now) else here for was, there, now, here in moved if was != now and there != here}
        who = f"{', '.join(sorted(wrong))} computed it wrongly" if wrong else "a gradient was wrong, no loss says where"
        self._report(trainer, step, HOST, f"the {suspect['name']} differs in another place: {who}", wrong)
        hosts = {place.rpartition("/")[0] for place in wrong}
        if hosts and hosts < {place.rpartition("/")[0] for place in places}:
            raise FaultyHost(f"step {step}: {who} (spikes.attribute)", step)

    def _everybody(self, loss: float) -> tuple[list[str], list[str]]:
        """Each rank's own loss, in all its digits, and its place."""
        found = self._communicator.gather([repr(loss), self._place])
        return [each[0] for each in found], [each[1] for each in found]

    def _report(self, trainer: Trainer, step: int, cause: str, said: str, places: Iterable[str] = ()) -> None:
        trainer.record(ATTRIBUTION, step=step, cause=cause, places=sorted(places))
        trainer.log(f"step {step}: {said}")
        self._suspect = None


def _worse(one: str, other: str) -> bool:
    """Whether the first of two losses is the bad one."""
    a, b = float(one), float(other)
    return not math.isfinite(a) or (math.isfinite(b) and abs(a) > abs(b))
