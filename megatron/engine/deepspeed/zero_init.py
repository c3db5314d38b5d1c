"""Modules whose parameters ZeRO 3 partitions as soon as they exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from megatron.config import Config
from megatron.config.variants import used_kinds

from .mpu import ModelParallelUnit


@contextlib.contextmanager
def cut_as_they_are_made(config: Config, options: dict[str, Any], mpu: ModelParallelUnit) -> Iterator[None]:
    """Partition each parameter when its module has been made, so that no rank ever holds the whole model.

    Parameters keep their types. DeepSpeed's override of types would be one for all.
    """
    import deepspeed

    for _, kind, _ in used_kinds(config.model):
        kind.module  # noqa: B018  (imported before zero.Init changes how modules are made)
    overrides = [deepspeed.runtime.zero.partition_parameters.DeepSpeedTensorOverride.device]
    with (
        _classes_as_they_were(),
        deepspeed.zero.Init(
            data_parallel_group=mpu.get_data_parallel_group(),
            config_dict_or_path=options,
            mpu=mpu,
            tensor_overrides=overrides,
        ),
    ):
        yield


def cut_parameters(model: nn.Module, options: dict[str, Any], mpu: ModelParallelUnit, device: torch.device) -> None:
    """Partition the parameters of a finished model, one after another, with the values of the first rank.

    A device never has the whole model. Other ranks than the first may have parameters without memory of their own.
    Modules whose tokens choose what runs (`gathered_whole` of the model) are gathered as one, on all ranks alike.
    """
    import deepspeed

    for module in cast(tuple[nn.Module, ...], getattr(model, "gathered_whole", ())):
        deepspeed.utils.set_z3_leaf_module(module, True)
    group = mpu.get_data_parallel_group()
    with _classes_as_they_were():
        made = deepspeed.zero.Init(module=nn.Module(), data_parallel_group=group, config_dict_or_path=options, mpu=mpu)
        for parameter in dict.fromkeys(model.parameters()):
            values = (
                parameter.data if dist.get_rank(group) == 0 else torch.empty(parameter.shape, dtype=parameter.dtype)
            )
            parameter.data = values.to(device).contiguous()
            made._convert_to_zero_parameters([parameter])


@contextlib.contextmanager
def _classes_as_they_were() -> Iterator[None]:
    """Removes the `__init_subclass__` that zero.Init adds to `nn.Module` and leaves there. With it, no generic class
    of modules can be made."""
    own = "__init_subclass__" in vars(nn.Module)
    try:
        yield
    finally:
        if not own and "__init_subclass__" in vars(nn.Module):
            del nn.Module.__init_subclass__
