"""The expert that every token uses (DeepSeekMoE, Dai et al. 2024), inside the same tensor region as the others."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kinds.common.activations import ACTIVATIONS
from megatron.kinds.moe.options import MoEOptions
from megatron.model.initialisation import Initialisation
from megatron.parallel.layers.collectives import sum_gradient
from megatron.parallel.layers.linear import ColumnLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Role, Shard


class PartialLinear(nn.Module):
    """This rank's slice of [..., inputs] to its part of the sum [..., outputs]; the tensor region stays open."""

    def __init__(self, make: ParameterFactory, inputs: int, outputs: int, init: Initialisation):
        super().__init__()
        self.weight = make.parameter(
            "weight",
            (outputs, inputs),
            role=Role.OUTPUT,
            init=init.output(inputs, outputs),
            shard=Shard(1),
            matrices=(outputs,),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Gate(nn.Module):
    """x [T, H] to a number in (0, 1) per token, fp32 [T, 1]."""

    def __init__(self, make: ParameterFactory, hidden_size: int, init: Initialisation):
        super().__init__()
        self.axis = make.mesh.tensor
        self.weight = make.parameter(
            "weight", (1, hidden_size), role=Role.ROUTER, init=init.reads(hidden_size, 1), keep_fp32=True
        )

    def forward(self, x_TH: Tensor) -> Tensor:
        return F.linear(at_least_fp32(x_TH), sum_gradient(self.weight, self.axis)).sigmoid()


class SharedExpert(nn.Module):
    """x [T, H] to this rank's part of the shared expert's output, [T, H]."""

    def __init__(self, make: ParameterFactory, hidden_size: int, options: MoEOptions, init: Initialisation):
        super().__init__()
        H, width = hidden_size, options.shared_size
        self.gated, self.activation = options.gated, ACTIVATIONS[options.activation]
        name, parts = ("gate_up", (width, width)) if options.gated else ("up", (width,))
        self.up = ColumnLinear(make.scope(name), H, parts, init=init.hidden(H, width))
        self.down = PartialLinear(make.scope("down"), width, H, init)
        self.gate = Gate(make.scope("gate"), H, init) if options.shared_gate else None

    def forward(self, x_TH: Tensor) -> Tensor:
        h = self.up(x_TH)
        if self.gated:
            gate, up = h.chunk(2, dim=-1)
            h = self.activation(gate) * up
        else:
            h = self.activation(h)
        y_TH = self.down(h)
        return y_TH if self.gate is None else (at_least_fp32(y_TH) * self.gate(x_TH)).to(y_TH.dtype)
