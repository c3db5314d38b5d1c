"""Faster and smaller forms of DeepSpeed's gradient sums."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.messages.account import phase
from megatron.parallel.transport.compression import CompressedSum
from megatron.worker.beacon import REDUCE, Beacon

from .one_pass import SumsWithSquares
from .sum_of_squares import norm


def report_reductions(engine: Any, beacon: Beacon, each: bool) -> None:
    """Report reductions of gradients to the beacon. They come at the end of a backward pass, with ZeRO 0 and 1 only of
    the last one of a step. Where micro-batches are brief, only the last one is reported, and everything else counts as
    forward.

    Args:
        each: whether the gradients of each micro-batch are reduced.
    """
    reduce = engine.allreduce_gradients

    def told(*arguments: Any, **options: Any) -> None:
        if (each and not beacon.brief) or engine.is_gradient_accumulation_boundary():
            beacon.at(REDUCE)
        reduce(*arguments, **options)

    engine.allreduce_gradients = told


def sum_large_gradients_in_place(engine: Any) -> None:
    """Send gradients with more elements than a bucket as they are, not packed with those before them.

    DeepSpeed packs all. Its bf16 optimizer keeps the gradients of a group in one fp32 tensor. So every step of a large
    model ended with a second copy of nearly all gradients: 8.4 GiB for 70 billion parameters over 8 tensor parallel
    ranks and 4 stages."""
    pack = engine.allreduce_no_retain

    def reduce(
        bucket: Sequence[Tensor], dp_group: Any, numel_per_bucket: int = 500_000_000, dp_world_size: float | None = None
    ) -> None:
        for tensor in bucket:
            if tensor.numel() > numel_per_bucket:
                engine.allreduce_bucket([tensor], dp_group, dp_world_size)  # one tensor is packed by a view of it
        pack([each for each in bucket if each.numel() <= numel_per_bucket], dp_group, numel_per_bucket, dp_world_size)

    engine.allreduce_no_retain = reduce


def compress_gradients(engine: Any, wire: str, undoable: bool) -> CompressedSum:
    """Average gradients in a compressed form. At ZeRO 0 and in DeepSpeed's bf16 optimizer the engine reduces, at ZeRO 1
    and 2 the optimizer. Both pass their usual buckets.

    Args:
        engine: DeepSpeed's.
        wire: form, see `megatron.config.arithmetic.wire`.
        undoable: whether a step's update may be skipped after its gradients were summed.
    """
    sums = CompressedSum(wire, undoable=undoable)

    def by_engine(bucket: Sequence[Tensor], dp_group: Any, dp_world_size: float | None = None) -> Tensor:
        return average(engine.flatten(bucket), dp_group, dp_world_size)

    def by_optimizer(
        bucket: Sequence[Tensor],
        communication_data_type: Any,
        rank: int | None = None,
        log: Any = None,
        divide: bool = True,
        process_group: Any = None,
    ) -> Tensor:
        if rank is not None:
            raise RuntimeError("gradients that are reduced to one rank cannot be compressed")
        group = process_group if process_group is not None else engine.optimizer.dp_process_group
        return average(engine.optimizer.flatten(bucket), group, None if divide else 1)

    def average(tensor: Tensor, group: Any, ranks: float | None) -> Tensor:
        summed = sums.sum(tensor, group)
        return tensor.copy_(summed.div_(dist.get_world_size(group) if ranks is None else ranks))

    engine.allreduce_bucket = by_engine
    if hasattr(engine.optimizer, "allreduce_bucket"):
        engine.optimizer.allreduce_bucket = by_optimizer
    return sums


@contextlib.contextmanager
def reduced_once(engine: Any, beacon: Beacon) -> Iterator[None]:
    """At ZeRO 2 and 3, keep the gradients of backward passes inside this context whole, and reduce their sums at its
    end. DeepSpeed would reduce and partition each micro-batch's.

    DeepSpeed's own `coalesce_grad_reduction` does the same, but after an error too, when the other ranks do not take
    part."""
    optimizer, boundary = engine.optimizer, engine._is_gradient_accumulation_boundary
    engine.inside_no_sync_ctxt = optimizer._coalesce_grad_reduction = True
    try:
        yield
    finally:
        engine.inside_no_sync_ctxt = optimizer._coalesce_grad_reduction = False
    beacon.at(REDUCE)
    engine._is_gradient_accumulation_boundary = True
    optimizer.set_gradient_accumulation_boundary(True)
    with phase("backward"):
        if engine.zero_optimization_stage() == 3:
            engine._flush_coalesced_reduction_zero3(optimizer)
        else:
            engine._flush_coalesced_reduction_zero12(optimizer)
    engine._is_gradient_accumulation_boundary = boundary


def reduce_nothing(engine: Any, stage: int) -> None:
    """Disable the reduction of gradients, on a rank whose parameters no other rank has.

    DeepSpeed would copy them all into buckets and back: in fp32 on CPU at 160m a tenth of the step's time and as
    much memory as all gradients. ZeRO's own optimizers take their gradients in the reduction, so they keep it."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if stage == 0 or isinstance(engine.optimizer, BF16_Optimizer):
        engine.enable_backward_allreduce = engine.pipeline_enable_backward_allreduce = False


