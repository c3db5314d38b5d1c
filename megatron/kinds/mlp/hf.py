"""An MLP's tensors by the names of transformers' models."""

from megatron.config.problems import UserError
from megatron.kinds.common.links import SAME, Form, Link, Tensors, fused

OURS = "layers.{n}.mlp"


def gated(theirs: str, ours: str = OURS) -> tuple[Link, Link]:
    """Gate, up and down in three matrices of module `theirs`, as in Llama."""
    return (
        Link(f"{ours}.gate_up", (f"{theirs}.gate_proj", f"{theirs}.up_proj"), fused()),
        Link(f"{ours}.down", f"{theirs}.down_proj"),
    )


def gate_up_joined(theirs: str) -> tuple[Link, Link]:
    """Gate and up in one matrix of module `theirs`."""
    return Link(f"{OURS}.gate_up", f"{theirs}.gate_up_proj"), Link(f"{OURS}.down", f"{theirs}.down_proj")


def plain(up: str, down: str, form: Form = SAME) -> tuple[Link, Link]:
    """Without a gate. The arguments are the two matrices."""
    return Link(f"{OURS}.up", up, form), Link(f"{OURS}.down", down, form)


def trained_curve(theirs: str) -> tuple[Link, Link]:
    """The numbers of xIELU in module `theirs`. Its files have two constants too, and transformers reads them."""

    def from_hf(tensors: Tensors) -> Tensors:
        if not tensors[1].is_meta and tensors[1] != 0.5:
            raise UserError(f"{theirs}.beta must be 0.5, which the layer computes, and it is {tensors[1].item()}")
        return tensors[:1]

    def to_hf(tensors: Tensors) -> Tensors:
        return [tensors[0], *(tensors[0].new_full((), constant) for constant in (0.5, -1e-6))]

    files = tuple(f"{theirs}.{each}" for each in ("alpha_n", "beta", "eps"))
    return (
        Link(f"{OURS}.alpha_p", f"{theirs}.alpha_p", suffixes=("",)),
        Link(f"{OURS}.alpha_n", files, Form(to_hf, from_hf), suffixes=("",)),
    )
