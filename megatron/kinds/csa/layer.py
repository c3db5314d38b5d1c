"""Attention to a window and to compressed entries of all earlier tokens (DeepSeek-V4, 2026), cut over ranks by heads.

One vector of each token is key and value of all heads. Entries are such vectors, each made of a few tokens. An indexer
may choose the entries that a token reads. Since keys are turned by positions, outputs are turned back.

Attention is masked: of an indexer's entries it computes all, and reads the chosen ones. Queries are computed in runs.
So memory does not grow with pairs of tokens, except for one bool per token and entry, and for an indexer that learns
one fp32 number.

Shapes: B samples, S positions, n heads of this rank, D head_dim, E entries, h heads of the indexer."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.attention.key_value_cache import KeyValueCache
from megatron.kinds.common.attention.paged_keys import PAGE, PagedKeys
from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.kinds.csa.compressor import Compressor, Ends
from megatron.kinds.csa.options import CSAOptions
from megatron.kinds.csa.reading import attended, probabilities_of, rows_at_once
from megatron.kinds.dsa.indexer import chosen, divergence
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.costs.traffic import Enter, Event, Shared, TensorAxis, row_events, whole_events
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.norm import Norm
from megatron.model.rotary import Rotary, stream_angles
from megatron.model.stream import LOSS, Channel, Stream, with_loss
from megatron.parallel.layers.collectives import all_reduce, enter
from megatron.parallel.layers.linear import ColumnLinear, RowLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ZEROS
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Role, Shard

Angles = tuple[Tensor, Tensor] | None


@dataclass(eq=False)  # of many texts it is pages, which are compared as objects
class CSAState:
    """Decoding state: keys of tokens, entries with the indexer's, projections of the last tokens, [B, span, C] each."""

    keys: KeyValueCache | PagedKeys = field(default_factory=KeyValueCache)
    entries: KeyValueCache | PagedKeys = field(default_factory=KeyValueCache)
    recent: tuple[Tensor, ...] = ()


class GroupedLinear(nn.Module):
    """The output of each group of heads [B, S, groups, inputs] times a matrix of its own, [B, S, groups, rank]."""

    def __init__(self, make: ParameterFactory, groups: int, inputs: int, rank: int, init: Initialisation):
        super().__init__()
        self.weight = make.parameter(
            "weight",
            (groups * rank, inputs),
            role=Role.HIDDEN,
            init=init.hidden(inputs, rank),
            shard=Shard(0, None, rank),
            matrices=(rank,) * groups,
        )

    def forward(self, x_BSgI: Tensor) -> Tensor:
        matrices = self.weight.unflatten(0, (x_BSgI.shape[2], -1)).transpose(1, 2)
        y = x_BSgI.flatten(0, 1).transpose(0, 1) @ matrices
        return y.transpose(0, 1).unflatten(0, x_BSgI.shape[:2])


class Indexer(nn.Module):
    """Queries [B, S, h, D] and weights [B, S, h], which choose entries of its own compressor."""

    def __init__(
        self, make: ParameterFactory, model: ModelSection, options: CSAOptions, init: Initialisation, norm: Any
    ):
        super().__init__()
        self.heads, D = options.index_heads, options.index_dim
        self.scale = (self.heads * D) ** -0.5

        def matrix(name: str, inputs: int, outputs: int) -> ColumnLinear:
            start = init.reads(inputs, outputs)
            return ColumnLinear(make.scope(name), inputs, (outputs,), init=start, role=Role.ROUTER, shard=False)

        self.query = matrix("query", options.query_rank, self.heads * D)
        self.weigh = matrix("weigh", model.hidden_size, self.heads)
        self.compressor = Compressor(make.scope("compressor"), model.hidden_size, D, options, init, norm, Role.ROUTER)

    def forward(self, x_BSH: Tensor, low_BSR: Tensor) -> tuple[Tensor, Tensor]:
        q = self.query(low_BSR).unflatten(-1, (self.heads, -1))
        return q, at_least_fp32(self.weigh(x_BSH)) * self.scale


