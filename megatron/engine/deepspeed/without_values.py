"""DeepSpeed on tensors without values, in a process group that sends nothing.

torch's fake tensors only have shapes, types and devices. Its fake process group takes every message and delivers
none. This module provides the values and messages that DeepSpeed reads: no gradient overflows, all ranks agree, and the
stage before sends a stream of the form that this stage expects."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode

from .stages import stream_buffers

# Views. ZeRO 3 cuts each weight into parts for all ranks, whenever it gathers or reduces it.
_aten = torch.ops.aten
VIEWS = frozenset((
    _aten.as_strided.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
))


class Values(TorchDispatchMode):
    """Returns 0 for values that a tensor does not have. Computes shapes of grouped products as on GPUs in all types
    (torch's version without values only takes bf16). Makes views and flat buffers itself: torch would look up each
    in a cache of operations, by the forms of all parts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VIEWS and type(args[0]) is FakeTensor and args[0].constant is None:
            return _view(args[0], func, args, kwargs or {})
        if func is _aten.cat.default and _are_flat(args[0]):
            return args[0][0].new_empty(sum(each.shape[0] for each in args[0]))
        if func is torch.ops.aten._local_scalar_dense.default and getattr(args[0], "constant", None) is None:
            dtype = args[0].dtype
            return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0
        if func is torch.ops.aten._grouped_mm.default:
            ends = args[2] if len(args) > 2 else (kwargs or {}).get("offs")
            return _grouped_product(args[0], args[1], ends)
        return func(*args, **(kwargs or {}))


def _view(base: FakeTensor, func: Any, args: Any, kwargs: Any) -> FakeTensor:
    """A view as `FakeTensorMode` makes it: by the operation on shapes, in the same storage."""
    with in_kernel_invocation_manager(base.fake_mode):
        shape = func(*args, **kwargs)
    return FakeTensor(base.fake_mode, shape, base.fake_device)


def _are_flat(parts: Sequence[Tensor]) -> bool:
    """Whether they are vectors of one type without known values."""
    dtype = parts[0].dtype
    return all(type(t) is FakeTensor and t.dim() == 1 and t.dtype is dtype and t.constant is None for t in parts)


def _grouped_product(a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
    """Result of `aten._grouped_mm`: its rows begin at multiples of 16 bytes. Groups are parts of the dimension that
    only one factor has. For two matrices, each group has its own product."""
    unit = 16 // a.element_size()
    rows, columns = a.shape[-2], b.shape[-1]
    padded = -(-columns // unit) * unit
    if a.dim() == b.dim():
        groups = len(a) if ends is None or a.dim() == 3 else len(ends)
        return a.new_empty_strided((groups, rows, columns), (rows * padded, padded, 1))
    return a.new_empty_strided((rows, columns), (padded, 1))


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Tensors made inside this context have no values, and DeepSpeed accepts them.

    `torch.distributed` must have been initialised with the backend "fake".
    """
    import torch.distributed._tools.fake_collectives  # noqa: F401  shapes of collectives' results
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3, utils

    def agreed(numbers: list[int]) -> None:
        """All ranks have the same."""

    def gathered(objects: list[Any], own: Any, group: Any = None) -> None:
        """All ranks have what this rank has. torch would pickle it into a tensor, which has no bytes here."""
        objects[:] = [own] * len(objects)

    replaced: list[tuple[Any, str, Any]] = [
        (nn.Module, "_apply", _apply),
        (PipelineEngine, "_recv_tensor_meta", _expected_stream),
        (torch.distributed, "all_gather_object", gathered),
    ]
    for module in (partition_parameters, partitioned_param_coordinator, stage3, utils):
        replaced.append((module, "assert_ints_same_as_other_ranks", agreed))
    with contextlib.ExitStack() as stack:
        for where, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(where, name, stand_in))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Values())
        yield


def _apply(self: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` as for tensors with values: parameters stay, their data change. For tensors without values
    it would swap tensors, which fails for parameters that are referred to elsewhere."""
    for child in self.children():
        child._apply(change)
    with torch.no_grad():
        for parameter in self._parameters.values():
            if parameter is not None:
                parameter.data = change(parameter.data)
                if parameter.grad is not None:
                    parameter.grad.data = change(parameter.grad.data)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = change(buffer)
    return self


def _expected_stream(self: Any, stage: int) -> tuple[Tensor, ...]:
    """Buffers for the stream from the stage before, in its form at this stage's border."""
    plan = self.module.plan
    training, layout = plan.config.training, plan.mesh.layout
    sizes = training.micro_batch_size, training.sequence_length // layout.context
    buffers = stream_buffers(plan, self.module.parts[plan.mesh.pipeline.rank], *sizes)
    return tuple(self._allocate_or_extend_buffers(i, list(each.shape), each.dtype) for i, each in enumerate(buffers))
