"""What is this run? Typed sections, YAML files and overrides, the origin of each value, and rules.

Each name is imported at its first use: the options of a kind of layer import `megatron.config.kind`, and the schema
imports them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .problems import ConfigError as ConfigError
    from .problems import Problem as Problem
    from .resolution import Resolved as Resolved
    from .resolution import load as load
    from .resolution import resolve as resolve
    from .schema import Config as Config
    from .source.files import split_arguments as split_arguments
    from .source.resolved_file import config_hash as config_hash
    from .source.resolved_file import read_resolved as read_resolved
    from .source.resolved_file import save_resolved as save_resolved
    from .source.resolved_file import to_yaml as to_yaml

_NAMES = {
    "problems": "ConfigError Problem",
    "resolution": "Resolved load resolve",
    "schema": "Config",
    "source.files": "split_arguments",
    "source.resolved_file": "config_hash read_resolved save_resolved to_yaml",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
