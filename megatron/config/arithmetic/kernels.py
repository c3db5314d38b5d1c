"""Packages of fused kernels that layers can use instead of torch. Each kind names its own. None is imported here."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def installed(package: str) -> bool:
    """Whether it can be found. It is loaded at its first use."""
    return importlib.util.find_spec(package) is not None


def has_file(package: str, file: str) -> bool:
    """Whether the package that would be imported has this file: another one may have its name."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / file).is_file() for place in places or ())
