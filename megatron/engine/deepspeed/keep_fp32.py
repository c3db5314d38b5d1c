"""Parameters that stay in fp32 in an engine of bf16 or fp16.

DeepSpeed 0.19.8 casts every parameter of a module (its `keep_in_fp32_modules` is only for buffers), and under ZeRO 3
puts them into one buffer of one type. Its optimizers treat each parameter group in its own type, and
`parameter_groups` separates types. So only two steps of its start are changed, while an engine is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megatron.parallel.layers.parameters import logical_of


class TypedBuffers:
    """One buffer per type, in the place of DeepSpeed's flat buffer of all partitions.

    Args:
        make: makes a contiguous buffer of tensors of one type and lets them point into it.
        tensors: in the order in which DeepSpeed counts their elements.
    """

    def __init__(self, make: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]):
        sizes = [(tensor.dtype, tensor.numel()) for tensor in tensors]
        self.buffers = {
            dtype: make([t for t in tensors if t.dtype == dtype]) for dtype in dict.fromkeys(d for d, _ in sizes)
        }
        self.place: dict[int, tuple[torch.dtype, int]] = {}  # element number among all -> (type, number among its type)
        begin, used = 0, dict.fromkeys(self.buffers, 0)
        for dtype, size in sizes:
            self.place.setdefault(begin, (dtype, used[dtype]))
            begin, used[dtype] = begin + size, used[dtype] + size

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """A run of elements of one type that begins with a tensor, such as a parameter group."""
        dtype, begin = self.place[start]
        return self.buffers[dtype].narrow(dim, begin, length)


@contextlib.contextmanager
def keeping_fp32(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """An engine that is built inside this context keeps parameters with `keep_fp32` in fp32."""
    kept = [parameter for parameter in parameters if logical_of(parameter).keep_fp32]
    if not kept:
        yield
        return
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage3

    cast, defragment = DeepSpeedEngine._cast_module_mixed_precision, stage3.defragment

    def cast_others(engine: Any, *args: Any, **kwargs: Any) -> None:
        values = [parameter.data for parameter in kept]
        cast(engine, *args, **kwargs)
        for parameter, value in zip(kept, values):
            parameter.data = value

    with (
        mock.patch.object(DeepSpeedEngine, "_cast_module_mixed_precision", cast_others),
        mock.patch.object(stage3, "defragment", lambda tensors: TypedBuffers(defragment, tensors)),
    ):
        yield
