"""An MLP's tensors by the names of transformers' models."""

from __future__ import annotations

from megatron.kinds.common.links import SAME, Form, Link, fused

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
