"""The class of a layer of some kind."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from megatron.config.kind import LayerKind, kinds_of
from megatron.config.pattern import Kind
from megatron.config.sections.model import ModelSection

from .counts import Counts


class LayerClass(Protocol):
    """The class of a kind's module: what it offers beside instances.

    What only some kinds have is looked for where it is used: `channels`, `sends`, `indexed`, `needs_output`.
    """

    def __call__(self, *arguments: Any) -> nn.Module:
        """A layer."""

    def counts(self, model: ModelSection, options: Any, sequence_length: int, *place: int) -> Counts:
        """Its costs. `place` is the block's index for a kind that is `indexed`, the call's for one beside a mixer."""

    def shared_name(self, kind: Kind, options: Any, number: int) -> str:
        """Of a kind that stands beside a mixer: the logical name of what its call of this number shares."""


def kind_of(model: ModelSection, kind: Kind) -> LayerKind:
    """What a kind says about itself."""
    return kinds_of(tuple(model.extensions))[kind.name]


def layer_class(model: ModelSection, kind: Kind) -> LayerClass:
    """The module of a kind. With static methods for its counts and side channels."""
    return kind_of(model, kind).module
