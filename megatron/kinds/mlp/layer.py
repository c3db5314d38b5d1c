"""The position-wise feed-forward network, plain or gated, cut over tensor parallel ranks by its width."""

import math

from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.activations import ACTIVATIONS, SAVED, scaled, xielu
from megatron.kinds.mlp.options import MLPOptions
from megatron.model.costs.traffic import Enter, Event, TensorAxis, column_events, row_events
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import sum_gradient
from megatron.parallel.layers.linear import ColumnLinear, RowLinear, entered
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import Init
from megatron.parallel.layout.shard import Role

# softplus(0.203) = 0.8 = 1/2 + softplus(-1.050): both curvatures of xIELU begin at 0.8
ALPHAS = {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3))}


class MLP(nn.Module):
    """x [B, s, H] to down(activation(up x)), or down(activation(gate x) * up x), [B, s, H], and multipliers."""

    compiled_parts = ("activated",)

    def __init__(self, make: ParameterFactory, model: ModelSection, options: MLPOptions, init: Initialisation):
        super().__init__()
        self.mesh, self.options = make.mesh, options
        self.trained = options.activation == "xielu"
        for each, start in ALPHAS.items() if self.trained else ():
            init_ = Init("constant", start)
            self.register_parameter(each, make.parameter(each, (1,), role=Role.BIAS, init=init_))
        H, width = model.hidden_size, options.hidden_size
        name, parts = ("gate_up", (width, width)) if options.gated else ("up", (width,))
        self.up = ColumnLinear(make.scope(name), H, parts, init=init.hidden(H, width), bias=options.bias)
        self.down = RowLinear(make.scope("down"), width, H, init=init.output(width, H), bias=options.bias)

    def forward(self, x: Tensor, stream: Stream, cache: object = None, adapter: nn.Module | None = None) -> Tensor:
        """`adapter`: a module of one of several layers that share this module, added to its first matrix."""
        x, (h,) = entered(x, (self.up,), self.mesh)
        h = h if adapter is None else h + adapter(x)
        # every rank has some of the channels
        alphas = [sum_gradient(getattr(self, each), self.mesh.tensor) for each in ALPHAS] if self.trained else []
        return scaled(self.down(self.activated(h, *alphas)), self.options.output_multiplier)

    def activated(self, h: Tensor, *alphas: Tensor) -> Tensor:
        """Input of the second matrix, from the result of the first."""
        gate, up = h.chunk(2, dim=-1) if self.options.gated else (h, None)
        gate = scaled(gate, self.options.gate_multiplier)
        h = xielu(gate, *alphas) if alphas else ACTIVATIONS[self.options.activation](gate)
        return h if up is None else h * up

    @staticmethod
    def sends(model: ModelSection, options: MLPOptions, tensor: TensorAxis) -> list[Event]:
        width = options.hidden_size
        products = column_events(tensor, (2 if options.gated else 1) * width // tensor.ranks)
        return [Enter(model.hidden_size), *products, *row_events(model.hidden_size, options.bias, tensor, width)]

    @staticmethod
    def counts(model: ModelSection, options: MLPOptions, sequence_length: int) -> Counts:
        H, width = model.hidden_size, options.hidden_size
        matrices = (3 if options.gated else 2) * H * width
        bias = (2 if options.gated else 1) * width + H if options.bias else 0
        copied = options.gated and options.gate_multiplier != 1.0  # gate and up are views of one tensor, which is kept
        return Counts(
            parameters=matrices + bias + (len(ALPHAS) if options.activation == "xielu" else 0),
            flops=2 * matrices,
            activations=(SAVED[options.activation][options.gated] + copied) * width,
            products=(2 if options.gated else 1) * width + H,
        )
