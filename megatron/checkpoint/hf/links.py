"""What stands for what: links between our logical tensors and those of a Hugging Face model, read in both directions.

A link names modules; it holds for their `weight` and for their `bias`, where they exist. Its form says how the
tensors of one side are made of those of the other; every form only moves elements, so both directions are exact.

Shapes: n heads, D head_dim, H inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dims:
    """What the forms need to know of a model: its attention heads, and the inner channels, B and C together, and heads
    of its Mamba-2 layers, its experts, the channels of queries and keys together, and of values, of its gated_delta
    layers, those of queries and of keys of its cca layers, the
    heads of its mamba layers, and the channels of an attention head that positions turn."""

    heads: int | None
    head_dim: int | None
    mamba2: tuple[int, int, int]
    experts: int = 0
    delta: tuple[int, int] = (0, 0)
    cca: tuple[int, int] = (0, 0)
    mamba_heads: int = 1
    rotated: int = 0


class Form(Protocol):
    """How the tensors of the two sides are made of each other."""

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]: ...

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]: ...


@dataclass(frozen=True)
class Same:
    """One tensor, as it is."""

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        return ours

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        return theirs


@dataclass(frozen=True)
class Fused:
    """Our one tensor is their equally large ones, one below the other (keys and values, gate and up)."""

    parts: int = 2

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        return list(ours[0].chunk(self.parts))

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        return [torch.cat(theirs)]


@dataclass(frozen=True)
class QueryKeyValue:
    """Our query [nD, H] and key_value [2nD, H] are their one tensor: all queries, all keys, all values."""

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        return [torch.cat(ours)]

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        rows = dims.heads * dims.head_dim
        return list(theirs[0].split([rows, theirs[0].shape[0] - rows]))


@dataclass(frozen=True)
class QueryKeyValueByHead:
    """The same, but their rows are ordered [n, 3, D]: query, key and value of the first head, then of the next."""

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        parts = torch.cat(ours).unflatten(0, (3, dims.heads, dims.head_dim))
        return [parts.transpose(0, 1).flatten(0, 2)]

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        parts = theirs[0].unflatten(0, (dims.heads, 3, dims.head_dim)).transpose(0, 1)
        return [parts[0].flatten(0, 1), parts[1:].flatten(0, 2)]


@dataclass(frozen=True)
class Pairs:
    """Queries or keys whose turned channels are neighbours there (0 with 1, 2 with 3, ...), and half a turn apart here.

    Args:
        values: whether our tensor has the values below the keys, which are two tensors of theirs.
    """

    values: bool = False

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        first, *rest = ours[0].chunk(2) if self.values else ours
        return [self._moved(first, dims, lambda turned: turned.unflatten(1, (2, -1)).transpose(1, 2)), *rest]

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        first, *rest = theirs
        moved = self._moved(first, dims, lambda turned: turned.unflatten(1, (-1, 2)).transpose(1, 2))
        return [torch.cat([moved, *rest]) if rest else moved]

    def _moved(self, tensor: Tensor, dims: Dims, move) -> Tensor:
        turned, kept = tensor.unflatten(0, (-1, dims.head_dim)).split([dims.rotated, dims.head_dim - dims.rotated], 1)
        return torch.cat([move(turned).flatten(1, 2), kept], 1).flatten(0, 1)


@dataclass(frozen=True)
class Mamba2Rows:
    """Our tensors are their one, one below the other: z and x, B and C, time steps (without `steps`: x, B and C).

    Args:
        steps: whether z and the time steps are among them (the projection) or not (the convolution).
    """

    steps: bool

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        return [torch.cat(ours)]

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        inner, read, heads = dims.mamba2
        return list(theirs[0].split([2 * inner, read, heads] if self.steps else [inner, read]))


@dataclass(frozen=True)
class DeltaConvolutions:
    """Our two, of queries and keys and of values, are their three. transformers cuts what it saves into three equal
    parts,
    whatever the widths, and joins them when it loads: so what is read is joined first."""

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        return [*ours[0].chunk(2), ours[1]]

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        return list(torch.cat(theirs).split(list(dims.delta)))


@dataclass(frozen=True)
class Joined:
    """Our one tensor is their two, of the queries and of the keys of cca, one below the other."""

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        return list(ours[0].split(list(dims.cca)))

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        return [torch.cat(theirs)]


@dataclass(frozen=True)
class Swapped:
    """Two equally large parts of one tensor, in the other order."""

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        return [torch.cat(ours[0].chunk(2)[::-1])]

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        return self.to_hf(theirs, dims)


@dataclass(frozen=True)
class Interleaved:
    """Our z and x, one below the other, are their one tensor of a row of x, a row of z, and so on."""

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        return [torch.stack(ours[0].chunk(2)[::-1], 1).flatten(0, 1)]

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        return [torch.cat([theirs[0][1::2], theirs[0][::2]])]


@dataclass(frozen=True)
class Heads:
    """Our channels, along `dim`, are theirs [heads, ...], by head."""

    dim: int

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        return [torch.stack(ours[0].chunk(dims.mamba_heads, self.dim))]

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        return [torch.cat(list(theirs[0]), self.dim)]


@dataclass(frozen=True)
class Wide:
    """Our rows of vectors are their tensors [1, 1, C], one each; one row may be a vector of ours."""

    rows: bool = True

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        return [row.view(1, 1, -1) for row in (ours[0] if self.rows else ours)]

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        flat = [each.flatten() for each in theirs]
        return [torch.stack(flat)] if self.rows else flat


@dataclass(frozen=True)
class Transposed:
    """Their matrices are [inputs, outputs] (GPT-2's Conv1D); biases are vectors on both sides."""

    inner: Form = field(default_factory=Same)

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        return [_turned(each) for each in self.inner.to_hf(ours, dims)]

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        return self.inner.from_hf([_turned(each) for each in theirs], dims)


def _turned(tensor: Tensor) -> Tensor:
    return tensor.T if tensor.dim() == 2 else tensor


@dataclass(frozen=True)
class Stacked:
    """Our one tensor [experts, rows, columns] is theirs, one or several (gate and up) for each expert in turn."""

    parts: int = 1

    def to_hf(self, ours: list[Tensor], dims: Dims) -> list[Tensor]:
        return [part for expert in ours[0] for part in expert.chunk(self.parts)]

    def from_hf(self, theirs: list[Tensor], dims: Dims) -> list[Tensor]:
        experts = [torch.cat(theirs[at : at + self.parts]) for at in range(0, len(theirs), self.parts)]
        return [torch.stack(experts)]


@dataclass(frozen=True)
class Link:
    """Our modules and theirs. `{n}` in the names stands for the number of the layer, on both sides alike, `{e}` in
    theirs for that of each expert.

    `suffixes` are the tensors that a module may have; ("",) where the names are those of tensors themselves.
    """

    ours: str | tuple[str, ...]
    theirs: str | tuple[str, ...]
    form: Form = field(default_factory=Same)
    suffixes: tuple[str, ...] = ("weight", "bias")

    @property
    def repeated(self) -> bool:
        return "{n}" in _all(self.ours)[0]

    def names(self, layer: int | None, suffix: str, experts: int = 0) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(our names, their names) of one layer's tensors with this last part (one of `suffixes`)."""
        theirs = _all(self.theirs)
        numbers = range(experts) if any("{e}" in module for module in theirs) else [None]
        return tuple(
            tuple(f"{module.format(n=layer, e=number)}.{suffix}".rstrip(".") for number in some for module in side)
            for side, some in ((_all(self.ours), [None]), (theirs, numbers))
        )


def _all(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
