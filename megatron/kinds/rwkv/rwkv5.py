"""RWKV-5 "Eagle" and RWKV-6 "Finch" (Peng et al. 2024), cut over tensor parallel ranks by heads.

RWKV-6 is RWKV-5 whose token shift and decays depend on the token.

Shapes: B samples, S positions, H hidden, h heads of N channels (d = h N), heads of this rank unless said otherwise. R
is the rank of the five matrices of the token shift."""

import functools
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.attention.context_messages import scan_messages
from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.kinds.common.recurrence.sequence_scan import carried_by_decay, document_begins, token_before
from megatron.kinds.rwkv.options import RWKV5Options, RWKV6Options
from megatron.kinds.rwkv.parts import LowRank, ShiftState, Start, Whole, mixed, shifted
from megatron.kinds.rwkv.wkv6 import ends, wkv6
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.costs.traffic import Across, Enter, Event, Shared, TensorAxis, column_events, row_events
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import enter, sum_gradient
from megatron.parallel.layers.linear import ColumnLinear, RowLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ZEROS, Init, formula
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Role, Shard


@dataclass
class RWKV5State(ShiftState):
    """`ShiftState`, and the memory [B, h, N keys, N values], fp32."""

    memory: Tensor | None = None


Options = TypeVar("Options", bound=RWKV5Options)
Mixes = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # for key, value, receptance, gate, decays


