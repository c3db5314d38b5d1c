"""RWKV-7 "Goose" (Peng et al. 2025), cut over tensor parallel ranks by heads.

Shapes: B samples, S positions, H hidden, h heads of N channels (d = h N), heads of this rank unless said otherwise."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.attention.context_messages import scan_messages
from megatron.kinds.common.recurrence.operations import compiles
from megatron.kinds.common.recurrence.recomputed import recomputed, recomputed_in_graph
from megatron.kinds.common.recurrence.sequence_scan import carried_by_matrix, document_begins, token_before
from megatron.kinds.rwkv.options import RWKV7 as KIND
from megatron.kinds.rwkv.options import RWKV7Options
from megatron.kinds.rwkv.parts import LowRank, ShiftState, Start, blended, low_ranks, mixed
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.costs.traffic import Enter, Event, Shared, TensorAxis, column_events, row_events
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.kernels.choice import choose_kernels
from megatron.model.stream import Channel, Stream
from megatron.parallel.layers.collectives import enter, sum_gradient
from megatron.parallel.layers.linear import ColumnLinear, RowLinear
from megatron.parallel.layers.over_tokens import over_tokens
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ZEROS, Init, formula
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Role, Shard

from .wkv7 import left_of_state, wkv7
from .wkv7_kernels import NARROWEST_HEAD, WIDEST_HEAD, wkv7_of_fla

FASTEST = -math.exp(-0.5)  # of the logarithms of the decays
FIRST = "v_first"


@dataclass
class RWKV7State(ShiftState):
    """`ShiftState`, and the memory [B, h, N values, N keys], fp32."""

    memory: Tensor | None = None


class RWKV7(nn.Module):
    """x [B, s, H] to its output [B, s, H]: output((norm(wkv) + bonus) * gate).

    The values of the first RWKV-7 layer of the stack travel to the others, which blend them with their own.

    Columns cut what is a channel of the stream: mixes and token shift, and the inputs of the matrices that read it.
    Vectors of the heads' channels, their norm and the first values are whole over columns, which all scan their row's
    heads."""

    indexed = True  # the first layer of the kind has no blend
    compiled_parts = ("mixed", "factors", "finished")

    new_state = RWKV7State

    def __init__(self, make: ParameterFactory, model: ModelSection, options: RWKV7Options, init: Initialisation):
        super().__init__()
        H, N = model.hidden_size, options.head_dim
        self.mesh, self.context, self.options = make.mesh, make.context, options
        self.heads = H // N // make.mesh.tensor.size
        self.mixed, self.factors, self.finished = mixed, _factors, _finished
        fits = NARROWEST_HEAD <= N <= WIDEST_HEAD
        self.fused = fits and choose_kernels(model.kernels, KIND, make.device)[0] == "fla"
        self.compiles = self.fused and make.dtype != torch.float32 and compiles()  # torch computes fp32, in loops
        self.first = is_first(model, init.index)
        start = Start(options.init, init, H)
        mixes = start.mixes(*(p * start.rest for p in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)))
        self.mix = make.parameter("mix", (6, H), role=Role.STATE, init=mixes, stream=1)

        def column(name: str, gain: float, spread: float) -> ColumnLinear:
            return ColumnLinear(make.scope(name), H, (H,), unit=N, init=start.reads(H, H, gain, spread))

        def low_rank(name: str, rank: int, activation: Callable[[Tensor], Tensor] | None = None) -> LowRank:
            of_base = Init("orthogonal", 0.1 * init.factors.width**0.5)  # elements of a rank that no width changes
            return LowRank(make.scope(name), H, rank, H, of_base, activation)

        def vector(name: str, init: Init, role: Role = Role.STATE) -> nn.Parameter:
            keep = role is not Role.NORM
            return make.parameter(name, (H,), role=role, init=init, shard=Shard(0, None, N), keep_fp32=keep)

        self.receptance, self.value = column("receptance", 1.0, 0.5), column("value", 1.0, 0.5)
        self.key = column("key", 0.1, 0.05)
        self.decay = low_rank("decay", options.decay_rank, torch.tanh)
        self.rate = low_rank("rate", options.rate_rank)
        self.gate = low_rank("gate", options.gate_rank, torch.sigmoid)
        zigzag = functools.partial(_zigzag, size=N)
        power = 1.0 + start.ratio**0.3
        last = max(H - 1, 1)
        self.decay_base = vector(
            "decay_base", formula(lambda n: -5.5 + 6 * (n / last) ** power + 2.5 * zigzag(n)), Role.DECAY
        )
        self.rate_base = vector("rate_base", formula(lambda n: -0.19 + 0.3 * zigzag(n) + 0.4 * (n / last - 0.5)))
        self.blend = self.blend_base = None
        if not self.first:
            self.blend = low_rank("blend", options.value_rank)
            self.blend_base = vector("blend_base", start.along(lambda x: 0.73 - 0.4 * (x - 0.5)))
        self.key_scale = vector("key_scale", start.along(lambda x: 0.71 - 0.1 * (x - 0.5)))
        self.rate_scale = vector("rate_scale", Init("constant", 1.02))
        self.bonus = vector("bonus", Init("constant", -0.04))
        self.norm_weight = vector("norm.weight", start.norm(), Role.NORM)
        self.norm_bias = vector("norm.bias", ZEROS, Role.NORM)
        self.output = RowLinear(make.scope("output"), H, H, unit=N, init=start.writes(H, H))

    def forward(self, x: Tensor, stream: Stream, state: RWKV7State | None = None) -> Any:
        x_BSH, starts, past = enter(x, self.mesh), document_begins(stream, state, self.context), state or RWKV7State()
        last = token_before(self.context, x_BSH, past.last)
        vectors: list[Tensor | None] = [self.decay_base, self.rate_base, self.blend_base, self.key_scale]
        vectors += [self.rate_scale, self.bonus, self.norm_weight, self.norm_bias]
        mix, whole = sum_gradient(self.mix, self.mesh.tensor), self.compiles and torch.compiler.is_compiling()
        if whole:
            own = iter(over_tokens([mix, *(each for each in vectors if each is not None)], x_BSH))
            r, w, k, v, a, g = blended(x_BSH, list(islice(own, 6)), last, starts)
            vectors = [None if each is None else next(own) for each in vectors]
        else:
            r, w, k, v, a, g = self.mixed(x_BSH, mix, last, starts)
        value = self.value(v)
        if whole:
            ranks = [self.decay, self.rate, self.gate, *([] if self.blend is None else [self.blend])]
            w, a, g, *blend = low_ranks([w, a, g, v][: len(ranks)], ranks)
            key = self.key(k)
        else:
            blend = [] if self.blend is None else [self.blend(v)]
            key, w, a = self.key(k), self.decay(w), self.rate(a)
        of_first = (blend[0], stream.channels[FIRST]) if blend else (None, None)
        made = (key, value, w, a, *of_first, *vectors[:5])
        before = past.memory if self.context.size == 1 else self._memory_before(made, starts, past.memory)
        alone, epsilon = state is None and self.context.size == 1, self.options.norm_epsilon
        sizes: Any = {"heads": self.heads, "chunk": self.options.chunk, "epsilon": epsilon}
        time_mix = functools.partial(_time_mix, self.factors, self.finished, **sizes, fused=self.fused and alone)
        r, g = self.receptance(r), g if whole else self.gate(g)
        y, memory = recomputed(time_mix, r, g, *made, *vectors[5:], before, starts)
        if state is not None and memory is not None:
            state.keep(self.context, x_BSH, stream)
            state.memory = self.context.to_first(memory)
        y = self.output(y)
        return (y, {FIRST: value}) if self.first else y

    def prepare(self, stream: Stream) -> None:
        """Put starts of documents into the stream's memo, so that a compiled block does not trace them."""
        document_begins(stream, None, self.context)

    def _memory_before(
        self, made: tuple[Tensor | None, ...], starts_BS: Tensor | None, of_state: Tensor | None
    ) -> Tensor:
        """The memory before this rank's tokens. `_left` is only needed with more than two ranks."""
        own, left = (functools.partial(x, heads=self.heads, chunk=self.options.chunk) for x in (_made_of_none, _left))
        memory = recomputed(own, *made, starts_BS)
        turned = None if of_state is None else of_state.mT
        return carried_by_matrix(self.context, memory.mT, lambda: recomputed(left, *made, starts_BS).mT, turned).mT

    @staticmethod
    def channels(model: ModelSection, options: RWKV7Options, ranks: int) -> dict[str, Channel]:
        return {FIRST: Channel(model.hidden_size // ranks, whole=True)}

    @staticmethod
    def sends(model: ModelSection, options: RWKV7Options, tensor: TensorAxis, index: int) -> list[Event]:
        H = model.hidden_size
        ranks = [options.decay_rank, options.rate_rank, options.gate_rank]
        ranks += [] if is_first(model, index) else [options.value_rank]
        products = column_events(tensor, *[H // tensor.ranks] * 3, *ranks)
        shared = [Shared(each * H // tensor.columns) for each in (6, *ranks)]
        return [Enter(H), *shared, *products, *row_events(H, False, tensor, H)]

    @staticmethod
    def exchanges(model: ModelSection, options: RWKV7Options, around: Around) -> list[LayerMessage]:
        memory = model.hidden_size // around.tensor * options.head_dim
        return scan_messages(around, model.hidden_size, made=memory, left=memory)

    @staticmethod
    def counts(model: ModelSection, options: RWKV7Options, sequence_length: int, index: int) -> Counts:
        H, N, chunk = model.hidden_size, options.head_dim, min(options.chunk, sequence_length)
        first = is_first(model, index)
        ranks = options.decay_rank + options.rate_rank + options.gate_rank + (0 if first else options.value_rank)
        matrices = 4 * H * H + 2 * H * ranks
        scan = H * (9 * chunk + 4 * N)  # per head and token: scores 4 Q N, products with them 5 Q N, with states 4 N^2
        made = (6 if first else 7) * H + ranks  # receptance, key, value, and results of the matrices of low rank
        return Counts(
            parameters=matrices + (13 if first else 14) * H,
            flops=2 * (matrices + scan),
            activations=6 * H + made + H,  # mixed, made, gated
            products=made + H,  # none of the scan's
            state=H * N + H,
            memory=H * N,
        )


def _factors(
    r: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    a: Tensor,
    blend: Tensor | None,
    first: Tensor | None,
    decay_base: Tensor,
    rate_base: Tensor,
    blend_base: Tensor | None,
    key_scale: Tensor,
    rate_scale: Tensor,
    *,
    heads: int,
    narrow: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Inputs of `wkv7`, without r if it is None, [B, S, h, N] each in fp32. See docs/models.md for the equations.

    Args:
        narrow: a type. r, decays, keys and values are then followed by all inputs except decays in that type.
    """
    vectors = decay_base, rate_base, key_scale, rate_scale, *(() if blend_base is None else (blend_base,))
    decay_base, rate_base, key_scale, rate_scale, *bases = over_tokens(vectors, k)
    k, v = at_least_fp32(k), at_least_fp32(v)
    log_w = FASTEST * torch.sigmoid(decay_base + at_least_fp32(w))
    a = torch.sigmoid(rate_base + at_least_fp32(a))
    if first is not None and blend is not None:
        v = torch.lerp(v, at_least_fp32(first), torch.sigmoid(bases[0] + at_least_fp32(blend)))
    removed = F.normalize((k * key_scale).unflatten(-1, (heads, -1)), dim=-1)
    k = k * (1 + (a - 1) * rate_scale)
    log_w, k, v, a = (each.unflatten(-1, (heads, -1)) for each in (log_w, k, v, a))
    found = log_w, k, v, -removed, removed * a
    if r is None:
        return found
    r = r.unflatten(-1, (heads, -1))
    every = at_least_fp32(r), *found
    return every if narrow is None else (*every[:4], *(each.to(narrow) for each in (r, *every[2:])))


def _made_of_none(*inputs: Any, heads: int, chunk: int) -> Tensor:
    *made, starts = inputs
    log_w, *factors = _factors(None, *made, heads=heads)
    return wkv7(torch.zeros_like(log_w), log_w, *factors, chunk=chunk, starts_BS=starts)[1]


def _left(*inputs: Any, heads: int, chunk: int) -> Tensor:
    """The factor of a memory before the sequence, from the right."""
    *made, starts = inputs
    log_w, _, _, a, b = _factors(None, *made, heads=heads)
    return left_of_state(log_w, a, b, chunk=chunk, starts_BS=starts)


def _time_mix(
    factors: Callable[..., tuple[Tensor, ...]],
    finished: Callable[..., Tensor],
    r: Tensor,
    g: Tensor,
    *inputs: Any,
    heads: int,
    chunk: int,
    epsilon: float,
    fused: bool,
) -> tuple[Tensor, Tensor | None]:
    """([B, S, d] before the output projection, memory), fp32 inside. See docs/models.md for the equations.

    Args:
        factors, finished: `_factors` and `_finished`, or their compiled forms.
        inputs: of `_factors`, then bonus, norm and bias of `_finished`, memory and document starts.
        fused: by kernels, which give no memory and round the inputs of their products.
    """
    *made, bonus, norm_weight, norm_bias, memory, starts = inputs
    dtype = g.dtype
    if fused and dtype != torch.float32:
        _, log_w, k, v, r, *read = recomputed_in_graph(factors, r, *made, heads=heads, narrow=dtype)
        y, memory = wkv7_of_fla(r, log_w, *read, chunk=chunk, starts_BS=starts, dtype=dtype)
    else:
        r, log_w, k, v, a, b = factors(r, *made, heads=heads)
        y, memory = wkv7(r, log_w, k, v, a, b, chunk=chunk, initial_BhNN=memory, starts_BS=starts)
    y = recomputed_in_graph(finished, y, r, k, v, g, bonus, norm_weight, norm_bias, eps=epsilon)
    return y, memory


def _finished(
    y: Tensor, r: Tensor, k: Tensor, v: Tensor, g: Tensor, bonus: Tensor, weight: Tensor, bias: Tensor, *, eps: float
) -> Tensor:
    """(norm(y) + bonus) * gate, [B, S, d] of the gate's type."""
    bonus, weight, bias = over_tokens((bonus, weight, bias), g)
    y, gain, shift = (at_least_fp32(each) for each in (y, weight, bias))
    y = F.layer_norm(y, y.shape[-1:], eps=eps).flatten(2) * gain + shift
    y = y + ((r * k * bonus.unflatten(-1, k.shape[2:])).sum(-1, keepdim=True) * v).flatten(2)
    return (y * at_least_fp32(g)).to(g.dtype)


def is_first(model: ModelSection, index: int) -> bool:
    """Whether no block before this one has RWKV-7."""
    return not any(kind.name == "rwkv7" for block in model.blocks[:index] for kind in block.kinds)


def _zigzag(n: Any, size: int) -> Any:
    """z |z| with z from -1 to 1 over each head."""
    z = (n % size - (size - 1) / 2) / ((size - 1) / 2)
    return z * abs(z)
