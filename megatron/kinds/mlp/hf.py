"""An MLP's tensors by the names of transformers' models."""

from __future__ import annotations

from megatron.kinds.common.links import SAME, Form, Fused, Link

OURS = "layers.{n}.mlp"


def gated(theirs: str, ours: str = OURS) -> tuple[Link, Link]:
    """Gate, up and down in matrices of their own, as in Llama; `theirs` is the module."""
    return (
        Link(f"{ours}.gate_up", (f"{theirs}.gate_proj", f"{theirs}.up_proj"), Fused()),
        Link(f"{ours}.down", f"{theirs}.down_proj"),
    )


def gate_up_joined(theirs: str) -> tuple[Link, Link]:
    """Gate and up in one matrix; `theirs` is the module."""
    return Link(f"{OURS}.gate_up", f"{theirs}.gate_up_proj"), Link(f"{OURS}.down", f"{theirs}.down_proj")


def plain(up: str, down: str, form: Form = SAME) -> tuple[Link, Link]:
    """Without a gate; the arguments are the two matrices."""
    return Link(f"{OURS}.up", up, form), Link(f"{OURS}.down", down, form)
