"""Attention's tensors by the names of transformers' models.

Shapes: n heads, D head_dim, H inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import SAME, Form, Fused, Link, StackedRows
from megatron.model.rotary import rotated_channels

OURS = "layers.{n}.attention"
_FUSED = Fused()


def query_key_value(model: ModelSection) -> StackedRows:
    """Our query [nD, H] and key_value [2kD, H] are their one tensor: all queries, all keys, all values."""
    own = model.attention
    return StackedRows((own.heads * own.head_dim, 2 * own.kv_heads * own.head_dim))


@dataclass(frozen=True)
class FusedByHead:
    """The same, but their rows are ordered [n, 3, D]: query, key and value of the first head, then of the next."""

    heads: int
    head_dim: int

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        parts = torch.cat(ours).unflatten(0, (3, self.heads, self.head_dim))
        return [parts.transpose(0, 1).flatten(0, 2)]

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        parts = theirs[0].unflatten(0, (self.heads, 3, self.head_dim)).transpose(0, 1)
        return [parts[0].flatten(0, 1), parts[1:].flatten(0, 2)]


def query_key_value_by_head(model: ModelSection) -> FusedByHead:
    return FusedByHead(model.attention.heads, model.attention.head_dim)


@dataclass(frozen=True)
class Pairs:
    """Queries or keys whose turned channels are neighbours there (0 with 1, 2 with 3, ...), and half a turn apart here.

    Args:
        head_dim: channels of a head; `turned` of them are rotated.
        values: whether our tensor has the values below the keys, which are two tensors of theirs.
    """

    head_dim: int
    turned: int
    values: bool = False

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        first, *rest = ours[0].chunk(2) if self.values else ours
        return [self._moved(first, lambda turned: turned.unflatten(1, (2, -1)).transpose(1, 2)), *rest]

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        first, *rest = theirs
        moved = self._moved(first, lambda turned: turned.unflatten(1, (-1, 2)).transpose(1, 2))
        return [torch.cat([moved, *rest]) if rest else moved]

    def _moved(self, tensor: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
        heads = tensor.unflatten(0, (-1, self.head_dim))
        turned, kept = heads.split([self.turned, self.head_dim - self.turned], 1)
        return torch.cat([move(turned).flatten(1, 2), kept], 1).flatten(0, 1)


def pairs(model: ModelSection) -> Pairs:
    """The form of queries whose turned channels are neighbours."""
    own = model.attention
    return Pairs(own.head_dim, rotated_channels(own.rotary, own.head_dim))


def pairs_and_values(model: ModelSection) -> Pairs:
    """The same of keys, which stand above the values here."""
    own = model.attention
    return Pairs(own.head_dim, rotated_channels(own.rotary, own.head_dim), values=True)


def separate(
    theirs: str,
    ours: str = OURS,
    query: Form | Callable[[ModelSection], Form] = SAME,
    key_value: Form | Callable[[ModelSection], Form] = _FUSED,
) -> tuple[Link, Link, Link]:
    """Queries, keys and values in matrices of their own, as in Llama; `theirs` is the module."""
    return (
        Link(f"{ours}.query", f"{theirs}.q_proj", query),
        Link(f"{ours}.key_value", (f"{theirs}.k_proj", f"{theirs}.v_proj"), key_value),
        Link(f"{ours}.output", f"{theirs}.o_proj"),
    )


def joined(
    theirs: str, output: str, form: Form | Callable[[ModelSection], Form] = query_key_value, output_form: Form = SAME
) -> tuple[Link, Link]:
    """Queries, keys and values in one matrix; `theirs` and `output` are the two matrices."""
    return (Link((f"{OURS}.query", f"{OURS}.key_value"), theirs, form), Link(f"{OURS}.output", output, output_form))


def norms(theirs: str) -> tuple[Link, Link]:
    """Norms of queries and keys."""
    return (Link(f"{OURS}.query_norm", f"{theirs}.q_norm"), Link(f"{OURS}.key_norm", f"{theirs}.k_norm"))
