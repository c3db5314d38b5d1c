"""The tensors of routers and experts by the names of transformers' models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Fused, Link

OURS = "layers.{n}.moe"


@dataclass(frozen=True)
class Stacked:
    """Our one tensor [experts, rows, columns] is theirs, one or several (gate and up) for each expert in turn."""

    parts: int = 1

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        return [part for expert in ours[0] for part in expert.chunk(self.parts)]

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        experts = [torch.cat(theirs[at : at + self.parts]) for at in range(0, len(theirs), self.parts)]
        return [torch.stack(experts)]


def _experts(model: ModelSection) -> int:
    return model.moe.experts


def experts(theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Link, ...]:
    """Gated experts as modules of their own; `theirs` is the list of them."""
    parts = tuple(f"{theirs}.{{e}}.{each}" for each in (gate, up))
    return (
        Link(f"{OURS}.experts.gate_up", parts, Stacked(2), experts=_experts),
        Link(f"{OURS}.experts.down", f"{theirs}.{{e}}.{down}", Stacked(), experts=_experts),
    )


def experts_as_one(theirs: str) -> tuple[Link, ...]:
    """Gated experts as two tensors, as here; `theirs` is their module."""
    names = {"gate_up": "gate_up_proj", "down": "down_proj"}
    return tuple(
        Link(f"{OURS}.experts.{name}.weight", f"{theirs}.{each}", suffixes=("",)) for name, each in names.items()
    )


def shared(theirs: str, gate: str) -> tuple[Link, ...]:
    """A shared expert and its gate."""
    return (
        Link(f"{OURS}.shared.gate_up", (f"{theirs}.gate_proj", f"{theirs}.up_proj"), Fused()),
        Link(f"{OURS}.shared.down", f"{theirs}.down_proj"),
        Link(f"{OURS}.shared.gate", gate),
    )


def network_router(theirs: str) -> tuple[Link, ...]:
    """ZAYA1's router, a network that reads the state of the router before it; `theirs` is its module."""
    ours = f"{OURS}.router"
    return (
        Link(f"{ours}.down", f"{theirs}.down_proj"),
        Link(f"{ours}.state_scale", f"{theirs}.router_states_scale", suffixes=("",)),
        *(Link(f"{ours}.{each}", f"{theirs}.router_mlp.{each}") for each in ("norm", "fc1", "fc2")),
        Link(f"{ours}.out", f"{theirs}.router_mlp.out_proj"),
        Link(f"{ours}.correction", f"{theirs}.balancing_biases", suffixes=("",)),
    )
