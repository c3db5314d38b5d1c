"""The tensors of shared transformers by the names of transformers' Zamba and Zamba2."""

from collections.abc import Sequence

from megatron.kinds.attention import hf as attention
from megatron.kinds.common.links import Link
from megatron.kinds.mlp import hf as mlp


def block(number: int, theirs: str, *, gate_up_joined: bool) -> tuple[Link, ...]:
    """A shared block. `theirs` is its module in the first layer that uses it, with which it is saved."""
    ours, feed = f"shared_attention.{number}", f"{theirs}.feed_forward"
    gate_up, down = mlp.gated(feed, f"{ours}.mlp")
    if gate_up_joined:
        gate_up = Link(f"{ours}.mlp.gate_up", f"{feed}.gate_up_proj")
    return (
        Link(f"{ours}.norm", f"{theirs}.input_layernorm"),
        *attention.separate(f"{theirs}.self_attn", f"{ours}.attention"),
        Link(f"{ours}.ffn_norm", f"{theirs}.pre_ff_layernorm"),
        gate_up,
        down,
    )


def output(layer: int) -> Link:
    """The matrix of a layer's own after its shared block."""
    return Link(f"layers.{layer}.shared_attention.output", f"model.layers.{layer}.linear")


def adapters(layer: int, number: int, theirs: str) -> tuple[Link, ...]:
    """Additions of a layer to the matrices of its shared block, module `theirs`, at place `number` of its lists."""
    ours = f"layers.{layer}.shared_attention"
    names: Sequence[tuple[str, str]] = (
        ("mlp", "feed_forward.gate_up_proj"),
        *((each, f"self_attn.linear_{each[0]}") for each in ("query", "key", "value")),
    )
    return tuple(
        Link(f"{ours}.{name}_adapter.{part}", f"{theirs}.{each}_adapter_list.{number}.{index}")
        for name, each in names
        for index, part in enumerate(("down", "up"))
    )
