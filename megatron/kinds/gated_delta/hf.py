"""A gated delta layer's tensors by the names of transformers' models."""

from __future__ import annotations

import torch

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Form, Link, fused, tensors


def convolutions(model: ModelSection) -> Form:
    """Our two convolutions, of queries and keys and of values, are their three.

    transformers cuts the tensor that it saves into three equal parts, for all widths, and joins them when it loads. The
    parts are therefore joined first.
    """
    own = model.gated_delta
    rows = [2 * own.key_heads * own.key_dim, own.heads * own.value_dim]
    return Form(lambda ours: [*ours[0].chunk(2), ours[1]], lambda theirs: list(torch.cat(theirs).split(rows)), True)


def mixer(ours: str, theirs: str) -> tuple[Link, ...]:
    """The mixer of OLMo Hybrid. The arguments are the two modules."""
    pairs = {"query_key": "qk", "value_gate": "vg", "decay_beta": "ab"}
    return (
        *(
            Link(f"{ours}.{name}", tuple(f"{theirs}.{each}_proj" for each in both), fused())
            for name, both in pairs.items()
        ),
        *tensors(ours, theirs, "A_log", "dt_bias"),
        Link(
            (f"{ours}.query_key_conv", f"{ours}.value_conv"),
            tuple(f"{theirs}.{each}_conv1d" for each in "qkv"),
            convolutions,
        ),
        Link(f"{ours}.norm", f"{theirs}.o_norm"),
        Link(f"{ours}.output", f"{theirs}.o_proj"),
    )
