"""Tells of spikes, counts what was done about them, and asks for a rollback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.engine.part import part_of
from megatron.engine.parts import GATE
from megatron.engine.spikes import CLIP, REPORT, ROLLBACK, SKIP, Spike, SpikeRule
from megatron.engine.update_gate import StepGate
from megatron.report.ledger import hash_text

from ..exchange import StepReport
from ..hook import Hook, HookContext, RollBack

if TYPE_CHECKING:
    from ..trainer import Trainer

_DONE = {
    REPORT: "it was applied as ever",
    SKIP: "its update was left out",
    CLIP: "its gradient was clipped to that",
    ROLLBACK: "its update was left out, and the run goes back",
}


class TooManySpikes(RuntimeError):
    """A policy has acted as often as `spikes.limit` allows.

    Attributes:
        step: number of the update that came on top.
    """

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step


class SpikesHook(Hook):
    """The engine has decided (`megatron.engine.update_gate`); here the ledger and the person who watches hear of it.

    Args:
        rule: the engine's, which remembers in checkpoints when updates were left out.

    Raises:
        TooManySpikes: on every rank.
    """

    def __init__(self, rule: SpikeRule) -> None:
        self._rule = rule

    @classmethod
    def of(cls, parts: HookContext) -> SpikesHook | None:
        gate: StepGate | None = part_of(parts.engine, GATE)
        return None if gate is None else cls(gate.rule)

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        spike = report.result.spike
        if spike is None or spike.action not in _DONE:
            return
        told = _sentence(spike, report.step)
        trainer.log(f"{told}; {_DONE[spike.action]}")
        trainer.record(
            "spike",
            step=report.step,
            name=spike.name,
            value=spike.value if spike.finite else str(spike.value),
            limit=spike.limit,
            action=spike.action,
            batch_hash=hash_text(report.batch_hash),
        )
        if spike.action == SKIP:
            self._count(trainer, report.step, told)
        elif spike.action == ROLLBACK:
            trainer.go_back(RollBack(report.step, told))

    def _count(self, trainer: Trainer, step: int, told: str) -> None:
        options, rule = trainer.config.spikes, self._rule
        rule.acted = [each for each in rule.acted if each > step - options.within] + [step]
        if len(rule.acted) > options.limit:
            raise TooManySpikes(
                f"{told}, and {len(rule.acted)} updates were left out within {options.within} steps, more than "
                f"spikes.limit = {options.limit}: the run does not get over it. Lower optimizer.lr, look at the data "
                f"(python tools/data/batch.py {trainer.config.run.dir} --step {step} --text), or raise the limit",
                step,
            )


def _sentence(spike: Spike, step: int) -> str:
    if spike.limit is None:
        return f"step {step}: the {spike.name} is {spike.value}"
    return f"step {step}: the {spike.name} of {spike.value:.4g} is above {spike.limit:.4g}"
