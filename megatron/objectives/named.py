"""Objectives by name."""

from __future__ import annotations

from megatron.config import Config
from megatron.config.names.added import resolve_import
from megatron.config.problems import UserError
from megatron.config.registry import OBJECTIVE

from .contract import Objective


def objective_of(config: Config) -> Objective:
    """What `objective.type` names.

    Raises:
        UserError: it cannot be imported, is no objective, or refuses its options.
    """
    name = config.objective.type
    found = resolve_import(config, "objective.type", OBJECTIVE, name)
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise UserError(f"objective.type = {name!r} must be a subclass of {Objective.__module__}.Objective")
    return found.build(config)
