"""Steps that are computed twice, to see whether the machine repeats itself: every n-th, and those of a spike.

Steps without an update also tell the gradient of a part of the batch, for the noise scale.

The first time the update is left out, so that the second one begins from the same weights, with the same batch and the
same draws. Where two results differ in a bit, hardware has failed for a moment, or a kernel does not repeat itself.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron.config import Config
from megatron.data.batch import StepBatch
from megatron.engine.part import part_of
from megatron.engine.parts import GATE
from megatron.engine.protocol import StepResult
from megatron.engine.update_gate import StepGate

from .corruption import ADVICE, Suspects
from .noise_scale import label_weights, noise_scale, small_batch

if TYPE_CHECKING:
    from .attribution import Attribution
    from .trainer import Trainer

Look = Callable[[int, int], None]
SHOWN = 8  # ranks in a message


@dataclass(frozen=True)
class Fingerprint:
    """What a step was on this rank: the sum of its labels' losses, and hashes of the gradients that it has computed,
    before they were summed, and of those that its optimizer was given.

    The first two nobody else's numbers have gone into, but for ranks that compute a sample together."""

    loss: float
    own: int
    gradients: int


@dataclass(frozen=True)
class Disagreement:
    """Ranks whose fingerprints of two computations of a step are not the same, by part."""

    losses: list[int]
    own: list[int]
    gradients: list[int]

    def __bool__(self) -> bool:
        return bool(self.losses or self.own or self.gradients)

    @property
    def ranks(self) -> list[int]:
        """Those at fault, or some that one of them has misled: the others have only heard of it."""
        return self.losses or self.own or self.gradients

    @property
    def text(self) -> str:
        if self.losses:
            return f"{_ranks(self.losses)} computed another loss"
        if self.own:
            return f"{_ranks(self.own)} computed other gradients"
        return f"{_ranks(self.gradients)} got other gradients"


