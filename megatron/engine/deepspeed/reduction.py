"""How DeepSpeed sums gradients, where it does more than is needed."""

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
    """DeepSpeed reduces gradients at the end of a backward pass: with ZeRO 0 and 1 of the last one of a step. Where
    micro-batches are brief, only that one is told: what follows the others is told as the forward phase of them all.

    Args:
        engine: DeepSpeed's.
    """
    reduce, each = engine.allreduce_gradients, engine.zero_optimization_stage() > 1

    def told(*arguments: Any, **options: Any) -> None:
        if (each and not beacon.brief) or engine.is_gradient_accumulation_boundary():
            beacon.at(REDUCE)
        reduce(*arguments, **options)

    engine.allreduce_gradients = told


def sum_large_gradients_in_place(engine: Any) -> None:
    """Gradients of more elements than a bucket has are sent as they are, and not packed with what came before them.

    DeepSpeed packs all. Its bf16 optimizer keeps the gradients of a group in one fp32 tensor, so that at the end of
    every step of a large model there was a second copy of nearly all of a rank's gradients: 8.4 GiB for 70 billion
    parameters over 8 tensor parallel ranks and 4 stages.

    Args:
        engine: DeepSpeed's.
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
    """Where ranks share memory, a bucket of DeepSpeed's bf16 optimizer is averaged where its tensors are: one message
    as before, but without a copy into new memory and one back. That cost more than the sum, since the kernel clears new
    memory page by page in each step.

    Args:
        engine: DeepSpeed's.
    """
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
    """On CPUs, gradients of ZeRO 1 stay where the backward pass has left them, and are averaged there where ranks share
    memory. DeepSpeed would copy them into a bucket, and those that a rank updates out of it: memory that is new in each
    step, which costs more than the sum. Experts' gradients have another group, which this path of it does not know.

    Args:
        optimizer: DeepSpeed's.
    """
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
    """Whether this is ZeRO 1 on a CPU as most runs have it."""
    if not hasattr(optimizer, "ipg_buckets") or not hasattr(optimizer, "buffered_reduce_fallback"):
        return False
    parameters = [each for group in optimizer.bit16_groups for each in group]
    ordinary = all(each.device.type == "cpu" and getattr(each, "allreduce", True) for each in parameters)
    return ordinary and not (optimizer.partition_gradients or optimizer.overlap_comm or optimizer.cpu_offload)


def _all_average(tensors: Sequence[Tensor], group: Any) -> None:
    """One message; each tensor becomes its average over the ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch wants to rename it
        dist.all_reduce_coalesced(list(tensors), op=dist.ReduceOp.AVG, group=group)


def sum_buckets_in_place(optimizer: Any) -> None:
    """On CPUs, buckets of ZeRO 1 and 2 are summed as they are, where the parts for all ranks lie one behind the other;
    DeepSpeed copies these into another one. Other ranks' parts are then sums here too; nobody reads them.

    Args:
        optimizer: DeepSpeed's.
    """
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
    """[sum of n] what such flat tensors [n] are parts of; None where they are not next to each other."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage()._cdata == first.untyped_storage()._cdata and part.dtype == first.dtype
        if not same or part.dim() != 1 or not part.is_contiguous() or part.storage_offset() != end:
            return None
        end += part.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def compress_gradients(engine: Any, wire: str, undoable: bool) -> CompressedSum:
    """Have DeepSpeed average gradients in another form: at ZeRO 0 and in its bf16 optimizer the engine does it, at
    ZeRO 1 and 2 their optimizer. Both are given the buckets that they would have all-reduced.

    Args:
        engine: DeepSpeed's.
        wire: of `megatron.config.arithmetic.wire`.
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
    """Backward passes inside leave their gradients whole, and at the end their sums are reduced together: at ZeRO 2 and
    3, where DeepSpeed would reduce and cut each micro-batch's.

    DeepSpeed's own `coalesce_grad_reduction` does the same, but after an error too, where other ranks do not come.

    Args:
        engine: DeepSpeed's.
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
    """Tell DeepSpeed not to reduce gradients, on a rank whose parameters no other rank has.

    It would copy them all into buckets and back: in fp32 on CPU at 160m a tenth of the step's time and as much memory
    as all gradients. ZeRO's own optimizers take their gradients in the reduction, so there it has to stay.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if stage == 0 or isinstance(engine.optimizer, BF16_Optimizer):
        engine.enable_backward_allreduce = engine.pipeline_enable_backward_allreduce = False


def begin_sums_with_copies(optimizer: Any) -> None:
    """Gradients in 16 bits go straight to their fp32 sums: the first of a step is copied there, later ones are added.

    DeepSpeed's bf16 optimizer makes an fp32 copy of each gradient, adds that, and fills the sums with zeros after each
    update, twice: 26 bytes per parameter and step, where a copy moves 6. And it clips parameter by parameter, each a
    kernel too short for a GPU. All sums of a group are one tensor, which is clipped at once; its padding is 0.
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

    def fill() -> None:  # what no gradient came to has that of an earlier step
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
        # DeepSpeed takes norms again, of what are norms already: torch's of large tensors are wrong on CPUs
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
