"""The class of a layer of some kind."""

from __future__ import annotations

from torch import nn

from megatron.config.pattern import Kind
from megatron.config.registry import KIND, registry_of


def layer_class(kind: Kind) -> type[nn.Module]:
    """The module of a kind; with static methods for its counts and side channels."""
    return registry_of().load(KIND, kind.name)
