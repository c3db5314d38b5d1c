"""The class of a layer of some kind, and its options with its variant's overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from megatron.config.pattern import KINDS, Kind
from megatron.config.registry import KIND, registry_of
from megatron.config.sections.base import Section
from megatron.config.sections.model import ModelSection


def layer_class(kind: Kind) -> type[nn.Module]:
    """The module of a kind; with static methods for its counts and side channels."""
    return registry_of().load(KIND, kind.name)


def options_of(model: ModelSection, kind: Kind) -> Section:
    """The kind's own section of `model`, overlaid with `model.variants.<variant>`."""
    own: Section = getattr(model, KINDS[kind.name].section)
    if kind.variant is None:
        return own
    return type(own).model_validate(_overlay(own.model_dump(), model.variants[kind.variant]))


def _overlay(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        merged[name] = (
            _overlay(base[name], value) if isinstance(value, Mapping) and isinstance(base.get(name), dict) else value
        )
    return merged
