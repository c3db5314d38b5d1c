"""What is this run? Typed sections, YAML files and overrides, the origin of each value, and rules.

Each name is imported at its first use: the options of a kind of layer import `megatron.config.kind`, and the schema
imports them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .problems import ConfigError, Problem
    from .resolution import Resolved, load, resolve
    from .schema import Config
    from .source.files import split_arguments
    from .source.resolved_file import config_hash, read_resolved, save_resolved, to_yaml

_WHERE = {
    "Config": "schema",
    "ConfigError": "problems",
    "Problem": "problems",
    "Resolved": "resolution",
    "config_hash": "source.resolved_file",
    "load": "resolution",
    "read_resolved": "source.resolved_file",
    "resolve": "resolution",
    "save_resolved": "source.resolved_file",
    "split_arguments": "source.files",
    "to_yaml": "source.resolved_file",
}
__all__ = [
    "Config",
    "ConfigError",
    "Problem",
    "Resolved",
    "config_hash",
    "load",
    "read_resolved",
    "resolve",
    "save_resolved",
    "split_arguments",
    "to_yaml",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
