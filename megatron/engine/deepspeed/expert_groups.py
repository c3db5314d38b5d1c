"""Experts that are spread over the data axis, or over the data and tensor axes, for DeepSpeed.

In DeepSpeed 0.19.8, parameters with `allreduce = False` may be shared by other ranks than the data axis. They are in
optimizer groups with `moe`, which name a process group. It sums their gradients over that group, and gives their
masters and states to its ranks. It divides by the whole data parallel size, so that a label weighs the same wherever
its tokens were sent. Folded experts only need a group across the tensor axis: each rank sends other tokens, so each
label's part of a gradient is in exactly one term. This module sets the groups and changes two things:

* DeepSpeed expects such parameters only in layers of its own class.
* Norms. The bf16 optimizer adds experts up over the expert axis, but not over tensor parallel ranks, which have
slices of them here, nor over stages where some have no experts. ZeRO 1 and 2 take the norm of each optimizer group
in turn, as a sum over all stages. Stages with different numbers of groups would wait for each other forever."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layout.mesh import Mesh

from .process import with_group
from .sum_of_squares import sum_of_squares


@contextlib.contextmanager
def spread_experts(optimizer: torch.optim.Optimizer, mesh: Mesh) -> Iterator[None]:
    """Mark the groups of spread experts for an engine that is built inside this context."""
    if not mesh.layout.spreads_experts:
        yield
        return
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import groups

    same = with_group(mesh.expert_data, mesh).group  # on every rank, also of stages without experts
    spread = [group for group in optimizer.param_groups if group["moe"]]
    sharing = with_group(mesh.expert, mesh).group
    for group in spread:
        groups._EXPERT_PARALLEL_GROUP[group["name"]] = sharing
        groups._EXPERT_DATA_PARALLEL_GROUP[group["name"]] = same
        for parameter in group["params"]:
            parameter.allreduce, parameter.group_name = False, group["name"]
    configure = DeepSpeedEngine._configure_distributed_model

    def configure_experts(engine: Any, *args: Any) -> None:
        configure(engine, *args)
        engine.has_moe_layers = bool(spread)

    with mock.patch.object(DeepSpeedEngine, "_configure_distributed_model", configure_experts):
        yield


def count_each_element_once(optimizer: Any, mesh: Mesh) -> None:
    """Make the gradient norm of a DeepSpeed optimizer (ZeRO 1 and 2 or bf16) that of the logical tensors."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if not mesh.layout.spreads_experts and mesh.pipeline.size == 1:
        return
    if isinstance(optimizer, BF16_Optimizer):
        find = optimizer.get_grads_for_norm

        def gradients(for_clipping: bool = False) -> Any:
            if for_clipping:
                return find(True)
            ordinary, experts = find()
            return _ordinary(ordinary, experts, mesh)

        optimizer.get_grads_for_norm = gradients
    elif isinstance(optimizer, DeepSpeedZeroOptimizer) and not optimizer.cpu_offload:
        optimizer.scaled_global_norm = lambda norm_type=2: norm_of_parts(optimizer)


def _ordinary(gradients: list[Tensor], experts: dict[str, list[Tensor]], mesh: Mesh) -> tuple[list[Tensor], dict]:
    """The experts' gradients as one number that DeepSpeed adds up like any sharded parameter: their norm over the
    expert axis. Where experts are folded, that axis has all of them, so only tensor parallel rank 0 adds it."""
    found = [gradient for each in experts.values() for gradient in each]
    if not found:
        return gradients, {}
    squares = all_reduce(sum_of_squares(found), mesh.expert)
    if mesh.layout.folded and mesh.tensor.rank:
        squares = torch.zeros_like(squares)
    return [*gradients, squares.sqrt().view(1)], {}


def norm_of_parts(optimizer: Any) -> Tensor:
    """One sum over all groups, and over the data, tensor and pipeline axes. inf where it is not finite."""
    pairs = [
        (gradient, parameter)
        for index, parameters in enumerate(optimizer.params_in_partition)
        for gradient, parameter in zip(
            (each for each in optimizer.averaged_gradients[index] if not getattr(each, "_zero_padding", False)),
            parameters,
        )
    ]
    norm = optimizer.get_grad_norm_direct([gradient for gradient, _ in pairs], [parameter for _, parameter in pairs])
    return torch.where(norm < 0, torch.full_like(norm, float("inf")), norm)