class RWKV5(nn.Module, Generic[Options]):
    """x [B, s, H] to its output [B, s, H]: output(norm(wkv) * silu(gate))."""

    new_state = RWKV5State

    def __init__(self, make: ParameterFactory, model: ModelSection, options: Options, init: Initialisation):
        super().__init__()
        H, N = model.hidden_size, options.head_dim
        self.mesh, self.context, self.options = make.mesh, make.context, options
        self.heads = H // N // make.mesh.tensor.size
        start, last = Start(options.init, init, H), max(H - 1, 1)
        self.make_mixes(make, H, options, start)

        def vector(name: str, init: Init, role: Role = Role.STATE) -> nn.Parameter:
            keep = role is not Role.NORM
            return make.parameter(name, (H,), role=role, init=init, shard=Shard(0, None, N), keep_fp32=keep)

        def column(name: str, gain: float) -> ColumnLinear:
            return ColumnLinear(make.scope(name), H, (H,), unit=N, init=start.reads(H, H, gain))

        self.decay = vector("decay", start.decays(-6.0, 5.0), Role.DECAY)
        self.bonus = vector("bonus", formula(lambda n: start.ratio * (1 - n / last) + 0.1 * ((n + 1) % 3 - 1)))
        self.receptance, self.value = column("receptance", 1.0), column("value", 1.0)
        self.key, self.gate = column("key", 0.1), column("gate", 0.1)
        self.norm_weight = vector("norm.weight", start.norm(), Role.NORM)
        self.norm_bias = vector("norm.bias", ZEROS, Role.NORM)
        self.output = RowLinear(make.scope("output"), H, H, unit=N, init=start.writes(H, H))

    def make_mixes(self, make: ParameterFactory, H: int, options: Options, start: Start) -> None:
        """Make the parameters of `mixes`."""
        powers = [start.rest * each for each in (1.0, 1.0, 0.5, 0.5)]
        shares = start.shares(*powers, lift=0.3 * start.ratio, lifted=1)
        self.mix = make.parameter("mix", (4, H), role=Role.STATE, init=shares, stream=1)

    def mixes(self, x_BSH: Tensor, last: Tensor | None, starts: Tensor | None) -> Mixes:
        """Inputs of key, value, receptance and gate, and additions to the decays (None: none)."""
        k, v, r, g = mixed(x_BSH, 1 - sum_gradient(self.mix, self.mesh.tensor), last, starts)
        return k, v, r, g, None

    def forward(self, x: Tensor, stream: Stream, state: RWKV5State | None = None) -> Tensor:
        x_BSH, starts, past = enter(x, self.mesh), document_begins(stream, state, self.context), state or RWKV5State()
        k, v, r, g, moved = self.mixes(x_BSH, token_before(self.context, x_BSH, past.last), starts)
        r, k, v = (each.unflatten(-1, (self.heads, -1)) for each in (self.receptance(r), self.key(k), self.value(v)))
        moved = None if moved is None else moved.unflatten(-1, (self.heads, -1))
        decay, memory = self.decay.view(self.heads, -1), past.memory
        if self.context.size > 1:
            made, left = ends(k, v, moved, decay, starts, chunk=self.options.chunk)
            memory = carried_by_decay(self.context, made, left, memory)
        bonus, chunk = self.bonus.view(self.heads, -1), self.options.chunk
        y, memory = wkv6(r, k, v, moved, decay, bonus, chunk=chunk, initial_BhNN=memory, starts_BS=starts)
        if state is not None:
            state.keep(self.context, x_BSH, stream)
            state.memory = self.context.to_first(memory)
        normed = functools.partial(_normed, epsilon=self.options.norm_epsilon)
        return self.output(recomputed(normed, y, self.gate(g), self.norm_weight, self.norm_bias))

    @classmethod
    def sends(cls, model: ModelSection, options: Options, tensor: TensorAxis) -> list[Event]:
        H = model.hidden_size
        products = column_events(tensor, *[H // tensor.ranks] * 4)
        return [Enter(H), Shared(4 * H // tensor.columns), *products, *row_events(H, False, tensor, H)]

    @classmethod
    def exchanges(cls, model: ModelSection, options: Options, around: Around) -> list[LayerMessage]:
        d = model.hidden_size // around.tensor
        return scan_messages(around, model.hidden_size, made=d * options.head_dim, left=d)

    @classmethod
    def counts(cls, model: ModelSection, options: Options, sequence_length: int) -> Counts:
        H, N = model.hidden_size, options.head_dim
        chunk = min(options.chunk, sequence_length)
        run = max(1, int(chunk**0.5))
        return Counts(
            parameters=5 * H * H + 8 * H,
            flops=2 * (5 * H * H + 2 * H * N),  # of the scan, writes to and reads of the states between runs
            activations=4 * H + 4 * H + 2 * H,  # mixed, projected, scanned and normed
            products=5 * H + H * N // run + H,
            state=H * N + H,
            memory=H * N,
        )


def _normed(y_BShN: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float) -> Tensor:
    """The norm of each head, times silu(gate): [B, S, d]."""
    y = F.layer_norm(at_least_fp32(y_BShN), y_BShN.shape[-1:], eps=epsilon).flatten(2)
    y = y * at_least_fp32(weight) + at_least_fp32(bias)
    return (y * F.silu(at_least_fp32(gate))).to(gate.dtype)


class RWKV6(RWKV5[RWKV6Options]):
    """x [B, s, H] to its output [B, s, H]: output(norm(wkv) * silu(gate))."""

    def make_mixes(self, make: ParameterFactory, H: int, options: RWKV6Options, start: Start) -> None:
        rest = start.rest
        self.mix_all = make.parameter("mix_all", (1, H), role=Role.STATE, init=start.mixes(rest), stream=1)
        mixes = start.mixes(rest, rest, rest, 0.5 * rest, 0.5 * rest, lift=0.3 * start.ratio, lifted=2)
        self.mix = make.parameter("mix", (5, H), role=Role.STATE, init=mixes, stream=1)
        self.mix_down = Whole(make.scope("mix_down"), H, 5 * options.mix_rank)
        small, shape = Init("uniform", 0.01), (5, options.mix_rank, H)
        self.mix_up = make.parameter("mix_up", shape, role=Role.STATE, init=small, stream=2)
        self.move = LowRank(make.scope("move"), H, options.decay_rank, H, small, torch.tanh)

    def mixes(self, x_BSH: Tensor, last: Tensor | None, starts: Tensor | None) -> Mixes:
        whole = self.mesh.tensor
        (both,) = mixed(x_BSH, sum_gradient(self.mix_all, whole), last, starts)
        inner = sum_gradient(self.mix_down(both), self.mesh.columns)  # each makes its own channels of it
        up, mix = sum_gradient(self.mix_up, whole), sum_gradient(self.mix, whole)
        w, k, v, r, g = recomputed(_mixed, x_BSH, inner, up, mix, last, starts)
        return k, v, r, g, self.move(w)

    @classmethod
    def sends(cls, model: ModelSection, options: RWKV6Options, tensor: TensorAxis) -> list[Event]:
        enter, _, *rest = super().sends(model, options, tensor)
        H, rank, moved = model.hidden_size // tensor.columns, 5 * options.mix_rank, options.decay_rank
        sums = column_events(tensor, moved) + [Across(rank)] * (tensor.columns > 1)
        return [enter, *(Shared(each * H) for each in (1, rank, rank, 5, moved)), *sums, *rest]

    @classmethod
    def counts(cls, model: ModelSection, options: RWKV6Options, sequence_length: int) -> Counts:
        H, ranks = model.hidden_size, 5 * options.mix_rank + options.decay_rank
        matrices = 2 * H * ranks
        # In addition to RWKV-5: two mixed tensors, results of the matrices of low rank, and moved decays.
        more = Counts(
            parameters=matrices + 2 * H, flops=2 * matrices, activations=2 * H + ranks + H, products=ranks + 5 * H + H
        )
        return super().counts(model, options, sequence_length) + more


def _mixed(
    x_BSH: Tensor, inner: Tensor, up_5RH: Tensor, mix_5H: Tensor, last: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, ...]:
    """x + (shift(x) - x) * (mix + tanh(inner) up) for decay, key, value, receptance and gate."""
    parts = torch.tanh(inner).unflatten(-1, (5, -1))
    offsets = torch.einsum("bsmr,mrh->mbsh", parts, up_5RH.to(inner.dtype))
    difference = shifted(x_BSH, last, starts) - x_BSH
    return tuple(x_BSH + difference * (mix + offset) for mix, offset in zip(mix_5H.to(x_BSH.dtype), offsets))
