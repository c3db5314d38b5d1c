"""Removes copies that DeepSpeed's ZeRO optimizers make in each step on CPUs without need.

New memory is the most expensive part of such a copy: the kernel clears it page by page, in each step again."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .sum_of_squares import norm


def norms_without_copies(optimizer: Any) -> None:
    """On CPUs, take norms of gradients at ZeRO 1 and 2 as at other stages (`sum_of_squares`). DeepSpeed copies each
    gradient to fp64 for its norm."""
    if not hasattr(optimizer, "get_grad_norm_direct") or not _on_cpu(optimizer):
        return
    direct = optimizer.get_grad_norm_direct

    def of_norms(gradients: Sequence[Tensor], params: Sequence[Tensor], norm_type: float = 2) -> Tensor:
        if norm_type == 2:  # DeepSpeed then takes norms of these norms
            gradients = [norm(each) for each in gradients if not getattr(each, "_zero_padding", False)]
        return direct(gradients, params, norm_type)

    optimizer.get_grad_norm_direct = of_norms


def update_in_place(optimizer: Any) -> None:
    """On CPUs in fp32, ZeRO 1 updates a rank's part of the weights in place.

    DeepSpeed keeps a second copy of that part as its masters, which it copies to the weights after each update. It also
    multiplies gradients by 1 where nothing is clipped."""
    if not _plain_fp32(optimizer):
        return
    for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
        parts = optimizer.parallel_partitioned_bit16_groups[group]
        master.data = parts[dist.get_rank(optimizer.real_dp_process_group[group])].detach()
    optimizer._link_all_hp_params()
    _save_masters_alone(optimizer)
    _clip_if_above_limit(optimizer)


def _plain_fp32(optimizer: Any) -> bool:
    """Whether this is ZeRO 1 with fp32 masters of fp32 weights, without offloading."""
    masters = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if masters is None or not hasattr(optimizer, "parallel_partitioned_bit16_groups") or not _on_cpu(optimizer):
        return False
    flats = [*masters, *optimizer.bit16_groups_flat]
    elsewhere = optimizer.partition_gradients or optimizer.cpu_offload or optimizer.zenflow
    return all(each.dtype == torch.float32 for each in flats) and not elsewhere


def _on_cpu(optimizer: Any) -> bool:
    groups = getattr(optimizer, "bit16_groups", None)  # of ZeRO 1 and 2
    return groups is not None and all(each.device.type == "cpu" for group in groups for each in group)


def _save_masters_alone(optimizer: Any) -> None:
    """The masters are views of all ranks' weights now, which DeepSpeed would save whole."""
    masters = optimizer._get_groups_without_padding

    optimizer._get_groups_without_padding = lambda groups: [each.detach().clone() for each in masters(groups)]


def _clip_if_above_limit(optimizer: Any) -> None:
    scale = optimizer.unscale_and_clip_grads

    def clip(groups: Sequence[Tensor], total: Any) -> None:
        limit = optimizer.clip_grad
        one = optimizer.loss_scale == 1.0 and limit > 0.0 and 0 <= total and (total + 1e-6) / limit <= 1.0
        if not one:
            scale(groups, total)

    optimizer.unscale_and_clip_grads = clip
