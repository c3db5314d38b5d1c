"""A lightning layer's tensors by the names of transformers' models."""

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Form, Link, one

OURS = "layers.{n}.lightning"


def by_head(model: ModelSection) -> Form:
    """Our rows are all queries, all keys, all values. Theirs are query, key and value of one head after the other."""
    heads = model.lightning.heads
    return one(
        lambda ours: ours.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2),
        lambda theirs: theirs.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2),
    )


def mixer(theirs: str) -> tuple[Link, ...]:
    """The mixer of MiniMax-01."""
    names = {"gate": "output_gate", "norm": "norm", "output": "out_proj"}
    return (
        Link(f"{OURS}.query_key_value", f"{theirs}.qkv_proj", by_head),
        *(Link(f"{OURS}.{own}", f"{theirs}.{name}") for own, name in names.items()),
    )
