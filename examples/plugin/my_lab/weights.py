"""A hook that writes the size of chosen parameters to the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch.distributed as dist

from megatron.checkpoint.format.fragment import MASTER
from megatron.config.problems import UserError
from megatron.training.exchange import StepReport
from megatron.training.hook import Hook
from megatron.training.trainer import Trainer


class Weights(Hook):
    """Writes {"step": n, "weights": {name: {"largest": ..., "norm": ...}}} after n updates, of the fp32 masters.

    The largest absolute value and the Euclidean norm belong to the whole tensor, however ranks share it.

    Args:
        parameters: patterns of logical names, as in a shell, `*` for all.
        every: steps between records. There is one after the last step too.
    """

    def __init__(self, parameters: Sequence[str], every: int = 1) -> None:
        if isinstance(parameters, str) or not parameters:
            raise UserError("hooks: options.parameters of Weights must be a list of patterns, such as ['*norm*']")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UserError(f"hooks: options.every of Weights must be a whole number above 0, not {every!r}")
        self.parameters, self.every = parameters, every

    def on_start(self, trainer: Trainer) -> None:
        if not self.sizes(trainer):
            raise UserError(f"hooks: a parameter's name must match one of {', '.join(self.parameters)}: none does")

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        if trainer.completed % self.every and not trainer.last:
            return
        with trainer.clock.pause():  # not part of the time of a step
            sizes = self.sizes(trainer)
        if trainer.is_main:
            trainer.sinks.write({"step": trainer.completed, "weights": sizes})

    def sizes(self, trainer: Trainer) -> dict[str, dict[str, float]]:
        """Largest value and norm by logical name, the same on all ranks, which all call this."""
        own: dict[str, tuple[float, float]] = {}
        for fragment in trainer.engine.state.fragments():  # each element is in the fragments of one rank only
            name = fragment.tensor.name
            if fragment.state == MASTER and fragment.data.numel() and self._chosen(name):
                largest, squares = own.get(name, (0.0, 0.0))
                values = fragment.data.detach()
                own[name] = max(largest, values.abs().max().item()), squares + values.double().square().sum().item()
        ranks = [own]
        if trainer.mesh.layout.world_size > 1:
            ranks = [{} for _ in range(trainer.mesh.layout.world_size)]
            dist.all_gather_object(ranks, own)  # by name: pipeline stages have different parameters
        found: dict[str, dict[str, float]] = {}
        for name in sorted({name for each in ranks for name in each}):
            parts = [each[name] for each in ranks if name in each]
            norm = sum(squares for _, squares in parts) ** 0.5
            found[name] = {"largest": max(largest for largest, _ in parts), "norm": norm}
        return found

    def _chosen(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.parameters)
