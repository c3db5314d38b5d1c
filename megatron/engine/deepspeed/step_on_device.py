"""Updates of DeepSpeed's optimizers on a GPU, decided on the device: the host waits for no norm."""

import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from .sum_of_squares import sum_of_squares


def decide_on_device(optimizer: Any, inner: torch.optim.Optimizer) -> None:
    """Keep norm, clipping, and the decision to skip an update with a non-finite norm on the GPU.

    DeepSpeed reads the norm several times in a step, and the GPU is idle each time. Here torch's fused AdamW skips the
    update where the norm is not finite, and in the bf16 optimizer divides by the clipping factor. The step then counts
    as applied, with an infinite norm, at which the guard ends the run. Other optimizers and fp16 keep DeepSpeed's way.
    Of offloaded states the host, which updates them, reads the norm of all parameters.

    Args:
        optimizer: DeepSpeed's.
        inner: the torch optimizer that it calls.
    """
    if getattr(optimizer, "cpu_offload", False):
        _add_up_offloaded(optimizer)
    elif getattr(optimizer, "offload_optimizer", False):
        _add_up_offloaded_shards(optimizer)
    if not (skips_on_device(inner) and on_gpu(optimizer)):
        return
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    fused: Any = inner
    if isinstance(optimizer, bf16_optimizer.BF16_Optimizer):
        home: ModuleType = bf16_optimizer
    elif isinstance(optimizer, stage_1_and_2.DeepSpeedZeroOptimizer):
        home, optimizer.has_overflow = stage_1_and_2, _overflow_stays(optimizer, fused)
    elif isinstance(optimizer, stage3.DeepSpeedZeroOptimizer_Stage3):
        home, optimizer.get_grad_norm_direct = stage3, _norm_of_shards(optimizer)
        _order_on_device(optimizer)
        _gather_after_updates(optimizer)
    else:
        return
    step = optimizer.step

    def update(*arguments: Any, **options: Any) -> Any:
        fused.found_inf = None
        with _decided_by(fused, home):
            result = step(*arguments, **options)
        norm = optimizer._global_grad_norm
        optimizer._global_grad_norm = norm.nan_to_num(nan=torch.inf, posinf=torch.inf)
        return result

    optimizer.step = update


@contextlib.contextmanager
def _decided_by(fused: Any, home: ModuleType) -> Iterator[None]:
    """A module of DeepSpeed passes its decisions about a norm to torch's optimizer, inside this context."""
    from deepspeed.runtime import utils

    def valid(norm: Tensor) -> bool:
        """Replaces DeepSpeed's check whether the norm is invalid."""
        bad, found = (~torch.isfinite(norm)).to(torch.float32), fused.found_inf
        fused.found_inf = bad if found is None else torch.maximum(bad, found)
        return False

    def clip(input_tensors: Any, max_norm: float, global_norm: Tensor, mpu: Any = None, eps: float = 1e-6) -> Tensor:
        fused.grad_scale = ((global_norm + eps) / max_norm).clamp(min=1.0).to(torch.float32)
        return global_norm

    def with_experts(norm: Tensor, mpu: Any, expert_tensors: dict[str, Any], norm_type: float = 2) -> Tensor:
        """`expert_groups` has added the experts. DeepSpeed would return a number of the host."""
        if expert_tensors:
            raise RuntimeError("the norm of experts must be part of the norm of all")
        return norm

    def unmasked(*_: Any, **__: Any) -> None:
        """DeepSpeed would overwrite a non-finite norm with -1."""

    with contextlib.ExitStack() as stack:
        new: dict[str, Any] = {"is_invalid_grad_norm": valid, "clip_tensors_by_global_norm": clip}
        new |= {"mask_nan_or_inf_with_val_inplace": unmasked, "get_norm_with_moe_layers": with_experts}
        for name, function in new.items():
            if hasattr(home, name):
                stack.enter_context(mock.patch.object(home, name, function))
        stack.enter_context(mock.patch.object(utils, "mask_nan_or_inf_with_val_inplace", unmasked))
        stack.enter_context(_gathers_in_order())
        yield


def _overflow_stays(optimizer: Any, fused: Any) -> Any:
    """`has_overflow` of ZeRO 1 and 2 with the same message. Its result stays on the device."""

    def has_overflow(partition_gradients: bool = True) -> bool:
        found = optimizer.has_overflow_partitioned_grads_serial().byte()
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=optimizer.dp_process_group)
        optimizer._model_parallel_all_reduce(tensor=found, op=dist.ReduceOp.MAX)
        fused.found_inf = found.to(torch.float32).view(())
        return False

    return has_overflow


