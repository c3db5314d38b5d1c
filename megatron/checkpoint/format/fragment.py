"""Fragments: the part of a logical tensor that a rank owns.

With tensor parallelism a rank has a *shard* of a tensor. With ZeRO it owns a piece of that shard, cut anywhere. Both
are elements [start, start + length) of the flattened (row-major) local shard, for one state.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from ...parallel.layout.shard import LogicalTensor

WEIGHT = "weight"  # in the type that the forward pass uses
MASTER = "master"  # the fp32 copy that the optimizer updates
AVERAGE = "average"  # fp32, of the weights over steps
TRAINED = "trained"  # fp32, the point of the gradients, for optimizers that take them elsewhere than at the master


@dataclass(frozen=True)
class FragmentSpec:
    """Elements start ... start + length of shard `tensor_rank` of `tensor_ranks`, flattened, without their values.

    The state is "weight", "master", "exp_avg", "exp_avg_sq", "momentum_buffer" or another with one value per element.

    Raises:
        ValueError: the range does not lie in the shard.
    """

    tensor: LogicalTensor
    state: str
    tensor_rank: int
    tensor_ranks: int
    start: int
    length: int

    def __post_init__(self) -> None:
        if not 0 <= self.tensor_rank < self.tensor_ranks:
            raise ValueError(f"{self.label}: tensor rank {self.tensor_rank} is not one of {self.tensor_ranks}")
        if self.start < 0 or self.length < 0 or self.stop > self.shard_size:
            raise ValueError(
                f"{self.label}: elements {self.start} to {self.stop} are not in a shard of {self.shard_size}"
            )

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def shard_size(self) -> int:
        """Elements of the whole local shard."""
        return prod(self.tensor.local_shape(self.tensor_rank, self.tensor_ranks))

    @property
    def label(self) -> str:
        return f"{self.tensor.name} ({self.state})"

    @classmethod
    def whole(cls, tensor: LogicalTensor, state: str, tensor_rank: int = 0, tensor_ranks: int = 1) -> FragmentSpec:
        """All of a shard. By default all of the logical tensor."""
        return cls(tensor, state, tensor_rank, tensor_ranks, 0, prod(tensor.local_shape(tensor_rank, tensor_ranks)))

    def part(self, offset: int, length: int) -> FragmentSpec:
        """`length` elements from `offset` (counted from this fragment's start)."""
        return FragmentSpec(self.tensor, self.state, self.tensor_rank, self.tensor_ranks, self.start + offset, length)

    def parts(self, length: int) -> list[FragmentSpec]:
        """This range in pieces of at most `length` elements."""
        return [self.part(offset, min(length, self.length - offset)) for offset in range(0, self.length, length)]


@dataclass(frozen=True, eq=False)
class Fragment:
    """A fragment with its values, a contiguous 1-D tensor on any device."""

    tensor: LogicalTensor
    state: str
    tensor_rank: int
    tensor_ranks: int
    start: int
    data: torch.Tensor

    def __post_init__(self) -> None:
        if self.data.dim() != 1 or not self.data.is_contiguous():
            raise ValueError(
                f"{self.tensor.name} ({self.state}): a fragment's data must be 1-D and contiguous, "
                f"not {tuple(self.data.shape)} with strides {self.data.stride()}"
            )

    @property
    def spec(self) -> FragmentSpec:
        return FragmentSpec(self.tensor, self.state, self.tensor_rank, self.tensor_ranks, self.start, self.data.numel())

    @classmethod
    def of(cls, spec: FragmentSpec, data: torch.Tensor) -> Fragment:
        if data.numel() != spec.length:
            raise ValueError(f"{spec.label}: {data.numel()} values for a range of {spec.length}")
        return cls(spec.tensor, spec.state, spec.tensor_rank, spec.tensor_ranks, spec.start, data)

    @classmethod
    def empty(cls, spec: FragmentSpec, dtype: torch.dtype, device: torch.device | str = "cpu") -> Fragment:
        return cls.of(spec, torch.empty(spec.length, dtype=dtype, device=device))
