"""What gives each token a logit per expert, in fp32 whatever the type of the stream."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.moe import MoEOptions
from megatron.parallel.collectives import sum_gradient
from megatron.parallel.initial import ZEROS
from megatron.parallel.parameters import ParameterFactory
from megatron.parallel.shard import Role

from ...initialisation import Initialisation


class LinearRouter(nn.Module):
    """x [T, H] to logits [T, E].

    It stands inside the tensor region: every tensor parallel rank routes all tokens alike, and the gradient that each
    has from its slice of the experts is partial.
    """

    def __init__(self, make: ParameterFactory, hidden_size: int, options: MoEOptions, init: Initialisation):
        super().__init__()
        self.axis, E = make.mesh.tensor, options.experts
        self.weight = make.parameter(
            "weight", (E, hidden_size), role=Role.ROUTER, init=init.hidden(hidden_size, E), keep_fp32=True)
        self.bias = None
        if options.router.bias:
            self.bias = make.parameter("bias", (E,), role=Role.BIAS, init=ZEROS, keep_fp32=True)

    def forward(self, x_TH: Tensor) -> Tensor:
        bias = None if self.bias is None else sum_gradient(self.bias, self.axis)
        return F.linear(x_TH.float(), sum_gradient(self.weight, self.axis), bias)