def begin_sums_with_copies(optimizer: Any, squares: SumsWithSquares | None = None) -> bool:
    """Add gradients in 16 bits directly to their fp32 sums: the first of a step is copied, later ones are added.

    DeepSpeed's bf16 optimizer makes an fp32 copy of each gradient, adds that, and fills the sums with zeros twice after
    each update. That moves 26 bytes per parameter and step, a copy only 6. It clips parameter by parameter, each with a
    kernel too short for a GPU. Here all sums of a group are one tensor, which is clipped at once. Its padding is 0.

    Args:
        squares: adds, and takes the norm from the same pass.

    Returns:
        Whether gradients may be sparse, with rows for a table.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if not isinstance(optimizer, BF16_Optimizer):
        return False
    step, to_reduce, to_norm = optimizer.step, optimizer.get_grads_for_reduction, optimizer.get_grads_for_norm
    filled = False

    def add(parameter: Any, group: int, index: int, clear_lp_grads: bool) -> None:
        if parameter.grad is None:
            return
        total, seen = optimizer.fp32_groups_gradients[group][index], optimizer.fp32_groups_has_gradients[group]
        with torch.no_grad():
            if squares is not None:
                squares.add(total, parameter.grad, first=not seen[index])
            else:
                place, gradient = total.view(parameter.grad.shape), parameter.grad
                if gradient.is_sparse:  # one row per token, which are added up in 16 bits, as in a dense gradient
                    rows, which = gradient._indices()[0].unique(return_inverse=True)
                    sums = torch.ops.aten.embedding_dense_backward(gradient._values(), which, len(rows), -1, False)
                    (place if seen[index] else place.zero_()).index_add_(0, rows, sums.to(place.dtype))
                else:
                    place.add_(gradient) if seen[index] else place.copy_(gradient)
            if clear_lp_grads:
                parameter.grad.zero_()
        parameter._hp_grad, seen[index] = total, True

    def forget() -> None:
        for group, sums in enumerate(optimizer.fp32_groups_gradients):
            optimizer.fp32_groups_has_gradients[group] = [False] * len(sums)

    def fill() -> None:  # sums without a gradient in this step still have an earlier step's
        nonlocal filled
        if filled:  # since then other ranks' gradients may have been added
            return
        for sums, seen in zip(optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients):
            for total, has in zip(sums, seen):
                if not has:
                    total.zero_()
        filled = True

    def grads_for_reduction() -> Any:
        fill()
        return to_reduce()

    def grads_for_norm(for_clipping: bool = False) -> Any:
        if for_clipping:
            return optimizer.fp32_groups_gradients_flat
        ordinary, experts = to_norm()
        if squares is not None:
            return squares.norms(ordinary), {name: squares.norms(own) for name, own in experts.items()}
        if optimizer.fp32_groups_gradients_flat[0].device.type != "cpu":
            return ordinary, experts
        # DeepSpeed then takes norms of these norms: torch's norms of large tensors are wrong on CPUs
        return [norm(each) for each in ordinary], {name: [norm(each) for each in own] for name, own in experts.items()}

    def update(*arguments: Any, **options: Any) -> Any:
        nonlocal filled
        fill()
        try:
            return step(*arguments, **options)
        finally:
            filled = False

    optimizer._update_hp_grad, optimizer.clear_hp_grads, optimizer.step = add, forget, update
    optimizer.get_grads_for_reduction, optimizer.get_grads_for_norm = grads_for_reduction, grads_for_norm
    return squares is None
