"""Routers: each token's logits of the experts, in fp32 for every type of the stream.

A router is inside of the tensor region: every tensor parallel rank routes all tokens alike, and the gradient from its
slice of the experts is partial.

Shapes: B samples, S positions, T = B S tokens, H hidden, E classes (the experts, and perhaps none), R router channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.moe.options import MoEOptions
from megatron.model.initialisation import Initialisation
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import sum_gradient
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ONES, ZEROS
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Growth, Role

from .choice import classes

STATE = "router_state"  # the side channel of MLP routers


class LinearRouter(nn.Module):
    """x [B, S, H] to (logits [T, E], no channels)."""

    def __init__(self, make: ParameterFactory, model: ModelSection, options: MoEOptions, init: Initialisation):
        super().__init__()
        self.axis, H, E = make.mesh.tensor, model.hidden_size, classes(options)
        self.weight = make.parameter("weight", (E, H), role=Role.ROUTER, init=init.reads(H, E), keep_fp32=True)
        self.bias = None
        if options.router.bias:
            self.bias = make.parameter("bias", (E,), role=Role.BIAS, init=ZEROS, keep_fp32=True)

    def forward(self, x_BSH: Tensor, stream: Stream) -> tuple[Tensor, dict[str, Tensor]]:
        bias = None if self.bias is None else sum_gradient(self.bias, self.axis)
        return F.linear(at_least_fp32(x_BSH.flatten(0, 1)), sum_gradient(self.weight, self.axis), bias), {}


class MLPRouter(nn.Module):
    """x [B, S, H] to (logits [T, E], the state [B, S, R] for the next router), as in ZAYA1 (Anthony et al. 2025).

    state = down(x) + scale * (state of the MoE layer before), logits = out(gelu(fc2(gelu(fc1(norm(state)))))). Between
    layers the state has the type of the stream, on one rank as on several.
    """

    def __init__(self, make: ParameterFactory, model: ModelSection, options: MoEOptions, init: Initialisation):
        super().__init__()
        self.axis, self.epsilon, H = make.mesh.tensor, model.norm.epsilon, model.hidden_size
        R, E = options.router.width, classes(options)

        def matrix(name: str, rows: int, columns: int) -> nn.Parameter:
            start, growth = init.inside(columns, rows), Growth.OUTPUTS
            if name == "down":
                start, growth = init.reads(columns, rows), Growth.INPUTS
            return make.parameter(
                f"{name}.weight", (rows, columns), role=Role.ROUTER, init=start, keep_fp32=True, growth=growth
            )

        def bias(name: str) -> nn.Parameter:
            return make.parameter(f"{name}.bias", (R,), role=Role.BIAS, init=ZEROS, keep_fp32=True)

        self.down, self.down_bias = matrix("down", R, H), bias("down")
        self.scale = None
        if options.router.average:
            self.scale = make.parameter("state_scale", (R,), role=Role.NORM, init=ONES, keep_fp32=True)
        self.norm = make.parameter("norm.weight", (R,), role=Role.NORM, init=ONES, keep_fp32=True)
        self.fc1, self.fc1_bias = matrix("fc1", R, R), bias("fc1")
        self.fc2, self.fc2_bias = matrix("fc2", R, R), bias("fc2")
        self.out = matrix("out", E, R)

    def forward(self, x_BSH: Tensor, stream: Stream) -> tuple[Tensor, dict[str, Tensor]]:
        shared = {name: sum_gradient(p, self.axis) for name, p in self.named_parameters(recurse=False)}
        state = F.linear(at_least_fp32(x_BSH), shared["down"], shared["down_bias"])
        if self.scale is not None:
            state = state + shared["scale"] * at_least_fp32(stream.channels[STATE])
        state = state.to(stream.hidden.dtype)
        h = F.rms_norm(at_least_fp32(state), state.shape[-1:], shared["norm"], self.epsilon)
        h = F.gelu(F.linear(h, shared["fc1"], shared["fc1_bias"]))
        h = F.gelu(F.linear(h, shared["fc2"], shared["fc2_bias"]))
        return F.linear(h, shared["out"]).flatten(0, 1), {STATE: state}


def router_counts(hidden_size: int, options: MoEOptions) -> tuple[int, int]:
    """(parameters, multiply-adds per token) of a router."""
    router, E = options.router, classes(options)
    if router.network == "linear":
        return hidden_size * E + (E if router.bias else 0), hidden_size * E
    R = router.width
    products = hidden_size * R + 2 * R * R + R * E
    return products + 3 * R + R + (R if router.average else 0), products


def router_tensors(hidden_size: int, options: MoEOptions) -> list[int]:
    """The elements of each of a router's parameters, which every tensor parallel rank has whole."""
    router, E = options.router, classes(options)
    if router.network == "linear":
        return [hidden_size * E, *([E] if router.bias else [])]
    R = router.width
    return [R * hidden_size, R, *([R] if router.average else []), R, R * R, R, R * R, R, E * R]