class Replay:
    """Has an engine do steps, and some of them twice.

    Args:
        every: `training.audit`; action: `training.audit_action`.
        confirm: `spikes.confirm`.
        noise: `logging.noise_scale`.
        engine: one with a `gate`.
        attribution: finds out whose fault a value is that stays.
    """

    def __init__(
        self, every: int | None, action: str, confirm: bool, noise: int | None, engine: Any,
        attribution: Attribution | None = None,
    ) -> None:  # fmt: skip
        self._every, self._action, self._confirm, self._noise = every, action, confirm, noise
        self._engine, self._attribution = engine, attribution
        self._gate: StepGate = part_of(engine, GATE)

    @classmethod
    def of(cls, config: Config, engine: Any, attribution: Attribution | None = None) -> Replay | None:
        """What a run asks for, if it does."""
        confirm = config.spikes.confirm or attribution is not None
        audit, noise = config.training.audit, config.logging.noise_scale
        wanted = confirm or audit is not None or noise is not None
        action = config.training.audit_action
        return cls(audit, action, confirm, noise, engine, attribution) if wanted else None

    def step(self, trainer: Trainer, step: int, batch: StepBatch, lr: float, look: Look) -> StepResult:
        """As the engine's `step`; all ranks call it."""
        small = part = None
        if self._noise is not None and step % self._noise == 0:
            training = trainer.config.training
            pieces = training.sequence_length // batch.labels.shape[-1]  # of each sample, in a stage of shorter ones
            part = small_batch(batch, training.global_batch_size * pieces)
            small = self._run(part, lr, None, trial=True)
        result = self._step(trainer, step, batch, lr, look)
        good = result.spike is None or not result.spike.leaves_out
        if good and self._attribution is not None and self._attribution.expects(step):
            self._attribution.passes(trainer, step, float(self._engine.losses.loss))
        if small is not None and part is not None:
            self._compare(trainer, part, small, batch, result)
        return result

    @staticmethod
    def _compare(trainer: Trainer, part: StepBatch, small: StepResult, batch: StepBatch, large: StepResult) -> None:
        """Put the noise scale into the record: the batch's gradient beside that of a part."""
        at = trainer.mesh.at
        counts = at.tensor == at.context == at.pipeline == 0  # its batch, which other ranks have too
        own = [*label_weights(part), *label_weights(batch)] if counts else [0.0] * 4
        b, b_squares, B, B_squares = trainer.exchange.sum(own).tolist()
        if small.grad_norm is None or large.grad_norm is None or small.skipped or large.skipped or not b:
            return
        b, B = b**2 / b_squares, B**2 / B_squares
        if not b < B:
            return
        trainer.extra_metrics["noise_scale"] = noise_scale(float(small.grad_norm), b, float(large.grad_norm), B)

    def _step(self, trainer: Trainer, step: int, batch: StepBatch, lr: float, look: Look) -> StepResult:
        if self._every is not None and (step + 1) % self._every == 0:
            self._run(batch, lr, None, trial=True, own=True)
            first = self._print()
            result = self._run(batch, lr, look, own=True)
            self._audit(trainer, step, first)
        elif self._confirm:
            before = self._gate.rule.state()
            result = self._run(batch, lr, look)
        else:
            return self._engine.step(batch, lr, look)
        if self._confirm and result.spike is not None and result.spike.leaves_out:
            if self._every is not None and (step + 1) % self._every == 0:
                return result  # the audit has replayed it
            return self._again(trainer, step, batch, lr, before, result)
        return result

    def _again(
        self, trainer: Trainer, step: int, batch: StepBatch, lr: float, before: dict[str, Any], first: StepResult
    ) -> StepResult:
        """The step of a spike once more: what it says now counts."""
        was = self._print()
        self._gate.rule.restore(before)
        result = self._run(batch, lr, None)
        found = self._different(trainer, was)
        losses, gradients = found.losses, found.gradients
        if result.spike is None:
            cause = "transient: it was not there again, and the update is applied"
        elif losses or gradients:
            cause = "transient, but it was there again with other numbers"
        else:
            of = "of the data, the model or the place" if self._attribution else "of the data or the model"
            cause = f"{of}: it is the same to the last bit"
        assert first.spike is not None
        stays = result.spike is not None and not (losses or gradients)
        trainer.record(
            "replay", step=step, name=first.spike.name, repeated=result.spike is not None, losses=losses,
            gradients=gradients,
        )  # fmt: skip
        where = f" ({_ranks(losses)} had another loss)" if losses else ""
        trainer.log(f"step {step}: the {first.spike.name} of {first.spike.value:.4g} is {cause}{where}")
        if stays and self._attribution is not None:
            self._attribution.stays(trainer, step, first.spike, float(self._engine.losses.loss))
        return result

    def _audit(self, trainer: Trainer, step: int, first: Fingerprint) -> None:
        found = self._different(trainer, first)
        trainer.record(
            "audit", step=step, equal=not found, losses=found.losses, own=found.own, gradients=found.gradients
        )
        if not found:
            return
        text = f"audit of step {step}: computed twice, {found.text}"
        if self._action == "report":
            trainer.log(text)
            return
        hosts, ranks = [""] * trainer.mesh.layout.world_size, found.ranks
        dist.all_gather_object(hosts, socket.gethostname())
        suspects = Suspects(ranks, [hosts[rank] for rank in ranks], len(ranks) == 1, "audit")
        suspects.give_up(trainer, step, None, f"{text}. Its update was not saved. {ADVICE}")

    def _run(
        self, batch: StepBatch, lr: float, look: Look | None, trial: bool = False, own: bool = False
    ) -> StepResult:
        self._gate.prepare(trial=trial, own=self._engine.state.parameters if own else ())
        return self._engine.step(batch, lr, look)

    def _print(self) -> Fingerprint:
        return Fingerprint(float(self._engine.losses.loss), self._gate.own_gradients(), self._gate.gradients())

    def _different(self, trainer: Trainer, first: Fingerprint) -> Disagreement:
        """Ranks whose fingerprint differs from what it was."""
        now, ranks, own = self._print(), trainer.mesh.layout.world_size, trainer.mesh.rank
        flags = [0.0] * (3 * ranks)
        # A nan is equal to itself here.
        flags[own] = float(repr(now.loss) != repr(first.loss))
        flags[ranks + own] = float(now.own != first.own)
        flags[2 * ranks + own] = float(now.gradients != first.gradients)
        found = trainer.exchange.sum(list(flags)).tolist()
        return Disagreement(*([r for r in range(ranks) if found[part * ranks + r]] for part in range(3)))


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN])) + (" and others" if len(ranks) > SHOWN else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
