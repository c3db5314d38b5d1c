"""What is this run? Typed sections, YAML files and overrides, the origin of each value, and rules."""

from .files import split_arguments
from .problems import ConfigError, Problem
from .resolve import Resolved, load, resolve
from .resolved_file import config_hash, read_resolved, save_resolved, to_yaml
from .schema import Config

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
