"""The class of a layer of some kind."""

from __future__ import annotations

from torch import nn

from megatron.config.kind import LayerKind, kinds_of
from megatron.config.pattern import Kind
from megatron.config.sections.model import ModelSection


def kind_of(model: ModelSection, kind: Kind) -> LayerKind:
    """What a kind says about itself."""
    return kinds_of(tuple(model.extensions))[kind.name]


def layer_class(model: ModelSection, kind: Kind) -> type[nn.Module]:
    """The module of a kind; with static methods for its counts and side channels."""
    return kind_of(model, kind).module
