"""RWKV-4 (Peng et al. 2023), cut over tensor parallel ranks by channels.

Its recurrence is per channel a mean of the values, weighted by keys and by age:

    wkv_t = (sum_{i<t} e^{(t-1-i) w + k_i} v_i + e^{u + k_t} v_t) / (the same without v)          w = -exp(decay)

All exponents are relative to the largest of a token's, so that none overflows and no sum is 0. A piece of up to `chunk`
positions is scanned at a time, in about sqrt(chunk) runs side by side: inside the runs distance by distance, then from
run to run.

Shapes: B samples, S positions, H hidden, d channels of this rank, c runs of Q positions."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.attention.context_messages import scan_messages
from megatron.kinds.common.recurrence.pieces import Runs, earlier_in_run, pieces
from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.kinds.common.recurrence.sequence_scan import carried, document_begins, token_before
from megatron.kinds.rwkv.options import RWKV4Options
from megatron.kinds.rwkv.parts import ShiftState, Start, mixed
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.costs.traffic import Enter, Event, Shared, TensorAxis, column_events, row_events
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import enter, sum_gradient
from megatron.parallel.layers.linear import ColumnLinear, RowLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import Init, formula
from megatron.parallel.layout.precision import at_least_fp32, wide_type
from megatron.parallel.layout.shard import Role, Shard

NOTHING = -1e38  # exponent of missing terms

State = tuple[Tensor, Tensor, Tensor]


def wkv4(
    k_BSd: Tensor,
    v_BSd: Tensor,
    decay_d: Tensor,
    bonus_d: Tensor,
    *,
    chunk: int,
    initial: State | None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, State]:
    """wkv [B, S, d] of v's type and the state after the last position, fp32 inside.

    Args:
        initial: the sums with and without v, and the exponent that both are relative to, [B, d] each in fp32.
        starts_BS: index of the first token of each token's document (`document_starts`): states do not cross it.
    """
    if initial is None:
        zero = k_BSd.new_zeros((k_BSd.shape[0], k_BSd.shape[2]), dtype=wide_type(k_BSd.dtype))
        initial = (zero, zero, zero + NOTHING)
    state, outputs = initial, []
    for (k, v), starts in pieces([k_BSd, v_BSd], chunk, starts_BS):
        y, above, below, largest = recomputed(_piece, k, v, decay_d, bonus_d, *state, starts)
        state = above, below, largest
        outputs.append(y)
    return torch.cat(outputs, 1), state


def ends(
    k_BSd: Tensor, v_BSd: Tensor, decay_d: Tensor, starts_BS: Tensor | None, *, chunk: int
) -> tuple[State, Tensor]:
    """The state from zeros, and the addition to the exponent of a state before, [B, d]. Arguments as in `wkv4`."""
    zero = k_BSd.new_zeros((k_BSd.shape[0], k_BSd.shape[2]), dtype=wide_type(k_BSd.dtype))
    state = (zero, zero, zero + NOTHING)
    for (k, v), starts in pieces([k_BSd, v_BSd], chunk, starts_BS):
        state = recomputed(_end, k, v, decay_d, *state, starts)
    aged = zero - k_BSd.shape[1] * decay_d.exp()
    return state, aged if starts_BS is None else aged.masked_fill(starts_BS[:, -1:] >= 0, NOTHING)


def joined(aged: Tensor, earlier: State, later: State, there: bool) -> State:
    """The state after two parts of a sequence. The later part adds `aged` to exponents.

    Args:
        there: whether there is an earlier state.
    """
    exponent = later[2].detach()
    old = (earlier[2].detach() + aged).clamp(min=NOTHING) if there else torch.full_like(aged, NOTHING)
    reference = torch.maximum(old, exponent).detach()
    before, new = (old - reference).exp(), (exponent - reference).exp()
    return earlier[0] * before + later[0] * new, earlier[1] * before + later[1] * new, reference


def _end(
    k: Tensor, v: Tensor, decay: Tensor, numerator: Tensor, denominator: Tensor, largest: Tensor, starts: Tensor | None
) -> State:
    runs = Runs.of(k.shape[1], starts, k.device)
    k, v = runs.cut(at_least_fp32(k)), runs.cut(at_least_fp32(v))
    return _between(runs, k, v, -decay.exp(), (numerator, denominator, largest))[1]


def _piece(
    k: Tensor, v: Tensor, decay: Tensor, u: Tensor, over: Tensor, under: Tensor, largest: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype, runs, w = v.dtype, Runs.of(k.shape[1], starts, k.device), -decay.exp()
    k, v = runs.cut(at_least_fp32(k)), runs.cut(at_least_fp32(v))
    (numerators, denominators, exponents), state = _between(runs, k, v, w, (over, under, largest))

    steps = torch.arange(runs.run, device=k.device).view(1, 1, -1, 1)
    of_state = exponents.unsqueeze(2) + steps * w
    reads = runs.reads_state
    if reads is not None:
        of_state = of_state.masked_fill(~reads.unsqueeze(-1), NOTHING)
    terms = [u + k]
    for distance in range(1, runs.run):
        seen = runs.sees(distance).unsqueeze(-1)
        terms.append((earlier_in_run(k, distance) + (distance - 1) * w).masked_fill(~seen, NOTHING))
    top = of_state.detach()
    for term in terms:
        top = torch.maximum(top, term.detach())
    weight = (of_state - top).exp()
    above, below = weight * numerators.unsqueeze(2), weight * denominators.unsqueeze(2)
    for distance, term in enumerate(terms):
        weight = (term - top).exp()
        above, below = above + weight * earlier_in_run(v, distance), below + weight
    return runs.joined(above / below).to(dtype), *state


def _between(runs: Runs, k: Tensor, v: Tensor, w: Tensor, state: State) -> tuple[State, State]:
    """The state before each run, [B, c, d] each, and after the last. Exponents of reference have no gradient: what is
    relative to them changes by the opposite factor."""
    written = runs.writes_state.unsqueeze(-1)
    count = (runs.places < runs.length).sum(-1)  # tokens of each run
    left = (count.unsqueeze(-1) - 1 - torch.arange(runs.run, device=k.device)).unsqueeze(-1)
    terms = (k + left * w).masked_fill(~written, NOTHING)
    top = terms.detach().amax(2)
    weights = (terms - top.unsqueeze(2)).exp()
    own = zip((weights * v).sum(2).unbind(1), weights.sum(2).unbind(1), top.unbind(1))
    passed = count.view(1, -1, 1) * w
    keeps = runs.keeps_state
    if keeps is not None:
        passed = passed.masked_fill(~keeps.unsqueeze(-1), NOTHING)
    before = []
    for (above, below, exponent), decay in zip(own, passed.expand(-1, k.shape[1], -1).unbind(1)):
        before.append(state)
        aged = (state[2] + decay).clamp(min=NOTHING)
        reference = torch.maximum(aged, exponent).detach()
        old, new = (aged - reference).exp(), (exponent - reference).exp()
        state = (state[0] * old + above * new, state[1] * old + below * new, reference)
    numerators, denominators, exponents = (torch.stack(each, 1) for each in zip(*before))
    return (numerators, denominators, exponents), state


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
        shares = start.shares(start.rest, start.rest, 0.5 * start.rest, lift=0.3 * start.ratio, lifted=1)
        self.mix = make.parameter("mix", (3, H), role=Role.STATE, init=shares, stream=1)

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
        made, aged = ends(k_BSd, v_BSd, self.decay, starts_BS, chunk=self.options.chunk)
        above, below, largest = carried(self.context, made, lambda: aged, joined, _older, of_state)
        nothing = self.context.rank == 0 and of_state is None
        return above, below, (torch.full_like(largest, NOTHING) if nothing else largest).detach()

    @staticmethod
    def sends(model: ModelSection, options: RWKV4Options, tensor: TensorAxis) -> list[Event]:
        H = model.hidden_size
        products = column_events(tensor, *[H // tensor.ranks] * 3)
        return [Enter(H), Shared(3 * H // tensor.columns), *products, *row_events(H, False, tensor, H)]

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
