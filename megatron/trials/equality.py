"""Whether two runs have ended in the same state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.read.compare import compare_tensors
from megatron.checkpoint.read.reader import open_checkpoint


@dataclass(frozen=True)
class Equality:
    """What a comparison has found.

    Attributes:
        tensors: how many states of tensors were compared.
        different: names of those that are not equal to the last bit.
        losses: how many losses were compared.
        loss: the largest relative difference of a loss.
        weight: the largest relative difference (of norms) of a tensor's master weights.
    """

    tensors: int
    different: tuple[str, ...]
    losses: int
    loss: float
    weight: float

    @property
    def bitwise(self) -> bool:
        return not self.different and self.loss == 0.0


def compare(a: Path, b: Path, losses_a: Mapping[int, float], losses_b: Mapping[int, float]) -> Equality:
    """Two checkpoints, and the losses of the steps that both runs have."""
    found = list(compare_tensors(open_checkpoint(a, verify="checksums"), open_checkpoint(b, verify="checksums")))
    steps = losses_a.keys() & losses_b.keys()
    gaps = [abs(losses_a[step] - losses_b[step]) / max(abs(losses_a[step]), 1e-12) for step in steps]
    masters = [each.relative for each in found if each.state == "master"]
    names = tuple(f"{each.tensor} ({each.state})" for each in found if not each.equal)
    return Equality(len(found), names, len(steps), max(gaps, default=0.0), max(masters, default=0.0))
