"""What a feature says about itself without torch: its section, its rules, which runs want it, its part and its hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..registry import FEATURE, RegistryError, registry_of
from ..section import Section

if TYPE_CHECKING:
    from ..problems import Problem
    from ..rule_context import RuleContext


@dataclass(frozen=True)
class Feature:
    """Something that a run can switch on. A run that does not want it imports this description only.

    Attributes:
        options: its section, at the top level of a configuration under the feature's name.
        about: one sentence about the section.
        wanted: whether a run of this `Config` has it.
        rules: each looks at the whole configuration.
        engine: import path of its `EnginePart`; "" for none.
        hook: import path of its `Hook`, which `of(parts)` makes; it acts before the state is saved. "" for none.
    """

    options: type[Section]
    about: str
    wanted: Callable[[Any], bool]
    rules: tuple[Callable[[RuleContext], Iterator[Problem]], ...] = ()
    engine: str = ""
    hook: str = ""


@cache
def features_of(extensions: tuple[str, ...] = ()) -> Mapping[str, Feature]:
    """All features by name, in the order in which their parts attach.

    Raises:
        RegistryError: an extension, or its description of a feature, cannot be used.
    """
    registry = registry_of(extensions)
    found = {}
    for name in registry.names(FEATURE):
        found[name] = registry.load(FEATURE, name)
        if not isinstance(found[name], Feature):
            rule = f"{registry.path(FEATURE, name)} must be a megatron.config.features.feature.Feature"
            raise RegistryError(rule, "describe it as examples/plugin/my_lab/worst_label/options.py does")
    return MappingProxyType(found)
