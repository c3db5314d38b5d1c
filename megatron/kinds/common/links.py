"""Links between our logical tensors and the tensors of another program, read in both directions.

A link names modules. It holds for their `weight` and `bias`, where they exist. Its form says how the tensors of one
side are made of the other side's tensors. Every form only moves elements, so both directions are exact. A form that
needs widths of the model is given as a function of the model's section.

The `hf.py` of a kind has the links of its layers, and the forms that only it needs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection

Tensors = list[Tensor]


@dataclass(frozen=True)
class Form:
    """How the tensors of the two sides are made of each other. All take the shapes that they write."""

    to_hf: Callable[[Tensors], Tensors]
    from_hf: Callable[[Tensors], Tensors]
    any_cut: bool = False  # the rows of theirs are joined, wherever they are cut into tensors
    whole: bool = False  # theirs are whole numbers, of an integer type, and ours fp32


def one(to_hf: Callable[[Tensor], Tensor], from_hf: Callable[[Tensor], Tensor]) -> Form:
    """One tensor on both sides."""
    return Form(lambda ours: [to_hf(ours[0])], lambda theirs: [from_hf(theirs[0])])


SAME = Form(lambda ours: ours, lambda theirs: theirs)


def fused(parts: int = 2) -> Form:
    """Our one tensor is their equally large ones, one below the other (keys and values, gate and up)."""
    return Form(lambda ours: list(ours[0].chunk(parts)), lambda theirs: [torch.cat(theirs)])


def joined(*rows: int) -> Form:
    """Our one tensor is theirs, of these numbers of rows, one below the other."""
    return Form(lambda ours: list(ours[0].split(list(rows))), lambda theirs: [torch.cat(theirs)])


def stacked(*rows: int) -> Form:
    """Our tensors, of these numbers of rows, are their one, one below the other."""
    return Form(lambda ours: [torch.cat(ours)], lambda theirs: list(theirs[0].split(list(rows))))


def transposed(inner: Form = SAME) -> Form:
    """Their matrices are [inputs, outputs] (GPT-2's Conv1D). Biases are vectors on both sides."""

    def turned(tensors: Tensors) -> Tensors:
        return [each.T if each.dim() == 2 else each for each in tensors]

    return Form(lambda ours: turned(inner.to_hf(ours)), lambda theirs: inner.from_hf(turned(theirs)))


@dataclass(frozen=True)
class Link:
    """Our modules and theirs.

    Attributes:
        ours, theirs: one name or several. `{n}` is the number of the layer, on both sides, and `{e}` in theirs that of
            each expert.
        form: how the tensors are made of each other, or a function that makes the form for a model.
        suffixes: the tensors that a module may have. ("",) where the names are of tensors.
        experts: number of experts of a model, for `{e}`.
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
        """(our names, their names) of one layer's tensors with one of `suffixes`."""
        numbers = range(self.experts(model)) if self.experts else [None]
        ours, theirs = (
            tuple(f"{module.format(n=layer, e=number)}.{suffix}".rstrip(".") for number in some for module in side)
            for side, some in ((_all(self.ours), [None]), (_all(self.theirs), numbers))
        )
        return ours, theirs


def tensors(ours: str, theirs: str, *names: str) -> tuple[Link, ...]:
    """Tensors of two modules, with the same names on both sides."""
    return tuple(Link(f"{ours}.{name}", f"{theirs}.{name}", suffixes=("",)) for name in names)


def _all(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
