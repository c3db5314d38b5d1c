"""Faster and smaller forms of DeepSpeed's gradient sums."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.messages.account import phase
from megatron.parallel.transport.compression import CompressedSum
from megatron.parallel.transport.routes import installed_routes
from megatron.parallel.transport.shared_sums import averages
from megatron.worker.beacon import REDUCE, Beacon

from .sum_of_squares import norm


def tell_of_reductions(engine: Any, beacon: Beacon) -> None:
    """Report reductions of gradients to the beacon. DeepSpeed reduces at the end of a backward pass, with ZeRO 0 and 1
    only of the last one of a step. Where micro-batches are brief, only the last one is reported, and everything else
    counts as forward."""
    reduce, each = engine.allreduce_gradients, engine.zero_optimization_stage() > 1

    def told(*arguments: Any, **options: Any) -> None:
        if (each and not beacon.brief) or engine.is_gradient_accumulation_boundary():
            beacon.at(REDUCE)
        reduce(*arguments, **options)

    engine.allreduce_gradients = told


def sum_large_gradients_in_place(engine: Any) -> None:
    """Send gradients with more elements than a bucket as they are, not packed with those before them.

    DeepSpeed packs all. Its bf16 optimizer keeps the gradients of a group in one fp32 tensor. So every step of a large
    model ended with a second copy of nearly all gradients: 8.4 GiB for 70 billion parameters over 8 tensor parallel
    ranks and 4 stages.
    """
    pack = engine.allreduce_no_retain

    def reduce(
        bucket: Sequence[Tensor], dp_group: Any, numel_per_bucket: int = 500_000_000, dp_world_size: float | None = None
    ) -> None:
        for tensor in bucket:
            if tensor.numel() > numel_per_bucket:
                engine.allreduce_bucket([tensor], dp_group, dp_world_size)  # one tensor is packed by a view of it
        pack([each for each in bucket if each.numel() <= numel_per_bucket], dp_group, numel_per_bucket, dp_world_size)

    engine.allreduce_no_retain = reduce


def average_groups_in_place(engine: Any) -> None:
    """Where ranks share memory, average a bucket of DeepSpeed's bf16 optimizer in place: still one message, but without
    a copy to new memory and back. That cost more than the sum, since the kernel clears new memory page by page in each
    step."""
    pack = engine.allreduce_and_copy
    if not hasattr(engine.optimizer, "get_grads_for_reduction"):  # the gradients of each group are one tensor
        return

    def usual(bucket: Sequence[Tensor], ranks: int, divisor: float | None) -> bool:
        return (
            all(each.dtype == engine.communication_data_type for each in bucket)
            and engine.gradient_average
            and engine.postscale_gradients()
            and engine.gradient_predivide_factor() == 1.0
            and divisor in (None, ranks)
            and installed_routes() is None  # tables do not know such sums
        )

    def average(bucket: Sequence[Tensor], dp_group: Any, dp_world_size: float | None = None) -> None:
        if not usual(bucket, dist.get_world_size(dp_group), dp_world_size) or not averages(dp_group, *bucket):
            pack(bucket, dp_group, dp_world_size)
        else:
            _all_average(bucket, dp_group)

    engine.allreduce_and_copy = average


def average_gradients_in_place(optimizer: Any) -> None:
    """On CPUs, average gradients of ZeRO 1 in place where ranks share memory. DeepSpeed would copy them to a bucket,
    and the rank's own part from there: new memory in each step, which costs more than the sum. Experts' gradients have
    another group, which this path does not know."""
    if not _keeps_gradients_whole(optimizer):
        return
    optimizer.contiguous_gradients = False
    pack = optimizer.allreduce_and_copy

    def average(bucket: Sequence[Tensor], dtype: Any, **options: Any) -> None:
        group = optimizer.dp_process_group
        plain = options.get("rank") is None and options.get("process_group") is None and optimizer.gradient_average
        same = all(each.dtype == dtype for each in bucket) and optimizer.sequence_parallel_size == 1
        if plain and same and installed_routes() is None and averages(group, *bucket):
            _all_average(bucket, group)
        else:
            pack(bucket, dtype, **options)

    optimizer.allreduce_and_copy = average


def _keeps_gradients_whole(optimizer: Any) -> bool:
    """Whether this is the usual ZeRO 1 on a CPU."""
    if not hasattr(optimizer, "ipg_buckets") or not hasattr(optimizer, "buffered_reduce_fallback"):
        return False
    parameters = [each for group in optimizer.bit16_groups for each in group]
    ordinary = all(each.device.type == "cpu" and getattr(each, "allreduce", True) for each in parameters)
    return ordinary and not (optimizer.partition_gradients or optimizer.overlap_comm or optimizer.cpu_offload)


def _all_average(tensors: Sequence[Tensor], group: Any) -> None:
    """Replace tensors by their averages over the ranks, in one message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch wants to rename it
        dist.all_reduce_coalesced(list(tensors), op=dist.ReduceOp.AVG, group=group)


