"""On a GPU, DeepSpeed's bf16 optimizer reads and writes 36 bytes per parameter and step: two passes.

The first copies or adds a gradient to its fp32 sum (6 bytes, 10 for later micro-batches) and takes the norm from it.
The second clips, does AdamW (28 bytes) and writes the 16-bit weights (2 bytes). In passes of their own the norm reads
4 bytes more, and the 16-bit weights 4."""

from collections.abc import Sequence
from typing import Any
from warnings import warn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from .step_on_device import is_bf16_on_gpu, skips_on_device

MOST = 64  # gradients of one of torch's kernels
KEPT = 1 << 24  # elements of gradients that wait for their kernel: a GPU's cache may still have them then


def passes_of_adamw(optimizer: Any, inner: torch.optim.Optimizer) -> Any | None:
    """The module with the kernels, where they can be used and compiled.

    Args:
        optimizer: DeepSpeed's.
        inner: the torch optimizer that it calls.
    """
    if not (hasattr(inner, "kernels") and skips_on_device(inner) and is_bf16_on_gpu(optimizer)):
        return None
    master = optimizer.fp32_groups_flat_partition[0]
    if is_fake(master):
        return None
    try:
        from . import adamw_kernels

        adamw_kernels.try_them(master.device, {each.dtype for each in optimizer.bf16_groups_flat})
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


class SumsInFewKernels:
    """Adds gradients of several parameters to their sums with one kernel, and keeps the gradients until then.

    Args:
        kernels: of `passes_of_adamw`, for fp32 sums that stay where they are. None for torch's.
        squares: fp32, for sums of squares. None without any.
    """

    def __init__(self, kernels: Any | None, squares: Tensor | None = None) -> None:
        self._kernels, self._squares, self._places = kernels, squares, dict[int, int]()
        self._most = MOST if kernels is None else kernels.MOST
        self._known: dict[tuple[tuple[int, bool], ...], Any] = {}
        self._waiting: dict[int, tuple[Tensor, Tensor, bool]] = {}
        self._elements = 0

    def add(self, total: Tensor, gradient: Tensor, first: bool) -> None:
        """`total` becomes the gradient, or the sum with it, before the backward pass returns. Outside of one: now."""
        inside = torch._C._current_graph_task_id() >= 0
        if inside and not self._waiting:
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)
        if total.data_ptr() in self._waiting or len(self._waiting) == self._most:
            self.flush()
        self._waiting[total.data_ptr()] = total, gradient.reshape(-1), first
        self._elements += total.numel()
        if self._elements >= KEPT or not inside:
            self.flush()

    def flush(self) -> None:
        """Add all gradients that are kept."""
        waiting, self._waiting, self._elements = self._waiting, {}, 0
        for dtype in {gradient.dtype: None for _, gradient, _ in waiting.values()}:
            chosen = {place: each for place, each in waiting.items() if each[1].dtype == dtype}
            key = tuple((place, first) for place, (*_, first) in chosen.items())
            totals, gradients, firsts = zip(*chosen.values())
            if self._kernels is None:
                _add_in_torch(totals, gradients, firsts)
                continue
            if key not in self._known:
                places = [self._places.get(place, -1) for place in chosen]
                self._known[key] = self._kernels.Sums.of(totals, places, firsts)
            self._kernels.add(self._known[key], gradients, totals[0] if self._squares is None else self._squares)


def _add_in_torch(totals: Sequence[Tensor], gradients: Sequence[Tensor], firsts: Sequence[bool]) -> None:
    for begins, into in ((True, torch._foreach_copy_), (False, torch._foreach_add_)):
        chosen = [place for place, first in enumerate(firsts) if first is begins]
        if chosen:
            into([totals[place] for place in chosen], [gradients[place] for place in chosen])


class SumsWithSquares(SumsInFewKernels):
    """Sums of gradients of a rank whose parameters no other rank has, with the squares that their norm needs.

    Args:
        totals: the sums, by group.
    """

    def __init__(self, totals: Sequence[Sequence[Tensor]], kernels: Any) -> None:
        parts, end = dict[int, slice](), 0
        for total in (each for group in totals for each in group):
            begin, end = end, end + kernels.programs(total.numel())
            parts[total.data_ptr()] = slice(begin, end)
        self._of_all, self._parts = totals[0][0].new_zeros(end), parts
        super().__init__(kernels, self._of_all)
        self._places = {total: part.start for total, part in parts.items()}
        self._counted: tuple[tuple[int, ...], Tensor | None] = ((), None)

    def norms(self, totals: Sequence[Tensor]) -> list[Tensor]:
        """The norm of some sums that have gradients, as a list of one norm. Others of the list are kept."""
        known = tuple(each.data_ptr() for each in totals if each.data_ptr() in self._parts)
        if not known:
            return list(totals)
        if self._counted[0] != known:
            places = torch.zeros(len(self._of_all), dtype=torch.bool)
            for each in known:
                places[self._parts[each]] = True
            chosen = None if places.all() else places.nonzero().view(-1).to(self._of_all.device)
            self._counted = known, chosen
        chosen = self._counted[1]
        squares = self._of_all if chosen is None else self._of_all[chosen]
        norm = squares.sum(dtype=torch.float64).sqrt().float().view(1)
        return [norm, *(each for each in totals if each.data_ptr() not in self._parts)]
