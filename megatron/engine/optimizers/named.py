"""Optimizers by name."""

from __future__ import annotations

from megatron.config import Config
from megatron.config.names.added import resolve_import
from megatron.config.optimizer_kind import OptimizerKind
from megatron.config.problems import UserError
from megatron.config.registry import OPTIMIZER, load

from .contract import Optimizer


def optimizer_class(config: Config) -> type[Optimizer]:
    """The class that `optimizer.type` names.

    Raises:
        UserError: it cannot be imported, or lacks a method of the contract.
    """
    found = resolve_import(config, "optimizer.type", OPTIMIZER, config.optimizer.type)
    if isinstance(found, OptimizerKind):
        found = load(found.update)
    missing = [name for name in ("build", "state_names", "step") if not callable(getattr(found, name, None))]
    if missing:
        raise UserError(
            f"optimizer.type = {config.optimizer.type!r} must have {', '.join(missing)}: "
            "see megatron.engine.optimizers.contract.Optimizer"
        )
    return found
