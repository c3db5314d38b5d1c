"""A gated delta layer's tensors by the names of transformers' models."""

import torch

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Form, Link, Tensors, fused, one, stacked, tensors

OURS = "layers.{n}.gated_delta"


def convolutions(model: ModelSection) -> Form:
    """Our two convolutions, of queries and keys and of values, are their three.

    transformers cuts the tensor that it saves into three equal parts, for all widths, and joins them when it loads. The
    parts are therefore joined first."""
    keys, values = _widths(model)
    rows = [2 * keys, values]
    return Form(lambda ours: [*ours[0].chunk(2), ours[1]], lambda theirs: list(torch.cat(theirs).split(rows)), True)


def mixer(ours: str, theirs: str) -> tuple[Link, ...]:
    """The mixer of OLMo Hybrid. The arguments are the two modules."""
    pairs = {"query_key": "qk", "value_gate": "vg", "decay_beta": "ab"}
    return (
        *(Link(f"{ours}.{name}", tuple(f"{theirs}.{x}_proj" for x in both), fused()) for name, both in pairs.items()),
        *tensors(ours, theirs, "A_log", "dt_bias"),
        Link(
            (f"{ours}.query_key_conv", f"{ours}.value_conv"), tuple(f"{theirs}.{x}_conv1d" for x in "qkv"), convolutions
        ),
        Link(f"{ours}.norm", f"{theirs}.o_norm"),
        Link(f"{ours}.output", f"{theirs}.o_proj"),
    )


def _widths(model: ModelSection) -> tuple[int, int]:
    """Channels of all queries, which keys have too, and of all values."""
    own = model.gated_delta
    return own.key_heads * own.key_dim, own.heads * own.value_dim


def _by_key_head(model: ModelSection, rows: list[int]) -> Form:
    """Our tensors, each of two parts, are their one: of each head of keys the first parts' rows, then the second's.

    Args:
        rows: of each part, in the order of ours.
    """
    heads = model.gated_delta.key_heads

    def to_hf(ours: Tensors) -> Tensors:
        parts = [part.unflatten(0, (heads, -1)) for each in ours for part in each.chunk(2)]
        return [torch.cat(parts, 1).flatten(0, 1)]

    def from_hf(theirs: Tensors) -> Tensors:
        parts = theirs[0].unflatten(0, (heads, -1)).split([each // heads for each in rows], 1)
        whole = [each.flatten(0, 1) for each in parts]
        return [torch.cat(whole[at : at + 2]) for at in range(0, len(whole), 2)]

    return Form(to_hf, from_hf)


def _query_key_value_gate(model: ModelSection) -> Form:
    keys, values = _widths(model)
    return _by_key_head(model, [keys, keys, values, values])


def _beta_decay(model: ModelSection) -> Form:
    """Ours has decays first."""
    heads = model.gated_delta.heads
    by_head = _by_key_head(model, [heads, heads])

    def turned(tensors: Tensors) -> Tensors:
        return [torch.cat(tensors[0].chunk(2)[::-1])]

    return Form(lambda ours: by_head.to_hf(turned(ours)), lambda theirs: turned(by_head.from_hf(theirs)))


def _query_key_value(model: ModelSection) -> Form:
    """Theirs are queries, keys and values in one, and the gate."""
    keys, values = _widths(model)

    def to_hf(ours: Tensors) -> Tensors:
        value, gate = ours[1].chunk(2)
        return [torch.cat([ours[0], value]), gate]

    def from_hf(theirs: Tensors) -> Tensors:
        query_key, value = theirs[0].split([2 * keys, values])
        return [query_key, torch.cat([value, theirs[1]])]

    return Form(to_hf, from_hf)


def qwen(theirs: str, *, joined: bool) -> tuple[Link, ...]:
    """The mixer of Qwen3-Next, whose projections are joined by heads of keys, and of Qwen3.5."""
    wide, narrow = (f"{OURS}.query_key", f"{OURS}.value_gate"), f"{OURS}.decay_beta"
    if joined:
        projections = (
            Link(wide, f"{theirs}.in_proj_qkvz", _query_key_value_gate),
            Link(narrow, f"{theirs}.in_proj_ba", _beta_decay),
        )
    else:
        projections = (
            Link(wide, (f"{theirs}.in_proj_qkv", f"{theirs}.in_proj_z"), _query_key_value),
            Link(narrow, (f"{theirs}.in_proj_a", f"{theirs}.in_proj_b"), fused()),
        )
    return (
        *projections,
        Link(
            (f"{OURS}.query_key_conv", f"{OURS}.value_conv"),
            f"{theirs}.conv1d",
            lambda model: stacked(2 * _widths(model)[0], _widths(model)[1]),
        ),
        *tensors(OURS, theirs, "A_log", "dt_bias"),
        Link(f"{OURS}.norm", f"{theirs}.norm"),
        Link(f"{OURS}.output", f"{theirs}.out_proj"),
    )


def kimi(theirs: str) -> tuple[Link, ...]:
    """Kimi delta attention."""
    rates = one(lambda ours: ours.view(1, 1, -1, 1), lambda theirs: theirs.flatten())
    return (
        Link(f"{OURS}.query_key", (f"{theirs}.q_proj", f"{theirs}.k_proj"), fused()),
        Link(f"{OURS}.down", (f"{theirs}.f_a_proj", f"{theirs}.g_a_proj"), fused()),
        *(
            Link(f"{OURS}.{ours}", f"{theirs}.{name}_proj")
            for ours, name in {"value": "v", "beta": "b", "decay": "f_b", "gate": "g_b", "output": "o"}.items()
        ),
        Link(
            (f"{OURS}.query_key_conv", f"{OURS}.value_conv"), tuple(f"{theirs}.{x}_conv1d" for x in "qkv"), convolutions
        ),
        Link(f"{OURS}.A_log", f"{theirs}.A_log", rates, suffixes=("",)),
        *tensors(OURS, theirs, "dt_bias"),
        Link(f"{OURS}.norm", f"{theirs}.o_norm"),
    )
