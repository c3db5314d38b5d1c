"""A matrix of low rank, as RWKV adds them to its data-dependent quantities."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megatron.parallel.layers.collectives import sum_gradient
from megatron.parallel.layers.linear import ColumnLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ZEROS, Init
from megatron.parallel.layout.shard import Growth, Role


class LowRank(nn.Module):
    """up(activation(down x)): [B, S, H] to this rank's channels of [B, S, outputs]. The rank is computed by all.

    `down` starts at 0, so that at first the matrix does nothing. Both have the role `state`: no weight decay.
    """

    def __init__(
        self,
        make: ParameterFactory,
        inputs: int,
        rank: int,
        outputs: int,
        init: Init,
        activation: Callable[[Tensor], Tensor] | None = None,
    ):
        super().__init__()
        self.activation = activation
        self.down = Whole(make.scope("down"), inputs, rank)
        self.up = ColumnLinear(make.scope("up"), rank, (outputs,), init=init, role=Role.STATE)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.down(x)
        return self.up(inner if self.activation is None else self.activation(inner))


class Whole(nn.Module):
    """A matrix that every tensor parallel rank has whole, and each uses for its part."""

    def __init__(self, make: ParameterFactory, inputs: int, outputs: int):
        super().__init__()
        self.axis = make.mesh.tensor
        self.weight = make.parameter("weight", (outputs, inputs), role=Role.STATE, init=ZEROS, growth=Growth.INPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, sum_gradient(self.weight, self.axis))
