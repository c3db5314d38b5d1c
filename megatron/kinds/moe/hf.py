"""The tensors of routers and experts by the names of transformers' models."""

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Form, Link, fused, one

OURS = "layers.{n}.moe"


def per_expert(parts: int = 1) -> Form:
    """Our one tensor [experts, rows, columns] is theirs, one or several (gate and up) for each expert in turn."""

    def from_hf(theirs: list[Tensor]) -> list[Tensor]:
        return [torch.stack([torch.cat(theirs[at : at + parts]) for at in range(0, len(theirs), parts)])]

    return Form(lambda ours: [part for expert in ours[0] for part in expert.chunk(parts)], from_hf)


def _experts(model: ModelSection) -> int:
    return model.moe.experts


def experts(theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Link, ...]:
    """Gated experts, each a module of the list `theirs`."""
    parts = tuple(f"{theirs}.{{e}}.{each}" for each in (gate, up))
    return (
        Link(f"{OURS}.experts.gate_up", parts, per_expert(2), experts=_experts),
        Link(f"{OURS}.experts.down", f"{theirs}.{{e}}.{down}", per_expert(), experts=_experts),
    )


def plain_experts(theirs: str) -> tuple[Link, ...]:
    """Experts without gates, each a module of the list `theirs`."""
    return tuple(
        Link(f"{OURS}.experts.{name}", f"{theirs}.{{e}}.{name}_proj", per_expert(), experts=_experts)
        for name in ("up", "down")
    )


def experts_as_one(theirs: str) -> tuple[Link, ...]:
    """Gated experts as two tensors of module `theirs`, as here."""
    names = {"gate_up": "gate_up_proj", "down": "down_proj"}
    return tuple(Link(f"{OURS}.experts.{name}.weight", f"{theirs}.{x}", suffixes=("",)) for name, x in names.items())


def _transposed(interleaved: bool) -> Form:
    """Their matrices are [experts, inputs, outputs], with biases [experts, outputs].

    Interleaved outputs are a number of gate, one of up, and so on. Ours are all of gate, then all of up."""

    def turned(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if tensor.dim() == 3 else tensor

    if not interleaved:
        return one(turned, turned)
    return one(
        lambda ours: turned(ours).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2),
        lambda theirs: turned(theirs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)),
    )


def experts_turned(theirs: str) -> tuple[Link, ...]:
    """GPT-OSS's experts, two tensors of module `theirs` with biases."""
    return tuple(
        Link(f"{OURS}.experts.{ours}.{part}", f"{theirs}.{name}{ending}", _transposed(interleaved), suffixes=("",))
        for ours, name, interleaved in (("gate_up", "gate_up_proj", True), ("down", "down_proj", False))
        for part, ending in (("weight", ""), ("bias", "_bias"))
    )


def shared(theirs: str, gate: str) -> tuple[Link, ...]:
    """A shared expert and its gate."""
    return (*shared_alone(theirs), Link(f"{OURS}.shared.gate", gate))


def shared_alone(
    theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Link, ...]:
    """A shared expert without a gate on its output."""
    return (
        Link(f"{OURS}.shared.gate_up", (f"{theirs}.{gate}", f"{theirs}.{up}"), fused()),
        Link(f"{OURS}.shared.down", f"{theirs}.{down}"),
    )


def table(theirs: str) -> Link:
    """Experts of each token id, whole numbers there."""

    def form(model: ModelSection) -> Form:
        def from_hf(tensors: list[Tensor]) -> list[Tensor]:
            low, high = (int(each) for each in tensors[0].aminmax())
            if not 0 <= low <= high < model.moe.experts:
                raise ValueError(f"numbers of experts must be from 0 to {model.moe.experts - 1}, not {low} to {high}")
            return [tensors[0].to(torch.float32)]

        return Form(lambda ours: [ours[0].long()], from_hf, whole=True)

    return Link(f"{OURS}.router.table", theirs, form, suffixes=("",))


def network_router(theirs: str) -> tuple[Link, ...]:
    """ZAYA1's router of module `theirs`, a network that reads the state of the router before it."""
    ours = f"{OURS}.router"
    return (
        Link(f"{ours}.down", f"{theirs}.down_proj"),
        Link(f"{ours}.state_scale", f"{theirs}.router_states_scale", suffixes=("",)),
        *(Link(f"{ours}.{each}", f"{theirs}.router_mlp.{each}") for each in ("norm", "fc1", "fc2")),
        Link(f"{ours}.out", f"{theirs}.router_mlp.out_proj"),
        Link(f"{ours}.correction", f"{theirs}.balancing_biases", suffixes=("",)),
    )