def _add_up_offloaded(optimizer: Any) -> None:
    """The host reads one norm of all gradients that ZeRO 1 and 2 offload, which is infinite if one is not finite.
    DeepSpeed reads norm and overflow of each."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.utils import is_model_parallel_parameter

    device = torch.device(get_accelerator().current_device_name())
    combine, overflow = optimizer.scaled_global_norm, torch.zeros(1, dtype=torch.uint8, device=device)

    def track(gradient: Tensor | None) -> None:
        if gradient is not None:
            overflow.logical_or_(optimizer._has_inf_or_nan(gradient.data))

    def has_overflow(partition_gradients: bool = True) -> bool:
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=optimizer.dp_process_group)
        optimizer._model_parallel_all_reduce(tensor=overflow, op=dist.ReduceOp.MAX)
        return False

    def norm_of_group(params: Sequence[Any]) -> Tensor:
        counted = [each for each in params if optimizer.model_parallel_rank == 0 or is_model_parallel_parameter(each)]
        norms = [optimizer.norm_for_param_grads.get(optimizer.get_param_id(each)) for each in counted]
        found = [each for each in norms if each is not None]  # of parameters that were used
        squares = torch.stack(found).square().sum().float() if found else torch.zeros((), device=device)
        dist.all_reduce(squares, group=optimizer.dp_process_group)
        optimizer._model_parallel_all_reduce(tensor=squares, op=dist.ReduceOp.SUM)
        return squares.sqrt().to(optimizer.device if optimizer.has_moe_layers else device)  # as norms of experts are

    def norm(norm_type: int = 2) -> Tensor:
        total = combine(norm_type)
        total = total.masked_fill(overflow.to(total.device).view(()).bool(), torch.inf).to(optimizer.device)
        overflow.zero_()
        return total

    optimizer.update_offload_overflow_tracker, optimizer.has_overflow = track, has_overflow
    optimizer.complete_grad_norm_calculation_for_cpu_offload, optimizer.scaled_global_norm = norm_of_group, norm


def _add_up_offloaded_shards(optimizer: Any) -> None:
    """The host reads the norms of all groups that ZeRO 3 offloads at once, after their last gradient has arrived. Until
    then it reads no gradient. DeepSpeed waits in each backward pass, for each group's norm and for each copy of
    weights. It still does for the loss scale of fp16, and where the host reads gradients in the backward pass: for
    NVMe, ZenFlow and SuperOffload."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.utils import is_model_parallel_parameter
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    early = optimizer.swap_optimizer or optimizer.zenflow or type(optimizer) is not DeepSpeedZeroOptimizer_Stage3
    if early or optimizer.dtype == torch.float16:
        return
    device = torch.device(get_accelerator().current_device_name())
    step, reassign = optimizer.step, optimizer._reassign_or_swap_out_partitioned_parameters

    def of_group(params: Sequence[Any]) -> Tensor:
        ranks = optimizer._get_param_partition_group(params[0])
        everywhere = optimizer._grad_norm_counts_every_rank(params, ranks)
        first = everywhere or optimizer.model_parallel_rank == 0
        counted = [optimizer.get_param_id(each) for each in params if first or is_model_parallel_parameter(each)]
        norms = optimizer.norm_for_param_grads
        found = [norms[each] for each in counted if each in norms]  # of parameters that were used
        squares = torch.stack(found).square().sum().float() if found else torch.zeros((), device=device)
        dist.all_reduce(squares, group=ranks)
        if not everywhere:
            optimizer._model_parallel_all_reduce(tensor=squares, op=dist.ReduceOp.SUM)
        return squares.sqrt()

    def norms_of_groups() -> list[Tensor]:
        if device.type == "cuda":
            torch.cuda.current_stream(device).wait_stream(optimizer.reduce_and_partition_stream)
        return list(torch.stack([of_group(each) for each in optimizer.fp16_groups]).cpu())

    def write(group: int) -> None:
        """Copies the masters' roundings from a buffer of their own: the next update may change masters before that."""
        weights, masters = optimizer.fp16_partitioned_groups_flat[group], optimizer.fp32_partitioned_groups_flat[group]
        if weights is None or weights.device == masters.device:
            return reassign(group)
        pinned = optimizer.offload_optimizer_pin_memory
        rounded = torch.empty(masters.shape, dtype=weights.dtype, pin_memory=pinned).copy_(masters.detach())
        weights.data.copy_(rounded, non_blocking=True)
        optimizer._unflatten_partitioned_parameters(group)

    def update(*arguments: Any, **options: Any) -> Any:
        with _gathers_in_order():
            return step(*arguments, **options)

    optimizer._get_norm_groups, optimizer._reassign_or_swap_out_partitioned_parameters = norms_of_groups, write
    _gather_after_updates(optimizer)
    if device.type == "cuda":
        _order_on_device(optimizer)
        if not optimizer.offload_param:  # a gather of parameters from the host would have its source changed
            optimizer.step = update


