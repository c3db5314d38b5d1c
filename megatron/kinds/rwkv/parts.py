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
from megatron.parallel.layers.over_tokens import over_tokens
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ZEROS, Init, formula
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

    def is_plain(self) -> bool:
        """Whether it is nothing but its matrices and an activation of `_Activated`: without adapters, other hooks or
        products of 8 bits."""
        hooks = any(each._forward_hooks or each._forward_pre_hooks for each in (self, self.down))
        return self.up.is_plain() and not hooks and self.activation in (None, torch.tanh, torch.sigmoid)


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
    if last_B1H is None and torch.compiler.is_compiling():  # then the loops that read it shift
        past = nn.functional.pad(x_BSH, (0, 0, 1, -1))
    else:
        first = torch.zeros_like(x_BSH[:, :1]) if last_B1H is None else last_B1H.to(x_BSH.dtype)
        past = torch.cat([first, x_BSH[:, :-1]], 1)
    if starts_BS is None:
        return past
    places = torch.arange(x_BSH.shape[1], device=x_BSH.device)
    return past * (places > starts_BS).unsqueeze(-1)


def blended(
    x: Tensor, mix_mH: Tensor | Sequence[Tensor], last: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, ...]:
    """x + mix * (shift(x) - x) for each of m mixes, [B, S, H] each."""
    difference = shifted(x, last, starts) - x
    mixes = over_tokens([mix_mH] if isinstance(mix_mH, Tensor) else mix_mH, x)
    return tuple(torch.addcmul(x, difference, mix.to(x.dtype)) for mix in mixes)


def mixed(x_BSH: Tensor, mix_mH: Tensor, last_B1H: Tensor | None, starts_BS: Tensor | None) -> tuple[Tensor, ...]:
    """`blended`. Only the inputs are kept for the gradient."""
    return recomputed(blended, x_BSH, mix_mH, last_B1H, starts_BS)


class _Filled(torch.autograd.Function):
    """Matrices of low rank one after another, [rank, H] each, filled up with 0 to the widest rank: first `down` of
    each, then `up`. Gradients are views of one tensor, which one kernel copies."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        ranks = [len(each) for each in given[: len(given) // 2]]
        rows = [*given[: len(ranks)], *(each.mT for each in given[len(ranks) :])]
        ctx.ranks = ranks
        all_rows = torch.stack([nn.functional.pad(each, (0, 0, 0, max(ranks) - len(each))) for each in rows])
        return all_rows[: len(ranks)], all_rows[len(ranks) :]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_down: Tensor, of_up: Tensor) -> tuple[Tensor, ...]:
        ranks, H = ctx.ranks, of_down.shape[-1]
        downs, ups = ([each[:rank] for rank, each in zip(ranks, half)] for half in (of_down, of_up))
        flat = torch.cat([each.mT.reshape(-1) for each in ups]).split([each.numel() for each in ups])
        return *downs, *(each.view(H, rank) for rank, each in zip(ranks, flat))


class _Product(torch.autograd.Function):
    """x [m, n, i] times w [m, o, i] transposed. The gradient of w is contiguous, which torch's is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.bmm(x, w.mT)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return torch.bmm(of_y, w), torch.bmm(of_y.mT, x)


class _Activated(torch.autograd.Function):
    """Rows of x [m, n, i], each with its activation of `LowRank`. Only the result is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activations: tuple[Callable[[Tensor], Tensor] | None, ...]) -> Tensor:
        ctx.activations = activations
        rows = [row if each is None else each(row) for row, each in zip(x.split(1), activations)]
        y = torch.cat(rows)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor, None]:
        (y,), of_x = ctx.saved_tensors, []
        for row, gradient, each in zip(y.split(1), of_y.split(1), ctx.activations):
            if each is torch.tanh:
                gradient = gradient * (1 - row * row)
            elif each is torch.sigmoid:
                gradient = gradient * (row * (1 - row))
            of_x.append(gradient)
        return torch.cat(of_x), None


def low_ranks(x: Sequence[Tensor], ranks: Sequence[LowRank]) -> tuple[Tensor, ...]:
    """Each of `ranks`, whole, applied to its input. Where all are plain: two products in place of two for each.

    Ranks are filled up with 0 to the widest. The memory of the activations bounds such products, not their width.
    """
    if not all(each.is_plain() for each in ranks):
        return tuple(each(own) for each, own in zip(ranks, x))
    down, up = _Filled.apply(*(each.down.weight for each in ranks), *(each.up.weight for each in ranks))
    inner = _Product.apply(torch.stack(list(x)).flatten(1, 2), down)
    active = _Activated.apply(inner, tuple(each.activation for each in ranks))
    return torch.bmm(active, up).unflatten(1, x[0].shape[:2]).unbind()
