"""Manifold-constrained hyper-connections (Xie et al. 2025, arXiv 2512.24880): a residual stream of several rows.

A branch reads a weighted sum of the rows, and its output is added to each row times a weight. The rows are mixed by a
matrix whose rows and columns sum to 1, so that mixing cannot grow over the layers. All weights follow from the rows.

Shapes: B samples, s positions of this rank, n rows, H hidden."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config.sections.model import ModelSection
from megatron.parallel.layers.collectives import sum_gradient
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import Init, formula
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Growth, Role

from .counts import Counts
from .initialisation import Initialisation
from .stream import Stream

ROWS = "rows"  # the channel of the rows after the first, which is the hidden state, [B, s, (n - 1) H]
EPSILON = 1e-6  # added to the weights of the read sum and to what the rounds of balancing divide by
KEPT = 4.0  # initial logit of a row's own weight in the mixing matrix. The others' are 0
START = 0.01  # initial factors of what follows from the rows


def weights(rows: int, joins: bool) -> int:
    """Number of weights of a token: of the sum that is read and, where a branch joins, of its output and the mix."""
    return (2 + rows) * rows if joins else rows


class HyperConnection(nn.Module):
    """Rows [B, s, n, H] to a branch's input [B, s, H], the weights of its output [B, s, n] and the mix [B, s, n, n].

    It starts as a usual residual stream in each of n equal rows, all but unmixed.

    Args:
        joins: whether a branch's output is added. The last connection only reads, for the head.
    """

    def __init__(self, make: ParameterFactory, model: ModelSection, init: Initialisation, *, joins: bool = True):
        super().__init__()
        n, inputs = model.residual.streams, model.residual.streams * model.hidden_size
        self.n, self.epsilon, self.rounds = n, model.norm.epsilon, model.residual.sinkhorn_iterations
        self.axis = make.mesh.tensor if make.mesh.layout.sequence else None
        outputs, factors = weights(n, joins), 3 if joins else 1

        def start(index: np.ndarray) -> np.ndarray:
            own = (index >= 2 * n) & ((index - 2 * n) % (n + 1) == 0)
            return np.where(index < n, -math.log(n - 1), np.where(own, KEPT, 0.0))

        self.projection = make.parameter(
            "projection",
            (outputs, inputs),
            role=Role.STATE,
            init=init.reads(inputs, outputs),
            keep_fp32=True,
            growth=Growth.INPUTS,
        )
        self.bias = make.parameter("bias", (outputs,), role=Role.STATE, init=formula(start), keep_fp32=True)
        self.scale = make.parameter("scale", (factors,), role=Role.STATE, init=Init("constant", START), keep_fp32=True)

    def forward(self, rows_BsnH: Tensor) -> tuple[Tensor, ...]:
        parameters: list[Tensor] = [self.projection, self.bias, self.scale]
        if self.axis is not None:
            parameters = [sum_gradient(each, self.axis) for each in parameters]
        return again(self._weighted, rows_BsnH, *parameters)

    def _weighted(self, rows_BsnH: Tensor, projection: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        n, rows = self.n, at_least_fp32(rows_BsnH)
        flat = rows.flatten(2)
        parts = [n, n, n * n] if len(scale) > 1 else [n]
        made = F.linear(F.rms_norm(flat, flat.shape[-1:], None, self.epsilon), projection).split(parts, -1)
        read, *joined = (each * factor + own for each, factor, own in zip(made, scale.unbind(), bias.split(parts)))
        x = ((read.sigmoid() + EPSILON).unsqueeze(-1) * rows).sum(2).to(rows_BsnH.dtype)
        if not joined:
            return (x,)
        return x, 2.0 * joined[0].sigmoid(), balanced(joined[1].unflatten(-1, (n, n)), self.rounds)


def again(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """`function(*inputs)`, whose intermediate tensors, many times the stream, are made again for the gradient."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def balanced(logits: Tensor, rounds: int) -> Tensor:
    """Positive matrices whose rows and columns sum to about 1 (Sinkhorn and Knopp 1967)."""
    matrix = logits.softmax(-1) + EPSILON
    matrix = matrix / (matrix.sum(-2, keepdim=True) + EPSILON)
    for _ in range(rounds - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + EPSILON)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + EPSILON)
    return matrix


def joined(y_BsH: Tensor, rows_BsnH: Tensor, output_Bsn: Tensor, mix_Bsnn: Tensor) -> Tensor:
    """The rows after a branch with output y."""
    return again(_joined, y_BsH, rows_BsnH, output_Bsn, mix_Bsnn)


def _joined(y: Tensor, rows: Tensor, output: Tensor, mix: Tensor) -> Tensor:
    added = output.unsqueeze(-1) * at_least_fp32(y).unsqueeze(-2)
    return (added + mix.transpose(-1, -2) @ at_least_fp32(rows)).to(rows.dtype)


def rows_of(stream: Stream, count: int) -> Tensor:
    """[B, s, n, H]. Before the first block all rows are the embedding."""
    others = stream.channels.get(ROWS)
    if others is None:
        return stream.hidden.unsqueeze(2).expand(-1, -1, count, -1).contiguous()
    return torch.cat([stream.hidden, others], -1).unflatten(-1, (count, -1))


def with_rows(stream: Stream, rows_BsnH: Tensor) -> Stream:
    """The stream with these rows."""
    first, others = rows_BsnH.split([1, rows_BsnH.shape[2] - 1], 2)
    return stream.with_channels({ROWS: others.flatten(2)}).with_hidden(first.squeeze(2))


def sizes(model: ModelSection, joins: bool) -> list[int]:
    """Elements of a connection's parameters."""
    n = model.residual.streams
    outputs = weights(n, joins)
    return [outputs * n * model.hidden_size, outputs, 3 if joins else 1]


def connection_counts(model: ModelSection, branches: int, last: bool) -> Counts:
    """Costs of a block's connections, with the one before the head in the last block."""
    n, H = model.residual.streams, model.hidden_size
    found = Counts()
    for joins in (*(branches * (True,)), *((False,) if last else ())):
        matrix = weights(n, joins) * n * H
        kept = n * H + (H + n + n * n if joins else 0)  # rows, and a branch's output with its weights and the mix
        mix = n * n * H if joins else 0
        found += Counts(sum(sizes(model, joins)), flops=2 * (matrix + mix), activations=kept)
    return found
