"""The class of a layer of some kind."""

from typing import Any, Protocol

from torch import nn

from megatron.config.kind import LayerKind, kinds_of
from megatron.config.pattern import Kind
from megatron.config.sections.model import ModelSection

from .counts import Counts


class LayerClass(Protocol):
    """The class of a kind's module. Some kinds also have `channels`, `sends`, `indexed` or `needs_output`."""

    def __call__(self, *arguments: Any) -> nn.Module:
        """A layer."""

    def counts(self, model: ModelSection, options: Any, sequence_length: int, *place: int) -> Counts:
        """Its costs. `place` is the block's index for an `indexed` kind, or the call's for a side kind."""

    def shared_name(self, kind: Kind, options: Any, number: int) -> str:
        """The logical name of the modules that a call of this number shares, of a side kind."""


def kind_of(model: ModelSection, kind: Kind) -> LayerKind:
    """The declaration of a kind."""
    return kinds_of(tuple(model.extensions))[kind.name]


def layer_class(model: ModelSection, kind: Kind) -> LayerClass:
    """The class of a kind's module."""
    return kind_of(model, kind).module
