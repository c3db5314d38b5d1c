"""The tensors of a cca layer by the names of transformers' ZAYA1."""

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Form, Link, fused, joined

OURS = "layers.{n}.cca"


def query_key(model: ModelSection) -> Form:
    """Our one tensor is their two: queries and keys."""
    own = model.cca
    return joined(own.heads * own.head_dim, own.kv_heads * own.head_dim)


def mixer(theirs: str) -> tuple[Link, ...]:
    """The mixer of module `theirs`."""
    projection = f"{theirs}.qkv_proj"
    return (
        Link(f"{OURS}.query_key", (f"{projection}.q_proj", f"{projection}.k_proj"), query_key),
        Link(f"{OURS}.value", (f"{projection}.v_proj_current", f"{projection}.v_proj_delayed"), fused()),
        Link(f"{OURS}.depthwise", f"{projection}.conv_qk_depthwise"),
        Link(f"{OURS}.grouped", f"{projection}.conv_qk_grouped"),
        Link(f"{OURS}.temperature", f"{theirs}.qk_norm.temp", suffixes=("",)),
        Link(f"{OURS}.output", f"{theirs}.o_proj"),
    )
