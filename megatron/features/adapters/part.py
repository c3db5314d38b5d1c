"""Adapters in the engine: they are made before DeepSpeed sees the model, and the base's weights are read for them."""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.checkpoint import SOLO, Checkpoint, CheckpointError, Communicator, GroupCommunicator
from megatron.checkpoint.format.fragment import MASTER, WEIGHT
from megatron.checkpoint.read.reader import ADAPTERS, config_of
from megatron.checkpoint.save.store import Store
from megatron.engine.part import EnginePart
from megatron.training.start.fetch import local_path

from .base import fill_lengths, hash_of
from .layers import MAGNITUDE, adapt
from .options import adapter_of

if TYPE_CHECKING:
    from megatron.engine.base import BaseEngine


class Adapters(EnginePart):
    """Adapts the layers, and keeps with each checkpoint which weights they belong to.

    Attributes:
        base: hash of the weights under the adapters. None until they were read.
    """

    base: str | None = None

    def module_made(self, engine: BaseEngine, module: nn.Module) -> None:
        if not adapt(module, engine.plan):
            raise ValueError(
                "adapter.targets must name a linear layer of each pipeline stage, and this rank's stage has none"
            )

    def attach(self, engine: BaseEngine) -> None:
        self._engine, self._options = engine, adapter_of(engine.config)

    def state(self) -> dict[str, Any]:
        return {"base": self.base}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Read the base, and in a new run what its adapters begin with.

        Raises:
            CheckpointError: on every rank. The base is missing, or is not the one that the adapters were trained on.
        """
        if self.base is not None and state.get("base") == self.base:
            return  # it goes back to a checkpoint of its own
        talk = _communicator(self._engine)
        base = self._open(self._engine.config.checkpoint.initialize_from, "checkpoint.initialize_from", talk)
        self.base = hash_of(base, talk)
        if state:
            refuse_other_base(state.get("base"), self.base, base)
        targets = [*self._engine.state.frozen()]
        base.check([each.spec for each in targets], communicator=talk, states={MASTER, WEIGHT})
        base.read_into(targets, cast={WEIGHT}, communicator=talk)
        if not state:
            self._begin(base, self.base, talk)

    def _begin(self, base: Checkpoint, known: str, talk: Communicator) -> None:
        """Give the adapters of a new run the values that they begin with."""
        masters = self._engine.state.masters()
        if self._options.initialize_from is None:
            fill_lengths([each for each in masters if each.tensor.name.endswith(MAGNITUDE)], base, self._type())
            return
        found = self._open(self._options.initialize_from, "adapter.initialize_from", talk)
        kept = found.meta.extra.get(ADAPTERS)
        if not isinstance(kept, dict):
            raise CheckpointError(found.path, "it has no adapters, and adapter.initialize_from must name some")
        refuse_other_base(kept.get("base"), known, base)
        own = adapter_of(config_of(found, whole=False))
        alpha = self._options.alpha * own.scale / self._options.scale
        if not isclose(alpha, self._options.alpha, rel_tol=1e-6):
            raise CheckpointError(found.path, f"adapter.alpha must be {alpha}, which its adapters were trained with")
        found.check([each.spec for each in masters], communicator=talk, states={MASTER, WEIGHT})
        found.read_into(masters, cast={MASTER, WEIGHT}, communicator=talk)

    def _type(self) -> torch.dtype:
        return self._engine.plan.factory("").dtype

    def _open(self, where: str | None, key: str, talk: Communicator) -> Checkpoint:
        folder = Path(self._engine.config.checkpoint.dir)
        if where is None:
            raise CheckpointError(key, "it must be given with adapters")
        found = Store(folder, talk).weights(local_path(where, folder, talk), key=key).checkpoint
        assert found is not None  # one was named
        return found


def refuse_other_base(known: object, found: str, base: Checkpoint) -> None:
    """Raise unless adapters belong to these weights."""
    if known != found:
        other = "of no known weights" if known is None else f"of other weights (hash {str(known):.12})"
        raise CheckpointError(
            base.path,
            f"the adapters are {other}, and these have the hash {found:.12}. checkpoint.initialize_from must name the "
            "weights that they were trained on",
        )


def _communicator(engine: BaseEngine) -> Communicator:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return SOLO
    return GroupCommunicator(device=engine.device)
