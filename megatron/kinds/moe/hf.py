"""The tensors of routers and experts by the names of transformers' models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Fused, Link

OURS = "layers.{n}.moe"


@dataclass(frozen=True)
class PerExpert:
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
        Link(f"{OURS}.experts.gate_up", parts, PerExpert(2), experts=_experts),
        Link(f"{OURS}.experts.down", f"{theirs}.{{e}}.{down}", PerExpert(), experts=_experts),
    )


def plain_experts(theirs: str) -> tuple[Link, ...]:
    """Experts without gates as modules of their own; `theirs` is the list of them."""
    return tuple(
        Link(f"{OURS}.experts.{name}", f"{theirs}.{{e}}.{name}_proj", PerExpert(), experts=_experts)
        for name in ("up", "down")
    )


def experts_as_one(theirs: str) -> tuple[Link, ...]:
    """Gated experts as two tensors, as here; `theirs` is their module."""
    names = {"gate_up": "gate_up_proj", "down": "down_proj"}
    return tuple(
        Link(f"{OURS}.experts.{name}.weight", f"{theirs}.{each}", suffixes=("",)) for name, each in names.items()
    )


@dataclass(frozen=True)
class TransposedExperts:
    """Their matrices are [experts, inputs, outputs], with biases [experts, outputs]; with `interleaved` outputs are a
    number of gate, one of up, and so on, where ours are all of gate, then all of up.
    """

    interleaved: bool

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        found = ours[0].transpose(1, 2) if ours[0].dim() == 3 else ours[0]
        return [found.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if self.interleaved else found]

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        found = theirs[0]
        if self.interleaved:
            found = found.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return [found.transpose(1, 2) if found.dim() == 3 else found]


def experts_turned(theirs: str) -> tuple[Link, ...]:
    """GPT-OSS's experts, two tensors with biases; `theirs` is their module."""
    return tuple(
        Link(
            f"{OURS}.experts.{ours}.{part}", f"{theirs}.{name}{ending}", TransposedExperts(interleaved), suffixes=("",)
        )
        for ours, name, interleaved in (("gate_up", "gate_up_proj", True), ("down", "down_proj", False))
        for part, ending in (("weight", ""), ("bias", "_bias"))
    )


def shared(theirs: str, gate: str) -> tuple[Link, ...]:
    """A shared expert and its gate."""
    return (*shared_alone(theirs), Link(f"{OURS}.shared.gate", gate))


def shared_alone(theirs: str) -> tuple[Link, ...]:
    """A shared expert without a gate on its output."""
    return (
        Link(f"{OURS}.shared.gate_up", (f"{theirs}.gate_proj", f"{theirs}.up_proj"), Fused()),
        Link(f"{OURS}.shared.down", f"{theirs}.down_proj"),
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
