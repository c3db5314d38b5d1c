"""Mamba (Gu and Dao 2023), cut over tensor parallel ranks by channels.

Shapes: B samples, S positions, H hidden, d inner channels of this rank, R rank of the time steps, N state elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import MambaOptions, ModelSection
from megatron.parallel.collectives import enter, sum_over
from megatron.parallel.initial import ONES, Init, formula, time_steps
from megatron.parallel.linear import ColumnLinear, RowLinear
from megatron.parallel.parameters import ParameterFactory
from megatron.parallel.shard import Role, Shard

from ..counts import Counts
from ..initialisation import Initialisation
from ..kernels import choose
from ..stream import Stream
from . import mamba_kernels
from .convolution import Taps, causal_convolution, last_taps
from .documents import piece_starts
from .selective_scan import selective_scan


@dataclass
class MambaState:
    """What a piece of a sequence hands to the next: gradients may flow through it.

    Attributes:
        x: the last K - 1 inputs of the convolution, [B, K - 1, d].
        memory: [B, d, N], fp32.
        document: int [B], document of the last token, where there are documents.
    """

    x: Tensor | None = None
    memory: Tensor | None = None
    document: Tensor | None = None


class Mamba(nn.Module):
    """x [B, s, H] to its output [B, s, H]: output(scan(silu(conv(u))) * silu(z))."""

    def __init__(self, make: ParameterFactory, model: ModelSection, options: MambaOptions, init: Initialisation):
        super().__init__()
        H, N, R = model.hidden_size, options.state_size, options.rank
        self.mesh, self.options, inner = make.mesh, options, options.expand * model.hidden_size
        self.fused = choose(model.kernels, "mamba", make.device)[0] == "mamba_ssm"
        self.zx = ColumnLinear(make.scope("zx"), H, (inner, inner), init=init.hidden(H, inner), bias=options.bias)
        self.x_conv = Taps(make.scope("x_conv"), (inner,), options)
        self.dt_bc = make.parameter(
            "dt_bc.weight",
            (R + 2 * N, inner),
            role=Role.HIDDEN,
            init=init.hidden(inner, R + 2 * N),
            shard=Shard(1),
            matrices=(R, N, N),
        )
        self.dt = ColumnLinear(make.scope("dt"), R, (inner,), init=Init("uniform", R**-0.5))
        self.dt_bias = make.parameter(
            "dt_bias",
            (inner,),
            role=Role.STATE,
            shard=Shard(0),
            keep_fp32=True,
            init=time_steps(options.time_step_low, options.time_step_high, options.time_step_floor),
        )
        self.A_log = make.parameter(
            "A_log",
            (inner, N),
            role=Role.STATE,
            init=formula(lambda channel, n: np.log(n + 1.0)),
            shard=Shard(0),
            keep_fp32=True,
        )
        self.D = make.parameter("D", (inner,), role=Role.STATE, init=ONES, shard=Shard(0), keep_fp32=True)
        self.output = RowLinear(make.scope("output"), inner, H, init=init.output(inner, H), bias=options.bias)

    def forward(self, x: Tensor, stream: Stream, state: MambaState | None = None) -> Tensor:
        options, x_BSH = self.options, enter(x, self.mesh)
        z, u = self.zx(x_BSH).chunk(2, dim=-1)
        past = state or MambaState()
        starts = piece_starts(stream, state)
        fused = self.fused and state is None
        convolve, scan = (
            (mamba_kernels.causal_convolution, mamba_kernels.selective_scan)
            if fused
            else (causal_convolution, selective_scan)
        )
        v = convolve(u, *self.x_conv.taps(), past.x, starts)
        # Each rank has some of the channels that time steps, B and C are made of, and needs all of these.
        dt, B, C = sum_over(F.linear(v, self.dt_bc), self.mesh.tensor).split(
            [options.rank, options.state_size, options.state_size], dim=-1
        )
        y, memory = scan(
            v,
            z,
            self.dt(dt),
            self.dt_bias,
            self.A_log,
            self.D,
            B,
            C,
            chunk=options.chunk,
            initial_BdN=past.memory,
            starts_BS=starts,
        )
        if state is not None:
            state.x, state.memory = last_taps(u, past.x, options.convolution, starts), memory
            state.document = None if stream.documents is None else stream.documents[:, -1]
        return self.output(y)

    def new_state(self) -> MambaState:
        return MambaState()

    @staticmethod
    def counts(model: ModelSection, options: MambaOptions, sequence_length: int) -> Counts:
        H, N, R, K = model.hidden_size, options.state_size, options.rank, options.convolution
        inner = options.expand * H
        matrices = 3 * inner * H + inner * (R + 2 * N) + inner * R
        biases = (2 * inner + H if options.bias else 0) + (inner if options.convolution_bias else 0)
        made = 2 * inner + (R + 2 * N) + inner  # z and u; time steps before and after their projection, B, C
        return Counts(
            parameters=matrices + biases + inner * (K + N + 2),
            flops=2 * (matrices + inner * (K + N)),  # of the scan, the product of states and C
            activations=made + 2 * inner,  # convolved, scanned
            products=made + H + inner,
            state=inner * (N + K - 1),
        )