def _gathers_in_order() -> Any:
    """ZeRO 3 has the host wait for the gather of small weights, which is in the order of the current stream. Inside
    this context it does not."""
    from deepspeed.accelerator import get_accelerator

    return mock.patch.object(type(get_accelerator()), "resolves_data_dependency", lambda _: True)


def _norm_of_shards(optimizer: Any) -> Any:
    """`get_grad_norm_direct` of ZeRO 3 with the same messages. DeepSpeed copies each gradient to fp64, and sends a
    number from the host, which then waits. Here a norm that is not finite stays as it is."""
    from deepspeed.runtime.utils import is_model_parallel_parameter

    def of_group(gradients: Sequence[Tensor], params: Sequence[Any], norm_type: float = 2) -> Tensor:
        ranks = optimizer._get_param_partition_group(params[0])
        everywhere = optimizer._grad_norm_counts_every_rank(params, ranks)
        first = everywhere or optimizer.model_parallel_rank == 0
        counted = [each for each, of in zip(gradients, params) if first or is_model_parallel_parameter(of)]
        squares = sum_of_squares(counted) if counted else gradients[0].new_zeros((), dtype=torch.float32)
        dist.all_reduce(squares, group=ranks)
        if not everywhere:
            optimizer._model_parallel_all_reduce(tensor=squares, op=dist.ReduceOp.SUM)
        return squares.sqrt()

    return of_group


class _OrderedStream(torch.cuda.Stream):
    """A stream that the current stream waits for, where DeepSpeed has the host wait."""

    def synchronize(self) -> None:
        here = torch.cuda.current_stream(self.device)
        if here != self:
            here.wait_stream(self)


def _order_on_device(optimizer: Any) -> None:
    """At the end of each backward pass of ZeRO 3 the host waits for the stream that reduces gradients. Everything
    that reads them comes later on the current stream, so only that has to wait."""
    stream = optimizer.reduce_and_partition_stream
    optimizer.reduce_and_partition_stream = _OrderedStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def _gather_stream(optimizer: Any) -> Any:
    """The stream of ZeRO 3's gathers. None on a CPU."""
    return optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream


def order_gathers(optimizer: Any) -> None:
    """With `zero.overlap` gathers have a stream of their own. It waits for the weights that are written now: the host
    does not."""
    gathers = _gather_stream(optimizer)
    if gathers is not None:
        gathers.wait_stream(torch.cuda.current_stream())


def _gather_after_updates(optimizer: Any) -> None:
    after = optimizer._post_step

    def post_step(*arguments: Any) -> None:
        after(*arguments)
        order_gathers(optimizer)

    optimizer._post_step = post_step


def is_bf16_on_gpu(optimizer: Any) -> bool:
    """Whether this is DeepSpeed's bf16 optimizer, on a GPU."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    return isinstance(optimizer, BF16_Optimizer) and on_gpu(optimizer)


def on_gpu(optimizer: Any) -> bool:
    """Whether masters and gradients are on a GPU, and no loss scale depends on overflows."""
    masters = [getattr(optimizer, name, ()) for name in _MASTERS]
    kept = [each for group in masters for each in group if isinstance(each, Tensor)]
    offloaded = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
    half = getattr(optimizer, "dtype", None) == torch.float16
    return bool(kept) and all(each.device.type == "cuda" for each in kept) and not (offloaded or half)


_MASTERS = ("fp32_groups_flat_partition", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")


def skips_on_device(inner: torch.optim.Optimizer) -> bool:
    """Whether an optimizer takes `found_inf` and `grad_scale`, and its step does not need clipped gradients."""
    unclipped = not getattr(vars(inner).get("step"), "needs_clipped", "step" in vars(inner))
    return unclipped and isinstance(inner, torch.optim.AdamW) and bool(inner.defaults.get("fused"))