class CSA(nn.Module):
    """x [B, s, H] to its attention output [B, s, H], and the indexer's loss in its channel."""

    new_state = CSAState

    def __init__(self, make: ParameterFactory, model: ModelSection, options: CSAOptions, init: Initialisation):
        super().__init__()
        mesh, H, D, rank = make.mesh, model.hidden_size, options.head_dim, options.query_rank
        self.mesh, self.options = mesh, options
        self.heads, self.groups = options.heads // mesh.tensor.size, options.groups // mesh.tensor.size
        norm = model.norm.model_copy(update={"type": "rmsnorm", "unit_offset": False})
        self.epsilon, self.scale = norm.epsilon, D**-0.5 * init.factors.attention(D)

        def whole(name: str, width: int) -> ColumnLinear:
            return ColumnLinear(make.scope(name), H, (width,), init=init.hidden(H, width), shard=False)

        self.query_down, self.key = whole("query_down", rank), whole("key", D)
        self.query_norm = Norm(make.scope("query_norm"), rank, norm, partial=True)
        self.key_norm = Norm(make.scope("key_norm"), D, norm, partial=True)
        width = options.heads * D
        self.query = ColumnLinear(make.scope("query"), rank, (width,), init=init.hidden(rank, width), unit=D)
        self.sinks = make.parameter(
            "sinks", (options.heads,), role=Role.BIAS, init=ZEROS, shard=Shard(0), keep_fp32=True
        )
        low = options.output_rank
        self.output_down = GroupedLinear(make.scope("output_down"), options.groups, width // options.groups, low, init)
        low *= options.groups
        self.output = RowLinear(make.scope("output"), low, H, init=init.output(low, H), unit=options.output_rank)
        self.compressor = self.indexer = None
        if options.rate is not None:
            self.compressor = Compressor(make.scope("compressor"), H, D, options, init, norm)
        if options.indexed:
            self.indexer = Indexer(make.scope("indexer"), model, options, init, norm)
        self.rotary = Rotary(options.rotary, options.rope_dim) if options.position == "rotary" else None

    def forward(
        self, x: Tensor, stream: Stream, state: CSAState | None = None
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        x_BSH, begin = enter(x, self.mesh), state.keys.length if state is not None else 0
        angles: Angles = None
        if self.rotary is not None:
            angles = stream_angles(self.rotary, self.options.rope_dim, stream, begin, x_BSH, 1)
        low = self.query_norm(self.query_down(x_BSH))
        q = self.query(low).unflatten(-1, (self.heads, -1))
        q = F.rms_norm(at_least_fp32(q), q.shape[-1:], None, self.epsilon).to(q.dtype)
        q, keys = self._turned(q, angles), self._turned(self.key_norm(self.key(x_BSH)).unsqueeze(2), angles).squeeze(2)
        index = None
        if self.indexer is not None:
            index_q, weights = self.indexer(x_BSH.detach(), low.detach())
            index = self._turned(index_q, angles), weights
        if state is not None and isinstance(state.keys, PagedKeys):
            y, losses = self._paged(q * self.scale, keys, self._projected(x_BSH), index, state), None
        else:
            y, losses = self._sequence(q * self.scale, keys, self._projected(x_BSH), index, stream, state)
        if angles is not None:
            y = self._turned(y, (angles[0], -angles[1]))
        y = self.output(self.output_down(y.unflatten(2, (self.groups, -1)).flatten(3)).flatten(2))
        if not self.options.learns:
            return y
        total = torch.zeros((), device=y.device) if losses is None else self.options.index_loss * losses
        # every rank has the whole loss, and the gradients of the indexer are summed
        return y, with_loss(stream, y, total / self.mesh.tensor.size)

    def _turned(self, x_BSnD: Tensor, angles: Angles) -> Tensor:
        return x_BSnD if angles is None or self.rotary is None else self.rotary.turn(x_BSnD, angles)

    def _projected(self, x_BSH: Tensor) -> tuple[Tensor, ...]:
        """Values and gates of the compressor, and of the indexer's."""
        found = () if self.compressor is None else (self.compressor.project(x_BSH),)
        return found if self.indexer is None else (*found, self.indexer.compressor.project(x_BSH.detach()))

    def _entries(self, projected: tuple[Tensor, ...], ends: Ends, past: tuple[Tensor, ...] = ()) -> list[Tensor]:
        """The entries [B, E, D], and the indexer's, turned by the positions of their own first tokens.

        Args:
            past: projections of the last `span` tokens before.
        """
        assert self.compressor is not None and self.options.rate is not None
        compressors = (self.compressor, *(() if self.indexer is None else (self.indexer.compressor,)))
        before = self.options.span if past else 0
        padded = [torch.cat(each, 1) for each in zip(past, projected)] if past else projected
        found = [each(own, ends, before) for each, own in zip(compressors, padded)]
        if self.rotary is None:
            return found
        first = (ends.positions + 1 - self.options.rate).clamp(min=0)
        angles = self.rotary.angles(ends.most, first, found[0])
        return [self.rotary.turn(each.unsqueeze(2), angles).squeeze(2) for each in found]

    def _recent(self, projected: tuple[Tensor, ...], state: CSAState) -> tuple[Tensor, ...]:
        """Projections of the last `span` tokens before these, 0 before a text. The state gets those after them."""
        span = self.options.span
        past = state.recent or tuple(each.new_zeros(len(each), span, each.shape[2]) for each in projected)
        state.recent = tuple(torch.cat(each, 1)[:, -span:] for each in zip(past, projected))
        return past

    def _sequence(
        self,
        q: Tensor,
        keys: Tensor,
        projected: tuple[Tensor, ...],
        index: tuple[Tensor, Tensor] | None,
        stream: Stream,
        state: CSAState | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention [B, S, n, D] of a piece of a sequence among all before it, and the indexer's loss."""
        length, documents = keys.shape[1], stream.documents if state is None else None
        begin, entries, ends = 0 if state is None else state.keys.length, [keys[:, :0]], None
        if self.compressor is not None and self.options.rate is not None:
            positions = None if documents is None else stream.positions
            ends = Ends.of(self.options.rate, begin, length, positions, keys.device)
            entries = self._entries(projected, ends, () if state is None else self._recent(projected, state))
        if state is not None:
            assert isinstance(state.keys, KeyValueCache) and isinstance(state.entries, KeyValueCache)
            keys = state.keys.append(keys.unsqueeze(1), keys[:, None, :, :0])[0].squeeze(1)
            if ends is not None and self.options.rate is not None:
                both = entries if self.indexer is not None else (entries[0], entries[0][..., :0])
                entries = [each.squeeze(1) for each in state.entries.append(*(each.unsqueeze(1) for each in both))]
                ends = Ends.of(self.options.rate, 0, begin + length, None, keys.device)
        most = self.options.index_top_k
        q, found, reads, targets = q.transpose(1, 2), [], list[Tensor](), list[Tensor]()
        count = rows_at_once(len(q), self.heads, min(length, self.options.window) + entries[0].shape[1], length)
        learns = self.options.learns and self.training and state is None
        loss = index is not None and learns and entries[0].shape[1] > 0
        for at in range(0, length, count):
            rows = slice(at, min(at + count, length))
            first = max(0, begin + at - self.options.window + 1)
            near = self._near(slice(first, begin + rows.stop), begin, rows, documents, keys.device)
            far = self._far(ends, begin, rows, documents, keys.device)
            if index is not None and most is not None and most < entries[0].shape[1]:
                far = chosen(index[0][:, rows], entries[1], index[1][:, rows], far.expand(len(q), -1, -1), most)
            every = torch.cat([keys[:, first : begin + rows.stop], entries[0]], 1)
            read = torch.cat([each.expand(len(q), -1, -1) for each in (near, far)], 2)
            found.append(recomputed(attended, q[:, :, rows], every, self.sinks, read))
            if loss:
                reads.append(read[..., near.shape[-1] :])
                targets.append(
                    probabilities_of(q[:, :, rows].detach(), every.detach(), self.sinks, read, far.shape[-1])
                )
        y = torch.cat(found, 2).transpose(1, 2)
        if index is None or not loss:
            return y, None
        target = all_reduce(torch.cat(targets, 1), self.mesh.tensor)
        target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)
        return y, divergence(index[0], entries[1], index[1], torch.cat(reads, 1), target)

    def _near(self, keys: slice, begin: int, rows: slice, documents: Tensor | None, device: torch.device) -> Tensor:
        """Which of these tokens each position reads one by one, bool [1 or B, R, K]."""
        behind = torch.arange(begin + rows.start, begin + rows.stop, device=device).unsqueeze(1) - torch.arange(
            keys.start, keys.stop, device=device
        )
        near = ((behind >= 0) & (behind < self.options.window)).unsqueeze(0)
        if documents is None:
            return near
        return near & (documents[:, rows].unsqueeze(2) == documents[:, keys].unsqueeze(1))

    @staticmethod
    def _far(ends: Ends | None, begin: int, rows: slice, documents: Tensor | None, device: torch.device) -> Tensor:
        """Which entries are whole at each position, of its document, bool [1 or B, R, E]."""
        if ends is None:
            return torch.ones(1, rows.stop - rows.start, 0, dtype=torch.bool, device=device)
        places = torch.arange(begin + rows.start, begin + rows.stop, device=device)
        far = ends.places.unsqueeze(1) <= places.unsqueeze(1)
        if documents is None or ends.real is None:
            return far
        far = far & ends.real.unsqueeze(1)
        return far & (documents[:, rows].unsqueeze(2) == documents.gather(1, ends.places).unsqueeze(1))

    def _paged(
        self,
        q: Tensor,
        keys: Tensor,
        projected: tuple[Tensor, ...],
        index: tuple[Tensor, Tensor] | None,
        state: CSAState,
    ) -> Tensor:
        """The same of one token of each of many texts, [T, 1, n, D]. `PagedKeys.attend` has the shapes.

        A page has an entry for each `unit` tokens, or one. Until its last token is read it is not whole, and masked."""
        assert isinstance(state.keys, PagedKeys) and isinstance(state.entries, PagedKeys)
        now, rate = state.keys.current.read, self.options.rate
        known, pools = state.keys.write(now, keys, keys[..., :0])[0], None
        if rate is not None:
            state.entries.unit = rate if PAGE % rate == 0 else PAGE if rate % PAGE == 0 else 1
            ends = Ends(torch.zeros_like(now.positions_T1), now.positions_T1, now.longest)
            new = self._entries(projected, ends, self._recent(projected, state))
            pools = state.entries.write(now, new[0], new[1] if index is not None else new[0][..., :0])
        y_TnD = torch.zeros_like(q.squeeze(1))
        for group in now.groups:
            own, places = q.squeeze(1)[group.rows].transpose(1, 2), group.places.unsqueeze(-1)
            every = [PagedKeys.pages_of(known, group.pages).squeeze(1)]
            behind = places - torch.arange(every[0].shape[1], device=q.device)
            reads = [(behind >= 0) & (behind < self.options.window)]
            if pools is not None and rate is not None:
                entries, keys_of_index = (PagedKeys.pages_of(pool, group.pages).squeeze(1) for pool in pools)
                last = torch.arange(1, entries.shape[1] + 1, device=q.device) * state.entries.unit - 1
                far = (last <= places) & ((last + 1) % rate == 0)
                if index is not None and self.options.index_top_k is not None:
                    scored = (index[0].squeeze(1)[group.rows], keys_of_index, index[1].squeeze(1)[group.rows])
                    far = chosen(*scored, far, self.options.index_top_k)
                every, reads = [*every, entries], [*reads, far]
            found = attended(own, torch.cat(every, 1), self.sinks, torch.cat(reads, 2))
            y_TnD[group.targets] = found.transpose(1, 2).flatten(0, 1)[group.real]
        return y_TnD.unsqueeze(1)

    @staticmethod
    def channels(model: ModelSection, options: CSAOptions, ranks: int) -> dict[str, Channel]:
        return {LOSS: Channel(1)} if options.learns else {}

    @staticmethod
    def needs_output(model: ModelSection, options: CSAOptions) -> bool:
        """Whether the backward pass needs tensors after the sum over the ranks: the loss."""
        return options.learns

    @staticmethod
    def sends(model: ModelSection, options: CSAOptions, tensor: TensorAxis) -> list[Event]:
        H, D, rank = model.hidden_size, options.head_dim, options.query_rank

        def compressor(channels: int) -> list[Event]:
            width = options.series * channels
            bias = Shared((options.rate or 0) * width, wide=True)
            return [*whole_events(2 * width, H), bias, Shared(channels)]

        found = [Enter(H), *whole_events(rank, H), Shared(rank), *whole_events(D, H), Shared(D)]
        if options.learns:
            h, own = options.index_heads, options.index_dim
            found += [*whole_events(h * own, rank), *whole_events(h, H), *compressor(own)]
        if options.rate is not None:
            found += compressor(D)
        return [*found, *row_events(H, False, tensor)]

    @staticmethod
    def exchanges(model: ModelSection, options: CSAOptions, around: Around) -> list[LayerMessage]:
        """The sum of probabilities over all heads."""
        if not options.learns or around.tensor == 1:
            return []
        size = around.samples * around.length * (around.length // (options.rate or 1))
        return [LayerMessage("tensor", "all_reduce", size, "fp32", training=True)] if size else []

    @staticmethod
    def counts(model: ModelSection, options: CSAOptions, sequence_length: int) -> Counts:
        H, D, S, rank = model.hidden_size, options.head_dim, sequence_length, options.query_rank
        inner, low = options.heads * D, options.groups * options.output_rank
        matrices = rank * (H + inner) + H * D + options.output_rank * inner + low * H
        vectors = rank + D + options.heads
        made, kept = rank + D, 2 * rank + 4 * D + 2  # results of whole matrices, and what is kept besides
        near, far, index = min(options.window, S), 0, 0
        state = D * near
        for channels in [] if options.rate is None else [D, *([options.index_dim] if options.indexed else [])]:
            width, rate = options.series * channels, options.rate or 1
            matrices, vectors = matrices + 2 * H * width, vectors + rate * width + channels
            made += 2 * width
            kept += 2 * width + 3 * channels // rate  # values and weights of each entry, and the entry
            state += S // rate * channels + options.span * 2 * width
            far = S // rate
        if options.indexed:
            h, own = options.index_heads, options.index_dim
            matrices += h * (rank * own + H)
            index = far * h * (own + 1)
            made, kept = made + h * (own + 1), kept + h * own + (far if options.learns else 0)
        kept += (near + far) // 2  # bools of what is read
        products = 2 * inner + low  # of queries, attention and groups
        return Counts(
            parameters=matrices + vectors,
            flops=2 * (matrices + index) + 4 * (near + far) * inner,
            activations=products + 3 * inner + options.heads + made + kept,
            whole=made + kept,
            products=products + made + H,
            state=state,
        )
