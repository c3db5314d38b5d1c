"""Parts of the RWKV layers: initial values, matrices of low rank, and the token shift.

Initial values follow the formulas of the authors' training code. n is a channel of C, l the layer of L. `ratio` runs
from 0 in the first layer to 1 in the last, `rest` from 1 to 1/L.

Shapes: B samples, S positions, H hidden, m mixes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.kinds.common.recurrence.sequence_scan import last_document
from megatron.model.initialisation import Initialisation
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import sum_gradient, sum_parts
from megatron.parallel.layers.context import ContextGroup
from megatron.parallel.layers.linear import ColumnLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ZEROS, Init, formula
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Growth, Role


class Start:
    """Initial values of one layer.

    Args:
        scheme: `RWKVOptions.init`.
        size: channels of the residual stream.
    """

    def __init__(self, scheme: str, init: Initialisation, size: int):
        self.scheme, self.init, self.size = scheme, init, size
        self.ratio = init.index / max(init.blocks - 1, 1)
        self.rest = 1.0 - init.index / init.blocks

    def reads(self, inputs: int, outputs: int, gain: float = 1.0, spread: float = 1.0) -> Init:
        """A matrix that reads the stream: orthogonal with this gain, or uniform in +-`spread` / sqrt(inputs)."""
        if self.scheme == "model":
            return self.init.hidden(inputs, outputs)
        if self.scheme == "uniform":
            return Init("uniform", spread / math.sqrt(inputs))
        return Init("orthogonal", gain) if gain else ZEROS

    def writes(self, inputs: int, outputs: int) -> Init:
        """A matrix that writes to the stream."""
        return self.init.output(inputs, outputs) if self.scheme == "model" else ZEROS

    def shares(self, *powers: float, lift: float = 0.0, lifted: int = -1) -> Init:
        """[m, C]: (n / C)^power, the share of the token itself. Row `lifted` (the values) is higher by `lift`."""
        return formula(self._shares(powers, lift, lifted))

    def _shares(self, powers: tuple[float, ...], lift: float, lifted: int) -> Callable[..., np.ndarray]:
        return lambda mix, n: (n / self.size) ** np.asarray(powers)[mix] + lift * (mix == lifted)

    def mixes(self, *powers: float, lift: float = 0.0, lifted: int = -1) -> Init:
        """[m, C]: the share of the token before, 1 less that of the token itself."""
        own = self._shares(powers, lift, lifted)
        return formula(lambda mix, n: 1.0 - own(mix, n))

    def norm(self) -> Init:
        """Weight of the norm of the heads."""
        return Init("constant", ((1 + self.init.index) / self.init.blocks) ** 0.7)

    def decays(self, low: float, span: float) -> Init:
        """A vector [C] of logarithms of decay rates: slow in the first channels, the more so in deep layers."""
        return self.along(lambda x: low + span * x ** (0.7 + 1.3 * self.ratio))

    def along(self, function: Callable[..., np.ndarray]) -> Init:
        """A vector [C]: `function` of n / (C - 1)."""
        return formula(lambda n: function(n / max(self.size - 1, 1)))


class LowRank(nn.Module):
    """up(activation(down x)): [B, S, H] to this rank's channels of [B, S, outputs]. The rank is computed by all.

    `down` starts at 0, so that at first the matrix does nothing. Both have the role `state`: no weight decay.

    With columns `down` reads the stream and is cut, and its few results are summed. `up` is whole over columns: cut by
    the rank it would need a sum of all its outputs."""

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
        self.up = ColumnLinear(make.scope("up"), rank, (outputs,), init=init, role=Role.STATE, stream=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.down(x)
        return self.up(inner if self.activation is None else self.activation(inner))


class Whole(nn.Module):
    """A matrix on the stream that every tensor parallel rank has whole, and each uses for its part. Columns cut its
    inputs."""

    def __init__(self, make: ParameterFactory, inputs: int, outputs: int):
        super().__init__()
        self.axis, self.columns = make.mesh.tensor, make.mesh.columns
        self.weight = make.parameter(
            "weight", (outputs, inputs), role=Role.STATE, init=ZEROS, growth=Growth.INPUTS, stream=1
        )

    def forward(self, x: Tensor) -> Tensor:
        return sum_parts(nn.functional.linear(x, sum_gradient(self.weight, self.axis)), self.columns)


@dataclass
class ShiftState:
    """State between pieces of a sequence. Gradients may flow through it."""

    last: Tensor | None = None  # the last token, [B, 1, H]
    document: Tensor | None = None  # int [B], its document, where there are documents

    def keep(self, context: ContextGroup, x_BSH: Tensor, stream: Stream) -> None:
        self.last = context.to_first(x_BSH[:, -1:])
        self.document = last_document(context, stream)


def shifted(x_BSH: Tensor, last_B1H: Tensor | None = None, starts_BS: Tensor | None = None) -> Tensor:
    """The token before each: `last` (or 0) before the first, 0 before the first of a document (`document_starts`)."""
    first = torch.zeros_like(x_BSH[:, :1]) if last_B1H is None else last_B1H.to(x_BSH.dtype)
    past = torch.cat([first, x_BSH[:, :-1]], 1)
    if starts_BS is None:
        return past
    places = torch.arange(x_BSH.shape[1], device=x_BSH.device)
    return past * (places > starts_BS).unsqueeze(-1)


GROUP = 128  # tokens


class _OverTokens(torch.autograd.Function):
    """Vectors, or the rows of a matrix, as [B, S, H] each, in fp32."""

    @staticmethod
    def forward(ctx: Any, B: int, S: int, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.types, ctx.whole = [each.dtype for each in given], given[0].dim() == 2
        rows = given[0].unbind() if ctx.whole else given
        return tuple(at_least_fp32(each).expand(B, S, -1).contiguous() for each in rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        groups = [each.reshape(-1, GROUP, each.shape[-1]).sum(1) for each in gradients]
        total = torch.stack(groups).sum(1)
        own = [total.to(kind) for kind in ctx.types]
        return None, None, *(own if ctx.whole else (each[row] for row, each in enumerate(own)))


def over_tokens(given: Tensor | Sequence[Tensor], x_BSH: Tensor) -> list[Tensor]:
    """Vectors, or the rows of a matrix, that broadcast over tokens.

    In a compiled part their gradients are sums over groups of tokens, which one kernel adds for all vectors. Inductor
    would do the same with one kernel for each.
    """
    B, S, _ = x_BSH.shape
    if not torch.compiler.is_compiling() or B * S % GROUP:
        return list(given)
    return list(_OverTokens.apply(B, S, *([given] if isinstance(given, Tensor) else given)))


def blended(x: Tensor, mix_mH: Tensor, last: Tensor | None, starts: Tensor | None) -> tuple[Tensor, ...]:
    """x + mix * (shift(x) - x) for each of m mixes, [B, S, H] each."""
    difference = shifted(x, last, starts) - x
    return tuple(torch.addcmul(x, difference, mix.to(x.dtype)) for mix in over_tokens(mix_mH, x))


def mixed(x_BSH: Tensor, mix_mH: Tensor, last_B1H: Tensor | None, starts_BS: Tensor | None) -> tuple[Tensor, ...]:
    """`blended`. Only the inputs are kept for the gradient."""
    return recomputed(blended, x_BSH, mix_mH, last_B1H, starts_BS)
