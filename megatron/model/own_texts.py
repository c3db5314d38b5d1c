"""Ranks that share the tokens of texts in training, and then each read texts of their own.

Context parallel ranks have the same weights, so as replicas they continue different texts. Tensor parallel ranks that
cut the residual stream along the sequence have all of it instead."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from megatron.parallel.layers.context import ContextGroup
from megatron.parallel.layout.mesh import ALONE, Mesh

from .relay import Relay


class OwnTexts:
    """While it is entered, the layers of a module share no tokens with other ranks."""

    def __init__(self, module: nn.Module) -> None:
        self.changes: list[tuple[dict[str, Any], str, Any, Any]] = []
        for each in module.modules():
            for name, value in vars(each).items():
                if (other := _undivided(value)) is not None:
                    self.changes.append((vars(each), name, value, other))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        for attributes, name, _, other in self.changes:
            attributes[name] = other
        try:
            yield
        finally:
            for attributes, name, value, _ in self.changes:
                attributes[name] = value


def _undivided(value: Any) -> Any:
    """The replacement of an attribute of a layer. None: it stays."""
    if isinstance(value, Mesh) and (value.context.size > 1 or value.layout.sequence):
        return replace(value, context=ALONE, layout=replace(value.layout, sequence=False, async_tensor=False))
    if isinstance(value, ContextGroup) and value.size > 1:
        return ContextGroup()
    if isinstance(value, dict) and any(isinstance(each, Relay) for each in value.values()):
        return {}
    return None
