"""Every n-th step is computed twice, and both results must agree to the last bit."""

import socket

import torch.distributed as dist

from megatron.data.batch import StepBatch
from megatron.engine.part import part_of
from megatron.engine.protocol import StepResult
from megatron.features.spikes.attribution import Fingerprint, Replay
from megatron.features.spikes.options import NAME
from megatron.training.hook import Hook, HookContext, Look, RunStep
from megatron.training.trainer import Trainer

from .options import AUDIT_KEYS
from .part import ADVICE, Suspects


class AuditHook(Hook):
    """Runs steps, some of them twice.

    Raises:
        Corruption: on every rank.
    """

    def __init__(self, every: int, action: str, replay: Replay) -> None:
        self._every, self._action, self._replay = every, action, replay

    @classmethod
    def of(cls, parts: HookContext) -> "AuditHook | None":
        keys, gate = AUDIT_KEYS.of(parts.config), part_of(parts.engine, NAME)
        if keys.audit is None or gate is None:
            return None
        return cls(keys.audit, keys.audit_action, Replay(parts.engine, gate))

    def run_step(self, trainer: Trainer, run: RunStep, batch: StepBatch, lr: float, look: Look) -> StepResult:
        if (trainer.at + 1) % self._every:
            return run(batch, lr, look)
        self._replay.run(batch, lr, trial=True, own=True)
        first = self._replay.fingerprint()
        self._replay.prepare(own=True)
        result = run(batch, lr, look)
        self._audit(trainer, trainer.at, first)
        return result

    def _audit(self, trainer: Trainer, step: int, first: Fingerprint) -> None:
        found = self._replay.different(trainer, first)
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
