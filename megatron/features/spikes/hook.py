"""Reports spikes, counts the actions, and asks for a rollback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.checkpoint.levels import Levels
from megatron.checkpoint.save.store import Store
from megatron.config import Config
from megatron.data.batch import StepBatch
from megatron.data.skipped_batches import LeftOut
from megatron.engine.part import part_of
from megatron.engine.protocol import CLIP, REPORT, ROLLBACK, SKIP, Spike, StepResult
from megatron.report.ledger import Ledger, hash_text
from megatron.training.exchange import Number, StepReport
from megatron.training.hook import Hook, HookContext, Look, RollBack, RunStep, StepError
from megatron.training.start.resume import StartPoint
from megatron.training.trainer import Trainer
from megatron.training.world import World

from .attribution import Attribution, Replay, text_of
from .gate import StepGate
from .options import NAME, meets_early, spikes_of


class CannotRollBack(StepError):
    """A rollback is impossible. The message has the reason and a fix."""


def roll_back(
    config: Config, world: World, back: RollBack, left: LeftOut, log: Callable[[str], Any], levels: Levels | None = None
) -> StartPoint:
    """Find where the run continues. All ranks call it. Later checkpoints are put aside, then the ledger has an entry.

    In this order a kill between the two loses nothing: the run resumes from the same checkpoint, comes to the same
    spike and goes back again.

    Args:
        left: batches that the run has skipped so far.

    Raises:
        CannotRollBack: no checkpoint is old enough, or `spikes.limit` is reached.
    """
    options, done = spikes_of(config), len(left.pairs) - len(config.data.left_out)
    if done >= options.limit:
        raise CannotRollBack(
            f"{back.reason}, and the run has gone back {done} times already (spikes.limit). Check the data and "
            "optimizer.lr",
            back.step,
        )
    store = Store(config.checkpoint.dir, world.communicator)
    wanted = max(back.step - options.back, 0)
    found = store.resume("auto", before=wanted + 1).checkpoint or store.resume("auto", before=back.step + 1).checkpoint
    if found is None:
        raise CannotRollBack(
            f"{back.reason}, and there is no checkpoint from before it to go back to. Save earlier "
            "(checkpoint.every, or checkpoint.steps=[0])",
            back.step,
        )
    for line in [*(levels.drop(found.step) if levels else ()), *store.set_aside(after=found.step)]:
        log(line)
    pair = (max(found.step, wanted), options.leave_out)
    left = left + LeftOut((pair,))
    facts = {"checkpoint": str(found.path), "left_out": [list(each) for each in left.pairs]}
    if world.is_main:
        ledger = Ledger(Path(config.run.dir) / "ledger.jsonl")
        ledger.write("rollback", step=back.step, to=found.step, reason=back.reason, **facts)
        ledger.close()
    log(
        f"{back.reason}: going back to {found.path}. From step {pair[0]} on {pair[1]} batches are skipped "
        f"(rollback {done + 1} of at most {options.limit})"
    )
    return StartPoint(found, None, {**facts, "ledger": found.meta.ledger}, left)


_DONE = {
    REPORT: "it was applied as usual",
    SKIP: "its update was skipped",
    CLIP: "its gradient was clipped to that",
    ROLLBACK: "its update was skipped, and the run goes back",
}


class TooManySpikes(StepError):
    """A policy has acted more often than `spikes.limit` allows: this update is beyond the limit."""


class SpikesHook(Hook):
    """Gives the gate the trainer's message, repeats steps, and reports the gate's decisions.

    Args:
        gate: of the engine. Checkpoints have the steps of skipped updates, in its rule.

    Raises:
        TooManySpikes: on every rank.
    """

    def __init__(self, gate: StepGate, replay: Replay, attribution: Attribution | None) -> None:
        self._gate, self._rule, self._replay, self._attribution = gate, gate.rule, replay, attribution

    @classmethod
    def of(cls, parts: HookContext) -> "SpikesHook | None":
        gate: StepGate | None = part_of(parts.engine, NAME)
        if gate is None:
            return None
        attribution = None if parts.world is None else Attribution.of(parts.config, parts.world)
        return cls(gate, Replay(parts.engine, gate), attribution)

    def on_start(self, trainer: Trainer) -> None:
        def meet(loss: Number, tokens: Number, norm: Number) -> tuple[float, float]:
            return trainer.meet(loss, tokens, norm).loss_and_norm()

        self._gate.meet = meet
        if meets_early(trainer.config, trainer.mesh.layout):
            self._gate.begin_to_meet = lambda *own: trainer.meet(*own, early=True).loss_and_norm

    def run_step(self, trainer: Trainer, run: RunStep, batch: StepBatch, lr: float, look: Look) -> StepResult:
        attribution = self._attribution
        if not spikes_of(trainer.config).confirm and attribution is None:
            return run(batch, lr, look)
        step, before, audited = trainer.at, self._rule.state(), self._gate.prepared
        if not audited:  # an audit repeats the step itself
            self._replay.prepare()
        result = run(batch, lr, look)
        if not audited and result.spike is not None and result.spike.leaves_out:
            result = self._again(trainer, batch, lr, before, result)
        good = result.spike is None or not result.spike.leaves_out
        if good and attribution is not None and attribution.expects(step):
            attribution.passes(trainer, step, self._loss(trainer))
        return result

    @staticmethod
    def _loss(trainer: Trainer) -> float:
        engine: Any = trainer.engine
        return float(engine.losses.loss)

    def _again(
        self, trainer: Trainer, batch: StepBatch, lr: float, before: dict[str, Any], first: StepResult
    ) -> StepResult:
        """Compute the step of a spike again. The second result counts."""
        step, was = trainer.at, self._replay.fingerprint()
        self._rule.restore(before)
        result = self._replay.run(batch, lr)
        found = self._replay.different(trainer, was)
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
        where = f" ({text_of(losses)} had another loss)" if losses else ""
        trainer.log(f"step {step}: the {first.spike.name} of {first.spike.value:.4g} is {cause}{where}")
        if stays and self._attribution is not None:
            self._attribution.stays(trainer, step, first.spike, self._loss(trainer))
        return result

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        spike = report.result.spike
        if spike is None or spike.action not in _DONE:
            return
        told = _sentence(spike, report.step)
        trainer.log(f"{told}: {_DONE[spike.action]}")
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
            trainer.go_back(RollBack(report.step, told, roll_back))

    def _count(self, trainer: Trainer, step: int, told: str) -> None:
        options, rule = spikes_of(trainer.config), self._rule
        rule.acted = [each for each in rule.acted if each > step - options.within] + [step]
        if len(rule.acted) > options.limit:
            raise TooManySpikes(
                f"{told}, and {len(rule.acted)} updates were skipped within {options.within} steps, more than "
                f"spikes.limit = {options.limit}: the run does not recover. Lower optimizer.lr, check the data "
                f"(deepy data batch {trainer.config.run.dir} --step {step} --text), or raise the limit",
                step,
            )


def _sentence(spike: Spike, step: int) -> str:
    if spike.limit is None:
        return f"step {step}: the {spike.name} is {spike.value}"
    return f"step {step}: the {spike.name} of {spike.value:.4g} is above {spike.limit:.4g}"