def sum_buckets_in_place(optimizer: Any) -> None:
    """On CPUs, sum buckets of ZeRO 1 and 2 in place, if the parts for all ranks are adjacent. DeepSpeed copies them to
    another bucket. Other ranks' parts become sums here too, which are not used."""
    if not hasattr(optimizer, "allreduce_and_scatter"):
        return
    scatter = optimizer.allreduce_and_scatter

    def whole(bucket: Sequence[Any], dtype: Any, numel_per_bucket: int = 500_000_000, **options: Any) -> None:
        elsewhere = any(output is not None for each in bucket for output in each[2:])
        joined = None if elsewhere else one_behind_the_other([each[1] for each in bucket])
        plain = joined is not None and joined.dtype == dtype and not options.get("divide", True)
        plain = plain and bucket[0][1].device.type == "cpu"
        if joined is None or not plain or joined.numel() > numel_per_bucket or optimizer.sequence_parallel_size > 1:
            scatter(bucket, dtype, numel_per_bucket=numel_per_bucket, **options)
            return
        group = options.get("process_group")
        dist.all_reduce(joined, group=optimizer.dp_process_group if group is None else group)

    optimizer.allreduce_and_scatter = whole


def one_behind_the_other(parts: Sequence[Tensor]) -> Tensor | None:
    """[sum of n] the tensor that adjacent flat tensors [n] are parts of. None where they are not adjacent."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage()._cdata == first.untyped_storage()._cdata and part.dtype == first.dtype
        if not same or part.dim() != 1 or not part.is_contiguous() or part.storage_offset() != end:
            return None
        end += part.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


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
    part.
    """
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
    much memory as all gradients. ZeRO's own optimizers take their gradients in the reduction, so they keep it.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if stage == 0 or isinstance(engine.optimizer, BF16_Optimizer):
        engine.enable_backward_allreduce = engine.pipeline_enable_backward_allreduce = False


def begin_sums_with_copies(optimizer: Any) -> None:
    """Add gradients in 16 bits directly to their fp32 sums: the first of a step is copied, later ones are added.

    DeepSpeed's bf16 optimizer makes an fp32 copy of each gradient, adds that, and fills the sums with zeros twice after
    each update. That moves 26 bytes per parameter and step, a copy only 6. It clips parameter by parameter, each with a
    kernel too short for a GPU. Here all sums of a group are one tensor, which is clipped at once. Its padding is 0.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if not isinstance(optimizer, BF16_Optimizer):
        return
    step, to_reduce, to_norm = optimizer.step, optimizer.get_grads_for_reduction, optimizer.get_grads_for_norm
    filled = False

    def add(parameter: Any, group: int, index: int, clear_lp_grads: bool) -> None:
        if parameter.grad is None:
            return
        total, seen = optimizer.fp32_groups_gradients[group][index], optimizer.fp32_groups_has_gradients[group]
        with torch.no_grad():
            place = total.view(parameter.grad.shape)
            place.add_(parameter.grad) if seen[index] else place.copy_(parameter.grad)
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
