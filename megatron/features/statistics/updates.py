"""Norms of an update by layer: the weights after it, the gradient, and the change.

They are taken around the `step` of the torch optimizer, from the ranges of logical tensors that a rank owns there.
DeepSpeed calls it once, or once per parameter group (ZeRO 1 to 3). An element on several ranks is counted by the rank
that saves it, so the sums over all ranks equal one process's.

If an optimizer evaluates other weights than it trains (schedule-free), weights and update are of the evaluated and
saved ones. The gradient is that at the trained ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.engine.state import EngineState, Owned

WEIGHT, GRADIENT, UPDATE = "weight", "gradient", "update"
KINDS = (WEIGHT, GRADIENT, UPDATE)


def layer_of(name: str) -> str:
    """The layer of a logical tensor: `layers.3`, or the first word (`embedding`, `head`)."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "layers" else words[0]


class UpdateStatistics:
    """Squares of an update's norms, of this rank's elements.

    Args:
        optimizer: the torch optimizer that DeepSpeed steps.

    Attributes:
        layers: of this rank's tensors, in their order.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, state: EngineState) -> None:
        self._state = state
        self.layers = list(dict.fromkeys(layer_of(owned.tensor.name) for owned in state.owned()))
        self._own: dict[int, list[Owned]] | None = None
        self._before: list[Tensor] = []
        self._squares: dict[tuple[str, str], Tensor] = {}
        optimizer.register_step_pre_hook(self._pre)
        optimizer.register_step_post_hook(self._post)

    def begin(self) -> None:
        self._squares = {}
        self._own = {}
        for owned in self._state.owned():
            if not owned.replica:
                self._own.setdefault(id(owned.flat), []).append(owned)

    def finish(self) -> dict[tuple[str, str], Tensor]:
        """The squares by (layer, kind), float64 0-d. The gradient is that after clipping."""
        self._own, self._before = None, []
        return self._squares

    @torch.no_grad()
    def _pre(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._own is None:
            return
        for group, flat in _flats(optimizer):
            for owned in self._own.get(id(flat), ()):
                self._add(owned, GRADIENT, owned.view(flat.grad) if flat.grad is not None else None)
            evaluated = _evaluated(optimizer, group, flat)
            self._before.append(flat.detach().clone() if evaluated is None else evaluated)

    @torch.no_grad()
    def _post(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._own is None:
            return
        for (group, flat), before in zip(_flats(optimizer), self._before, strict=True):
            evaluated = _evaluated(optimizer, group, flat)
            after = flat if evaluated is None else evaluated
            for owned in self._own.get(id(flat), ()):
                self._add(owned, WEIGHT, owned.view(after))
                self._add(owned, UPDATE, owned.view(after) - owned.view(before))
        self._before = []

    def _add(self, owned: Owned, kind: str, values: Tensor | None) -> None:
        if values is not None:
            at = layer_of(owned.tensor.name), kind
            square = torch.linalg.vector_norm(values, dtype=torch.float64).square()
            self._squares[at] = self._squares[at] + square if at in self._squares else square


def _flats(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Mapping[str, Any], Tensor]]:
    for group in optimizer.param_groups:
        for flat in group["params"]:
            yield group, flat


def _evaluated(optimizer: Any, group: Mapping[str, Any], flat: Tensor) -> Tensor | None:
    """The evaluation weights, if they differ from the trained ones: not before the first step."""
    if not hasattr(optimizer, "evaluation_weights") or not optimizer.state.get(flat):
        return None
    return optimizer.evaluation_weights(group, flat, optimizer.state[flat])
