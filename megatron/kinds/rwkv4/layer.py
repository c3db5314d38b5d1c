"""RWKV-4 (Peng et al. 2023), cut over tensor parallel ranks by channels.

Shapes: B samples, S positions, H hidden, d channels of this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.attention.context_messages import scan_messages
from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.kinds.common.recurrence.sequence_scan import carried, document_begins, token_before
from megatron.kinds.common.rwkv.start import Start
from megatron.kinds.common.rwkv.token_shift import ShiftState, mixed
from megatron.kinds.rwkv4.options import RWKV4Options
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.costs.traffic import Enter, Event, Leave, Shared, TensorAxis
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import enter, sum_gradient
from megatron.parallel.layers.linear import ColumnLinear, RowLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import Init, formula
from megatron.parallel.layout.shard import Role, Shard

from .wkv4 import NOTHING, State, ends, joined, wkv4


@dataclass
class RWKV4State(ShiftState):
    """`ShiftState`, and the sums of `wkv4`, [B, d] each, fp32."""

    numerator: Tensor | None = None
    denominator: Tensor | None = None
    largest: Tensor | None = None

    @property
    def sums(self) -> State | None:
        """As `wkv4` takes them. None before the first token."""
        if self.numerator is None or self.denominator is None or self.largest is None:
            return None
        return self.numerator, self.denominator, self.largest


class RWKV4(nn.Module):
    """x [B, s, H] to its output [B, s, H]: output(sigmoid(receptance) * wkv)."""

    new_state = RWKV4State

    def __init__(self, make: ParameterFactory, model: ModelSection, options: RWKV4Options, init: Initialisation):
        super().__init__()
        self.mesh, self.context, self.options, H = make.mesh, make.context, options, model.hidden_size
        start = Start(options.init, init, H)
        powers = [start.rest * each for each in (1.0, 1.0, 0.5)]
        self.mix = make.parameter(
            "mix", (3, H), role=Role.STATE, init=start.shares(*powers, lift=0.3 * start.ratio, lifted=1)
        )

        def vector(name: str, init: Init, role: Role = Role.STATE) -> nn.Parameter:
            return make.parameter(name, (H,), role=role, init=init, shard=Shard(0), keep_fp32=True)

        self.decay = vector("decay", start.decays(-5.0, 8.0), Role.DECAY)
        self.bonus = vector("bonus", formula(lambda n: math.log(0.3) + 0.5 * ((n + 1) % 3 - 1)))
        self.key = ColumnLinear(make.scope("key"), H, (H,), init=start.reads(H, H, 0.0))
        self.value = ColumnLinear(make.scope("value"), H, (H,), init=start.reads(H, H))
        self.receptance = ColumnLinear(make.scope("receptance"), H, (H,), init=start.reads(H, H, 0.0))
        self.output = RowLinear(make.scope("output"), H, H, init=start.writes(H, H))

    def forward(self, x: Tensor, stream: Stream, state: RWKV4State | None = None) -> Tensor:
        x_BSH, starts, past = enter(x, self.mesh), document_begins(stream, state, self.context), state or RWKV4State()
        share = sum_gradient(self.mix, self.mesh.tensor)
        k, v, r = mixed(x_BSH, 1 - share, token_before(self.context, x_BSH, past.last), starts)
        before = past.sums
        k, v = self.key(k), self.value(v)
        if self.context.size > 1:
            before = self._sums_before(k, v, starts, before)
        y, sums = wkv4(k, v, self.decay, self.bonus, chunk=self.options.chunk, initial=before, starts_BS=starts)
        if state is not None:
            state.keep(self.context, x_BSH, stream)
            state.numerator, state.denominator, state.largest = (self.context.to_first(each) for each in sums)
        return self.output(recomputed(_gated, self.receptance(r), y))

    def _sums_before(
        self, k_BSd: Tensor, v_BSd: Tensor, starts_BS: Tensor | None, of_state: State | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sums before this rank's tokens."""
        made, aged = ends(k_BSd, v_BSd, self.decay, starts_BS, chunk=self.options.chunk)
        above, below, largest = carried(self.context, made, lambda: aged, joined, _older, of_state)
        nothing = self.context.rank == 0 and of_state is None
        return above, below, (torch.full_like(largest, NOTHING) if nothing else largest).detach()

    @staticmethod
    def sends(model: ModelSection, options: RWKV4Options, tensor: TensorAxis) -> list[Event]:
        H = model.hidden_size
        return [Enter(H), Shared(3 * H), Leave(H)]

    @staticmethod
    def exchanges(model: ModelSection, options: RWKV4Options, around: Around) -> list[LayerMessage]:
        d = model.hidden_size // around.tensor
        return scan_messages(around, model.hidden_size, made=3 * d, left=d, state=(d, d), fixed=d)

    @staticmethod
    def counts(model: ModelSection, options: RWKV4Options, sequence_length: int) -> Counts:
        H = model.hidden_size
        return Counts(
            parameters=4 * H * H + 5 * H,
            flops=2 * 4 * H * H,
            activations=3 * H + 3 * H + 2 * H,  # mixed, projected, scanned and gated
            products=4 * H,
            state=4 * H,
            memory=3 * H,
        )


def _older(later: Tensor, earlier: Tensor) -> Tensor:
    """Additions of two parts of a sequence to exponents."""
    return (later + earlier).clamp(min=NOTHING)


def _gated(r: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(r) * y
