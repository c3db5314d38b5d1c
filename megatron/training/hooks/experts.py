"""Reports experts of a mixture that get no tokens: the loss may fall while most of a model's parameters do nothing."""

from collections.abc import Mapping
from typing import Any

from megatron.config.arithmetic.batches import batches_of

from ..exchange import StepReport
from ..hook import Hook, HookContext
from ..trainer import Trainer

IDLE = 0.01  # of an even share of the tokens
FEWEST = 20  # least tokens of an even share: below, an expert may have none by chance
PATIENCE = 3  # records in a row


class DeadExpertsHook(Hook):
    """Logs when experts have had less than a hundredth of an even share in three records, and when they have tokens
    again."""

    def __init__(self, every: int, tokens: int) -> None:
        self._every, self._tokens = every, tokens
        self._idle: dict[tuple[str, int], int] = {}  # (layer, expert) -> records in a row
        self._told: set[tuple[str, int]] = set()

    @classmethod
    def of(cls, parts: HookContext) -> "DeadExpertsHook":
        training = parts.config.training
        return cls(parts.config.logging.every, min(batches_of(parts.config).sizes) * training.sequence_length)

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        if report.step % self._every:
            return
        layers: object = report.result.extras.get("moe")
        text = self.look(layers if isinstance(layers, Mapping) else {})
        if text is not None:
            trainer.log(f"step {report.step}: {text}")

    def look(self, layers: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Message about one record, if any: layer -> numbers, `load` among them (see `ExpertLoad`)."""
        total, dead = 0, set()
        for layer, numbers in layers.items():
            load = numbers["load"]
            total += len(load)
            for expert, share in enumerate(load):
                idle = share * len(load) < IDLE and self._tokens / len(load) >= FEWEST
                self._idle[layer, expert] = self._idle.get((layer, expert), 0) + 1 if idle else 0
                if self._idle[layer, expert] >= PATIENCE:
                    dead.add((layer, expert))
        if dead <= self._told and (dead or not self._told):
            return None
        self._told = dead
        if not dead:
            return f"all {total} experts have tokens again"
        where = ", ".join(
            f"{sum(layer == own for own, _ in dead)} of layer {layer}"
            for layer in layers
            if any(layer == own for own, _ in dead)
        )
        return (
            f"warning: {len(dead)} of {total} experts get almost no tokens ({where}) and learn nothing. Even their "
            "load with a larger model.moe.losses.balance or model.moe.router.correction: sign (docs/experts.md)"
        )
