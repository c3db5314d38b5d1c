"""Optimizers by name."""

from __future__ import annotations

from importlib import import_module

from megatron.config import Config

from .contract import Optimizer

OPTIMIZERS = {
    "adamw": "megatron.engine.optimizers.adamw:AdamW",
    "lion": "megatron.engine.optimizers.lion:Lion",
    "sgd": "megatron.engine.optimizers.sgd:SGD",
    "muon": "megatron.engine.optimizers.muon:Muon",
}


def optimizer_class(config: Config) -> type[Optimizer]:
    """The class that `optimizer.type` names."""
    module, _, name = OPTIMIZERS[config.optimizer.type].partition(":")
    return getattr(import_module(module), name)
