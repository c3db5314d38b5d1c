"""Packages of fused kernels that layers can use instead of torch; a kind names its own. None is imported here."""

from __future__ import annotations

import importlib.util


def installed(package: str) -> bool:
    """Whether it can be found; whether it loads is seen when it is first used."""
    return importlib.util.find_spec(package) is not None
