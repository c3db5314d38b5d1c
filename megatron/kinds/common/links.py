"""What stands for what: links between our logical tensors and those of another program, read in both directions.

A link names modules; it holds for their `weight` and for their `bias`, where they exist. Its form says how the tensors
of one side are made of those of the other. Every form only moves elements, so both directions are exact. A form that
needs widths of the model is given as a function of the model's section that makes it.

The `hf.py` of a kind has the links of its layers, and the forms that only it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection


class Form(Protocol):
    """How the tensors of the two sides are made of each other.

    A form whose `any_cut` is true joins the rows of theirs, wherever they are cut into tensors; all others take the
    shapes alone that they write.
    """

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]: ...

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]: ...


@dataclass(frozen=True)
class Same:
    """One tensor, as it is."""

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        return ours

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        return theirs


SAME = Same()


@dataclass(frozen=True)
class Fused:
    """Our one tensor is their equally large ones, one below the other (keys and values, gate and up)."""

    parts: int = 2

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        return list(ours[0].chunk(self.parts))

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        return [torch.cat(theirs)]


@dataclass(frozen=True)
class Joined:
    """Our one tensor is theirs, of these numbers of rows, one below the other."""

    rows: tuple[int, ...]

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        return list(ours[0].split(list(self.rows)))

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        return [torch.cat(theirs)]


@dataclass(frozen=True)
class StackedRows:
    """Our tensors, of these numbers of rows, are their one, one below the other."""

    rows: tuple[int, ...]

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        return [torch.cat(ours)]

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        return list(theirs[0].split(list(self.rows)))


@dataclass(frozen=True)
class Transposed:
    """Their matrices are [inputs, outputs] (GPT-2's Conv1D); biases are vectors on both sides."""

    inner: Form = SAME

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        return [_turned(each) for each in self.inner.to_hf(ours)]

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        return self.inner.from_hf([_turned(each) for each in theirs])


def _turned(tensor: Tensor) -> Tensor:
    return tensor.T if tensor.dim() == 2 else tensor


@dataclass(frozen=True)
class Link:
    """Our modules and theirs.

    Attributes:
        ours, theirs: one name or several. `{n}` stands for the number of the layer, on both sides alike, and `{e}` in
            theirs for that of each expert.
        form: how the tensors are made of each other; or a function that makes the form for a model.
        suffixes: the tensors that a module may have; ("",) where the names are those of tensors themselves.
        experts: how often `{e}` is counted in a model.
    """

    ours: str | tuple[str, ...]
    theirs: str | tuple[str, ...]
    form: Form | Callable[[ModelSection], Form] = SAME
    suffixes: tuple[str, ...] = ("weight", "bias")
    experts: Callable[[ModelSection], int] | None = None

    @property
    def repeated(self) -> bool:
        return "{n}" in _all(self.ours)[0]

    def form_in(self, model: ModelSection) -> Form:
        """The form, with the widths of this model."""
        return self.form(model) if callable(self.form) else self.form

    def names(self, layer: int | None, suffix: str, model: ModelSection) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(our names, their names) of one layer's tensors with this last part (one of `suffixes`)."""
        numbers = range(self.experts(model)) if self.experts else [None]
        ours, theirs = (
            tuple(f"{module.format(n=layer, e=number)}.{suffix}".rstrip(".") for number in some for module in side)
            for side, some in ((_all(self.ours), [None]), (_all(self.theirs), numbers))
        )
        return ours, theirs


def tensors(ours: str, theirs: str, *names: str) -> tuple[Link, ...]:
    """Tensors of two modules with names of their own, the same on both sides."""
    return tuple(Link(f"{ours}.{name}", f"{theirs}.{name}", suffixes=("",)) for name in names)


def _all(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
