"""The experts: one grouped matrix product for all of them.

Shapes: E experts, H hidden, f width of an expert (of this rank's slice of it), R rows sorted by expert."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kinds.common.activations import ACTIVATIONS
from megatron.kinds.moe.options import MoEOptions
from megatron.model.initialisation import Initialisation
from megatron.parallel.layers.collectives import sum_gradient, sum_parts
from megatron.parallel.layers.depth import gathered, gathered_product
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ZEROS
from megatron.parallel.layout.shard import Role, Shard


def grouped(x_RK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's rows times its matrix, [R, N]. All R rows must belong to an expert: others get uninitialised
    memory."""
    if x_RK.dtype == torch.float64:  # which torch's grouped product lacks
        parts = x_RK.split(ends_E.diff(prepend=ends_E.new_zeros(1)).tolist())
        return torch.cat([part @ weight_NK.T for part, weight_NK in zip(parts, weight_ENK)])
    return F.grouped_mm(x_RK, weight_ENK.transpose(1, 2), offs=ends_E)


@dataclass(frozen=True)
class Grouped:
    """`grouped` and its two gradients, for schedules that compute the weights' later (`parallel/layers/later.py`)."""

    ends_E: Tensor

    def product(self, x_RK: Tensor, weight_ENK: Tensor) -> Tensor:
        return grouped(x_RK, weight_ENK, self.ends_E)

    def of_input(self, gradient_RN: Tensor, weight_ENK: Tensor) -> Tensor:
        return grouped(gradient_RN, weight_ENK.transpose(1, 2), self.ends_E)

    def of_weight(self, gradient_RN: Tensor, x_RK: Tensor) -> Tensor:
        if x_RK.dtype == torch.float64:
            sizes = self.ends_E.diff(prepend=self.ends_E.new_zeros(1)).tolist()
            pairs = zip(gradient_RN.split(sizes), x_RK.split(sizes))
            return torch.stack([gradient.T @ x for gradient, x in pairs])
        return F.grouped_mm(gradient_RN.t(), x_RK, offs=self.ends_E)


def multiply(x_RK: Tensor, weight_ENK: Tensor, rule: Grouped) -> Tensor:
    return rule.product(x_RK, weight_ENK)


class StackedExperts(nn.Module):
    """The matrices of all experts as one logical tensor [E, outputs, inputs], and their biases as one [E, outputs].

    Matrices that are cut by their inputs give partial sums. Each rank has the biases of some outputs and adds those.
    With columns, a rank's inputs of the first matrices and its outputs of the second are its channels of the stream.
    With depth, a rank may have some of the experts and gather the others for its own tokens."""

    def __init__(
        self, make: ParameterFactory, shape: tuple[int, int, int], *, shard: Shard, bias: bool = False, **about: Any
    ):
        super().__init__()
        self.rows = make.mesh.gathered_experts
        self.first, self.columns, self.mine = shard.dim == 1, make.mesh.columns, True
        stream = 2 if self.first else 1
        self.weight = make.parameter("weight", shape, shard=shard, experts=True, stream=stream, **about)
        self.bias, self.beside, self.multiply = None, (0, 0), multiply
        if bias:
            axis, cut = make.mesh.expert_tensor, shard if self.first else Shard(1)
            grid = make.mesh.grid is not None and not self.first
            self.bias = make.parameter(
                "bias",
                shape[:2],
                role=Role.BIAS,
                init=ZEROS,
                shard=None if grid else cut,
                experts=True,
                stream=1 if grid else None,
            )
            if grid:
                self.mine = axis.rank == 0  # all ranks of a column have them, and the first adds them
            elif not self.first:
                (span,) = cut.spans(shape[1], axis.rank, axis.size)
                self.beside = (span.start, shape[1] - span.start - span.length)  # outputs whose biases others add

    def forward(self, x_RK: Tensor, ends_E: Tensor, experts_R: Tensor | None) -> Tensor:
        """`experts_R`: the number of each row's expert, where there are biases."""
        x_RK = x_RK if self.first else sum_gradient(x_RK, self.columns)
        rule = Grouped(ends_E)
        if self.rows.size > 1:
            y_RN = gathered_product(x_RK, self.weight, self.rows, rule)
        else:
            y_RN = self.multiply(x_RK, self.weight, rule)
        y_RN = sum_parts(y_RN, self.columns) if self.first else y_RN
        if self.bias is None:
            return y_RN
        bias = self.bias if self.mine else self.bias - self.bias.detach()  # 0, with the same gradient
        return y_RN + F.pad(gathered(bias, self.rows), self.beside)[experts_R]


class Experts(nn.Module):
    """Rows [R, H] to down(activation(gate x) * (up x + offset)) of each row's expert, or down(activation(up x)).

    Tensor parallel ranks have a slice of every expert's width, and their results are partial sums. Where experts are
    folded over them, they have whole experts."""

    compiled_parts = ("activated",)

    def __init__(self, make: ParameterFactory, hidden_size: int, options: MoEOptions, init: Initialisation):
        super().__init__()
        E, H, width = options.experts, hidden_size, options.hidden_size
        self.gated, self.activation = options.gated, ACTIVATIONS[options.activation]
        self.limit, self.offset = options.limit, options.up_offset
        parts = (width, width) if options.gated else (width,)
        self.up = StackedExperts(
            make.scope("gate_up" if options.gated else "up"),
            (E, sum(parts), H),
            role=Role.HIDDEN,
            init=init.hidden(H, width),
            shard=Shard(1, parts),
            bias=options.bias,
            matrices=parts,
        )
        self.down = StackedExperts(
            make.scope("down"),
            (E, H, width),
            role=Role.OUTPUT,
            init=init.output(width, H),
            shard=Shard(2),
            bias=options.bias,
            matrices=(H,),
        )

    def forward(self, rows_RH: Tensor, ends_E: Tensor) -> Tensor:
        experts_R = None if self.up.bias is None else self._numbers(ends_E, len(rows_RH))
        return self.down(self.activated(self.up(rows_RH, ends_E, experts_R)), ends_E, experts_R)

    def activated(self, h: Tensor) -> Tensor:
        """Input of the second matrices, from the results of the first."""
        if not self.gated:
            return self.activation(h)
        gate, up = h.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.activation(gate) * (up + self.offset if self.offset else up)

    @staticmethod
    def _numbers(ends_E: Tensor, rows: int) -> Tensor:
        """The number of each row's expert, int64 [R]."""
        count_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        return torch.arange(len(ends_E), device=ends_E.device).repeat_interleave(count_E, output_size=rows)
