"""On a GPU, DeepSpeed's bf16 optimizer reads and writes 36 bytes per parameter and step: two passes.

The first copies or adds a gradient to its fp32 sum (6 bytes, 10 for later micro-batches) and takes the norm from it.
The second clips, does AdamW (28 bytes) and writes the 16-bit weights (2 bytes). In passes of their own the norm reads
4 bytes more, and the 16-bit weights 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from warnings import warn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from .step_on_device import is_bf16_on_gpu, skips_on_device


def passes_of_adamw(optimizer: Any, inner: torch.optim.Optimizer) -> Any | None:
    """The module with the kernels, where they can be used and compiled.

    Args:
        optimizer: DeepSpeed's.
        inner: the torch optimizer that it calls.
    """
    if not (hasattr(inner, "kernels") and skips_on_device(inner) and is_bf16_on_gpu(optimizer)):
        return None
    master, narrow = optimizer.fp32_groups_flat_partition[0], optimizer.bf16_groups_flat[0]
    if is_fake(master):
        return None
    try:
        from . import adamw_kernels

        adamw_kernels.try_them(master.device, narrow.dtype)
    except Exception as error:  # no Triton, no C compiler, a GPU that it does not know
        reason = " ".join(str(error).split())[:160]
        warn(f"AdamW updates in torch's kernels: Triton's failed: {type(error).__name__}: {reason}", stacklevel=2)
        return None
    return adamw_kernels


def write_weights_with_adamw(optimizer: Any, inner: Any, kernels: Any) -> None:
    """AdamW's pass over the masters writes the weights that DeepSpeed would copy after it.

    Args:
        optimizer: DeepSpeed's.
        inner: an `optimizers.adamw.AdamW`.
    """
    from deepspeed.runtime import bf16_optimizer

    parts, refresh = optimizer.bf16_partitioned_groups, optimizer.update_lp_params
    ranks = [torch.distributed.get_rank(group) for group in optimizer.real_dp_process_group]
    masters = optimizer.fp32_groups_flat_partition
    inner.narrow = {master: own[rank] for master, own, rank in zip(masters, parts, ranks)}
    inner.kernels = kernels
    written = False

    def update_weights() -> None:
        nonlocal written
        if not written:  # masters were written by something else, such as a checkpoint
            return refresh()
        written = False
        bf16_optimizer.all_gather_dp_groups(
            groups_flat=optimizer.bf16_groups_flat,
            partitioned_param_groups=parts,
            dp_process_group=optimizer.real_dp_process_group,
            start_alignment_factor=optimizer.nccl_start_alignment_factor,
            allgather_bucket_size=optimizer.allgather_bucket_size,
        )

    def stepped(*_: Any) -> None:
        nonlocal written
        written = True

    inner.register_step_post_hook(stepped)
    optimizer.update_lp_params = update_weights


class SumsWithSquares:
    """Sums of gradients of a rank whose parameters no other rank has, with the squares that their norm needs.

    Args:
        totals: the sums, by group.
    """

    def __init__(self, totals: Sequence[Sequence[Tensor]], kernels: Any) -> None:
        self._kernels, self._places, end = kernels, dict[int, slice](), 0
        for total in (each for group in totals for each in group):
            begin, end = end, end + kernels.programs(total.numel())
            self._places[total.data_ptr()] = slice(begin, end)
        self._squares = totals[0][0].new_zeros(end)
        self._counted: tuple[tuple[int, ...], Tensor | None] = ((), None)

    def add(self, total: Tensor, gradient: Tensor, first: bool) -> None:
        """`total` becomes the gradient, or the sum with it."""
        self._kernels.add(total, gradient.contiguous(), self._squares[self._places[total.data_ptr()]], first)

    def norms(self, totals: Sequence[Tensor]) -> list[Tensor]:
        """The norm of some sums that have gradients, as a list of one norm. Others of the list are kept."""
        known = tuple(each.data_ptr() for each in totals if each.data_ptr() in self._places)
        if not known:
            return list(totals)
        if self._counted[0] != known:
            places = torch.zeros(len(self._squares), dtype=torch.bool)
            for each in known:
                places[self._places[each]] = True
            chosen = None if places.all() else places.nonzero().view(-1).to(self._squares.device)
            self._counted = known, chosen
        chosen = self._counted[1]
        squares = self._squares if chosen is None else self._squares[chosen]
        norm = squares.sum(dtype=torch.float64).sqrt().float().view(1)
        return [norm, *(each for each in totals if each.data_ptr() not in self._places)]
