"""Attention's tensors by the names of transformers' models.

Shapes: n heads, D head_dim, H inputs."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import SAME, Form, Link, fused, one, stacked
from megatron.model.rotary import rotated_channels

OURS = "layers.{n}.attention"
_KEY_VALUE = fused()


def query_key_value(model: ModelSection) -> Form:
    """Our query [nD, H] and key_value [2kD, H] are their one tensor: all queries, all keys, all values."""
    own = model.attention
    return stacked(own.heads * own.head_dim, 2 * own.kv_heads * own.head_dim)


def query_key_value_by_head(model: ModelSection) -> Form:
    """The same, but their rows are ordered [n, 3, D]: query, key and value of the first head, then of the next."""
    heads, head_dim = model.attention.heads, model.attention.head_dim

    def to_hf(ours: list[Tensor]) -> list[Tensor]:
        return [torch.cat(ours).unflatten(0, (3, heads, head_dim)).transpose(0, 1).flatten(0, 2)]

    def from_hf(theirs: list[Tensor]) -> list[Tensor]:
        parts = theirs[0].unflatten(0, (heads, 3, head_dim)).transpose(0, 1)
        return [parts[0].flatten(0, 1), parts[1:].flatten(0, 2)]

    return Form(to_hf, from_hf)


def query_gate_by_head(model: ModelSection) -> Form:
    """Our query [nD, H] and gate [nD, H] are their one matrix: query and gate of the first head, then of the next."""
    heads = model.attention.heads

    def to_hf(ours: list[Tensor]) -> list[Tensor]:
        return [torch.cat([each.unflatten(0, (heads, -1)) for each in ours], 1).flatten(0, 1)]

    return Form(to_hf, lambda theirs: [each.flatten(0, 1) for each in theirs[0].unflatten(0, (heads, -1)).chunk(2, 1)])


def neighbours(turned: Tensor) -> Tensor:
    """Channels [heads, D], where i and i + D/2 turn together, in the order 0, D/2, 1, D/2 + 1, ..."""
    return turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def halves(turned: Tensor) -> Tensor:
    """The reverse of `neighbours`."""
    return turned.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def pairs(model: ModelSection) -> Form:
    """Queries whose turned channels are neighbours there (0 with 1, 2 with 3, ...), and half a turn apart here."""
    own = model.attention
    turned = rotated_channels(own.rotary, own.head_dim)

    def moved(tensor: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
        first, kept = tensor.unflatten(0, (-1, own.head_dim)).split([turned, own.head_dim - turned], 1)
        return torch.cat([move(first), kept], 1).flatten(0, 1)

    return one(lambda ours: moved(ours, neighbours), lambda theirs: moved(theirs, halves))


def pairs_and_values(model: ModelSection) -> Form:
    """The same of keys. Our tensor has the values below the keys, which are two tensors of theirs."""
    keys = pairs(model)

    def to_hf(ours: list[Tensor]) -> list[Tensor]:
        first, *rest = ours[0].chunk(2)
        return [*keys.to_hf([first]), *rest]

    return Form(to_hf, lambda theirs: [torch.cat([*keys.from_hf(theirs[:1]), *theirs[1:]])])


def separate(
    theirs: str,
    ours: str = OURS,
    query: Form | Callable[[ModelSection], Form] = SAME,
    key_value: Form | Callable[[ModelSection], Form] = _KEY_VALUE,
) -> tuple[Link, Link, Link]:
    """Queries, keys and values in three matrices of module `theirs`, as in Llama."""
    return (
        Link(f"{ours}.query", f"{theirs}.q_proj", query),
        Link(f"{ours}.key_value", (f"{theirs}.k_proj", f"{theirs}.v_proj"), key_value),
        Link(f"{ours}.output", f"{theirs}.o_proj"),
    )


def joined(
    theirs: str, output: str, form: Form | Callable[[ModelSection], Form] = query_key_value, output_form: Form = SAME
) -> tuple[Link, Link]:
    """Queries, keys and values in the one matrix `theirs`."""
    return (Link((f"{OURS}.query", f"{OURS}.key_value"), theirs, form), Link(f"{OURS}.output", output, output_form))


def norms(theirs: str) -> tuple[Link, Link]:
    """Norms of queries and keys."""
    return (Link(f"{OURS}.query_norm", f"{theirs}.q_norm"), Link(f"{OURS}.key_norm", f"{theirs}.k_norm"))
