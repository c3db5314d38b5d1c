"""Softmax attention: multi-head, grouped or multi-query, cut over tensor parallel ranks by heads.

Shapes: B samples, S positions, H hidden, n query heads, m key/value heads, D head_dim, all of this rank unless
said otherwise."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection, NormOptions
from megatron.config.variants import options_of
from megatron.kinds.attention.options import AttentionOptions, gate_width, key_value_parts, lenders
from megatron.kinds.common.activations import scaled
from megatron.kinds.common.attention.attend import LONG, prepare
from megatron.kinds.common.attention.attend_across import attend_in
from megatron.kinds.common.attention.context_messages import attention_messages
from megatron.kinds.common.attention.entropy import AttentionEntropy
from megatron.kinds.common.attention.key_value_cache import Keys, KeyValueCache
from megatron.kinds.common.attention.paged_keys import PagedKeys
from megatron.kinds.common.attention.pattern import Dropped, Pattern, alibi_slopes
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.logit_clip import LogitClip, Projection, largest_logits
from megatron.model.norm import Norm, WideRMSNorm, norm_activations, norm_parameters
from megatron.model.rotary import Rotary, stream_angles
from megatron.model.stream import Channel, Stream
from megatron.parallel.layers.linear import ColumnLinear, RowLinear, entered
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ZEROS
from megatron.parallel.layout.precision import to_device
from megatron.parallel.layout.random import site_key
from megatron.parallel.layout.shard import Role, Shard

from ...model.costs.traffic import (
    Enter,
    Event,
    Shared,
    Summed,
    TensorAxis,
    column_events,
    norm,
    row_events,
    whole_events,
)


@dataclass(frozen=True)
class SharedCall:
    """Own parts of one of several layers that share an attention module.

    Attributes:
        dropout_key: of its draws.
        adapters: modules whose results are added to queries, keys and values. None where there are none.
    """

    dropout_key: int
    adapters: tuple[nn.Module, nn.Module, nn.Module] | None = None


class Attention(nn.Module):
    """x [B, s, H] (or of `inputs` channels) to its attention output [B, s, H].

    Query heads are cut over the ranks. Key/value heads are cut too if their number allows. Otherwise every rank
    computes all of them and uses the heads that its query heads read."""

    compiled_parts = ("turned",)

    new_state = KeyValueCache

    def __init__(
        self,
        make: ParameterFactory,
        model: ModelSection,
        options: AttentionOptions,
        init: Initialisation,
        inputs: int | None = None,
    ):
        super().__init__()
        mesh, H, D = make.mesh, model.hidden_size, options.head_dim
        inputs = inputs or H
        self.mesh, self.context, self.options, self.D, self.seed = mesh, make.context, options, D, make.seed
        self.heads = options.heads // mesh.tensor.size
        self.first_head = self.heads * mesh.tensor.rank
        self.shard_kv = options.kv_heads % mesh.tensor.size == 0
        self.kv_heads = options.kv_heads // mesh.tensor.size if self.shard_kv else options.kv_heads
        q_width, kv_width = options.heads * D, options.kv_heads * D
        self.query = ColumnLinear(
            make.scope("query"),
            inputs,
            (q_width,),
            init=init.hidden(inputs, q_width),
            bias=options.qkv_bias,
            unit=D,
            heads=("query",),
        )
        self.key_value: ColumnLinear | None = None
        if parts := ("key", "value")[: key_value_parts(options)]:
            self.key_value = ColumnLinear(
                make.scope("_".join(parts)),
                inputs,
                (kv_width,) * len(parts),
                init=init.hidden(inputs, kv_width),
                bias=options.qkv_bias,
                unit=D,
                shard=self.shard_kv,
                heads=parts,
            )
        self.reads, self.lends = ((), ()) if inputs != H else lent_at(model, init.index)
        self.output = RowLinear(
            make.scope("output"), q_width, H, init=init.output(q_width, H), bias=options.output_bias, unit=D
        )
        self.gate = None
        if width := gate_width(options):
            gate_init, unit = init.hidden(inputs, width), width // options.heads
            self.gate = ColumnLinear(
                make.scope("gate"), inputs, (width,), init=gate_init, bias=options.qkv_bias, unit=unit
            )
        self._build_norms(make, model.norm)
        self.sinks = None
        if options.sinks:
            self.sinks = make.parameter("sinks", (options.heads,), role=Role.BIAS, init=ZEROS, shard=Shard(0))
        self.rotary = Rotary(options.rotary, D) if options.position == "rotary" else None
        slopes = None
        if options.position == "alibi":
            slopes = tuple(alibi_slopes(options.heads)[self.first_head : self.first_head + self.heads])
        scale = (options.scale or D**-0.5) * init.factors.attention(D)
        plain = Pattern(scale, options.window, options.softcap, slopes)
        self.pattern = plain.computed_by(model.fused_attention)
        self.dropout_key = site_key(make.seed, make.prefix, "probabilities")
        self.entropy = AttentionEntropy()

    def _build_norms(self, make: ParameterFactory, norm: NormOptions) -> None:
        """Norms of queries and keys: of each head, or of all heads together."""
        options, D = self.options, self.D
        self.value_epsilon = norm.epsilon if options.value_norm else None
        self.query_norm: Norm | WideRMSNorm | None = None
        self.key_norm: Norm | WideRMSNorm | None = None
        own = options.keys == "own"
        if options.qk_norm == "head":
            self.query_norm = Norm(make.scope("query_norm"), D, norm, partial=True, stream=False)
            self.key_norm = Norm(make.scope("key_norm"), D, norm, partial=True, stream=False) if own else None
        elif options.qk_norm == "full":
            q_width, kv_width = options.heads * D, options.kv_heads * D
            self.query_norm = WideRMSNorm(make.scope("query_norm"), q_width, D, norm, sharded=True)
            if own:
                self.key_norm = WideRMSNorm(make.scope("key_norm"), kv_width, D, norm, sharded=self.shard_kv)
        self.logit_clip = None
        if options.qk_clip is not None:
            self.logit_clip = self._clip(options.qk_clip, make.device)

    def _clip(self, threshold: float, device: torch.device | str) -> LogitClip:
        """Queries and keys shrink alike. Where several query heads share keys, only queries shrink."""
        shared = self.options.kv_heads < self.options.heads
        clipped = [Projection(each, ((self.D, 1.0 if shared else 0.5),)) for each in self.query.parameters()]
        if not shared and self.key_value is not None:  # values come after keys
            width = self.heads * self.D
            clipped += [Projection(each, ((self.D, 0.5),), width) for each in self.key_value.parameters()]
        return LogitClip(threshold, self.heads, clipped, device)

    def forward(
        self, x: Tensor, stream: Stream, cache: Keys | None = None, call: SharedCall | None = None
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """The output, and keys and values that later layers read, if any."""
        x = scaled(x, self.options.input_multiplier)
        columns = (self.query, *(each for each in (self.key_value, self.gate) if each is not None))
        x_BSH, (q, *found) = entered(x, columns, self.mesh)
        kv = None if self.key_value is None else found.pop(0)
        q, *own = self._projected(q, kv, x_BSH, None if call is None else call.adapters)
        held, begin = self._held(cache, stream, x_BSH.shape[1])
        if self.rotary is not None:
            angles = stream_angles(self.rotary, self.D, stream, begin, x_BSH, self.context.size)
            q, *own[:1] = self.turned(angles, q, *own[:1])
        lent = {name: each.flatten(2).to(stream.hidden.dtype) for name, each in zip(self.lends, own)}
        own = own or [stream.channels[name].unflatten(-1, (-1, self.D)).to(q.dtype) for name in self.reads]
        q, k, v = (each.transpose(1, 2) for each in (q, *own))
        elsewhere = held
        if isinstance(held, KeyValueCache):
            elsewhere, (k, v) = None, held.append(k, v) if held is cache else held.all()
        if not self.shard_kv:
            k, v = self._used_heads(k), self._used_heads(v)
        if self.logit_clip is not None and self.training and cache is None:
            scale, window = self.pattern.scale, self.pattern.window
            self.logit_clip.see(largest_logits(q, k, scale, window, stream.documents))
        if self.entropy.active and self.training and cache is None:
            self.entropy.see(q, k, self.pattern, stream, self.context, self.sinks)
        dropout = None
        if self.training and self.options.dropout > 0.0:
            key = self.dropout_key if call is None else call.dropout_key  # read here: each value is a compilation
            dropout = Dropped(self.options.dropout, key, stream.sample_numbers, self.first_head)
        y = attend_in(self.context, q, k, v, self.pattern, stream, dropout, self.sinks, elsewhere)
        y = y.transpose(1, 2)
        if found:
            y = y * found[0].unflatten(-1, (self.heads, -1)).sigmoid()
        y_BsH = scaled(self.output(y.reshape(*x_BSH.shape[:2], -1)), self.options.output_multiplier)
        return (y_BsH, lent) if lent else y_BsH

    def _held(self, cache: Keys | None, stream: Stream, length: int) -> tuple[Keys | None, int]:
        """The state with the layer's keys, and the number of tokens before this piece.

        On one rank, layers that read each other's keys have them in the state of the first one. To write a page again
        changes nothing."""
        names, held = self.reads or self.lends, cache
        if names and (isinstance(cache, KeyValueCache) or (isinstance(cache, PagedKeys) and cache.reading is None)):
            held = stream.remember(names, lambda: cache)
        written = length if held is not cache and isinstance(held, KeyValueCache) else 0
        return held, 0 if held is None else held.length - written

    def turned(self, angles: tuple[Tensor, Tensor], *heads: Tensor) -> list[Tensor]:
        """Queries and keys, turned by their positions."""
        assert self.rotary is not None
        return [self.rotary.turn(each, angles) for each in heads]

    def _projected(
        self, q: Tensor, kv: Tensor | None, x_BSH: Tensor, adapters: tuple[nn.Module, ...] | None
    ) -> list[Tensor]:
        """[B, S, n, D] queries and, of its own, [B, S, m, D] keys and values, normalised, from the results of the
        matrices."""
        found = [q]
        if kv is not None:
            found += kv.chunk(2, dim=-1) if self.options.values == "projected" else (kv, kv)
        if adapters is not None:
            found = [each + adapter(x_BSH) for each, adapter in zip(found, adapters)]
        norms = [each for each in (self.query_norm, self.key_norm) if each is not None]
        if isinstance(self.query_norm, WideRMSNorm):
            found[: len(norms)] = [norm(each) for norm, each in zip(norms, found)]
        found = [each.unflatten(-1, (-1, self.D)) for each in found]
        if isinstance(self.query_norm, Norm):
            found[: len(norms)] = [norm(each) for norm, each in zip(norms, found)]
        if self.value_epsilon is not None and kv is not None:
            found[2] = F.rms_norm(found[2], (self.D,), None, self.value_epsilon)
        return found

    def prepare(self, stream: Stream) -> None:
        """Put angles and masks into the stream's memo, so that a compiled block does not trace them.

        For streams whose hidden state has the whole sequence."""
        if self.rotary is not None:
            stream_angles(self.rotary, self.D, stream, 0, stream.hidden, self.context.size)
        prepare(
            self.pattern,
            stream.documents,
            stream.hidden.shape[1],
            self.query.weight,
            channels=self.D,
            sinks=self.sinks is not None,
            remember=stream.remember,
        )

    def _used_heads(self, x_BmSD: Tensor) -> Tensor:
        """The key/value heads that this rank's query heads read, one for each where they do not group."""
        used = used_heads(self.options, self.heads, self.first_head)
        first, end = used[0], used[0] + len(used)
        if used == list(range(first, end)):
            return x_BmSD[:, first:end]
        return x_BmSD[:, to_device(torch.tensor(used), x_BmSD.device)]

    @staticmethod
    def channels_at(model: ModelSection, ranks: int, index: int) -> dict[str, Channel]:
        """Keys and values, as this rank has them, of the layers from which others read them."""
        names = [name for each in lent_at(model, index) for name in each]
        if not names:
            return {}
        options = _of_attention(model)[index]
        assert options is not None
        heads = options.kv_heads // (1 if options.kv_heads % ranks else ranks)
        return dict.fromkeys(names, Channel(heads * options.head_dim, whole=True))

    @staticmethod
    def sends(
        model: ModelSection, options: AttentionOptions, tensor: TensorAxis, inputs: int | None = None
    ) -> list[Event]:
        inputs = inputs or model.hidden_size
        H, D, shard_kv = model.hidden_size, options.head_dim, options.kv_heads % tensor.ranks == 0
        parts = key_value_parts(options)
        keys = [] if shard_kv or not parts else whole_events(parts * options.kv_heads * D, inputs, options.qkv_bias)
        norms: list[Event] = []
        if options.qk_norm == "head":
            norms = (1 + (parts > 0)) * norm(model.norm, D)
        elif options.qk_norm == "full":
            norms = [Summed(1, wide=True), Summed(1, wide=True) if shard_kv else Shared(options.kv_heads * D)]
            norms = norms if parts else norms[:1]
        kv_width = parts * options.kv_heads // (tensor.ranks if shard_kv else 1) * D
        gate = [width // tensor.ranks] if (width := gate_width(options)) else []
        products = column_events(tensor, options.heads * D // tensor.ranks, *([kv_width] if parts else []), *gate)
        return [Enter(inputs), *keys, *products, *norms, *row_events(H, options.output_bias, tensor, options.heads * D)]

    @staticmethod
    def exchanges(model: ModelSection, options: AttentionOptions, around: Around) -> list[LayerMessage]:
        ranks, D = around.tensor, options.head_dim
        heads, kv_heads = options.heads // ranks, options.kv_heads // ranks
        if options.kv_heads % ranks:
            kv_heads = len(used_heads(options, heads, heads * around.mesh.tensor.rank))
        return attention_messages(around, heads, kv_heads, D, D, options.window)

    @staticmethod
    def counts(
        model: ModelSection, options: AttentionOptions, sequence_length: int, inputs: int | None = None
    ) -> Counts:
        H, D = model.hidden_size, options.head_dim
        inputs = inputs or H
        q_width, kv_width = options.heads * D, options.kv_heads * D
        gate, made = gate_width(options), key_value_parts(options) * kv_width
        matrices = (inputs + H) * q_width + inputs * (made + gate)
        parameters = matrices
        if options.qkv_bias:
            parameters += q_width + made + gate
        if options.output_bias:
            parameters += H
        if options.qk_norm == "full":
            parameters += q_width + (kv_width if made else 0)
        elif options.qk_norm == "head":
            parameters += (1 + (made > 0)) * norm_parameters(model.norm, D)
        if options.sinks:
            parameters += options.heads
        seen = min(options.window or sequence_length, sequence_length)
        products = 2 * q_width + made + options.heads  # queries, keys and values, output, its log-sum-exp
        return Counts(
            parameters=parameters,
            flops=2 * matrices + 2 * 2 * seen * q_width,
            activations=products + Attention._saved_besides(model, options, sequence_length),
            products=products + H + gate,
            state=2 * kv_width * seen if made else 0,
        )

    @staticmethod
    def _saved_besides(model: ModelSection, options: AttentionOptions, sequence_length: int) -> int:
        """Elements saved per token in addition to the results of the projections and of attention."""
        q_width, D = options.heads * options.head_dim, options.head_dim
        saved, kv_heads = 0, options.kv_heads if key_value_parts(options) else 0
        kv_width = kv_heads * D
        if options.qk_norm == "full":
            saved += q_width + 1 + (kv_width > 0)  # normalised queries and scales
        elif options.qk_norm == "head":
            saved += q_width + (options.heads + kv_heads) * (norm_activations(model.norm, D) - D)
        turned = options.position == "rotary" and Rotary(options.rotary, D).rotated > 0
        if options.qk_norm != "none" or turned:
            saved += kv_width  # new keys
        if options.value_norm:
            saved += kv_width + kv_heads  # new values, and scales of the old ones
        if gate := gate_width(options):
            saved += gate + q_width  # the gate, and the output times it
        if options.sinks:
            saved += q_width + options.heads  # the output before a share of it goes to the sinks, and that share
        if options.dropout > 0.0 and sequence_length <= LONG:
            saved += 3 * options.heads * sequence_length  # attention written out: probabilities and dropout
        return saved


def _of_attention(model: ModelSection) -> list[AttentionOptions | None]:
    """The options of each block's attention, None where it has none."""
    kinds = [next((kind for kind in block.mixers if kind.name == "attention"), None) for block in model.blocks]
    options = {kind: options_of(model, kind) for kind in set(kinds) if kind is not None}
    return [None if kind is None else options[kind] for kind in kinds]


def lent_at(model: ModelSection, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Channels of keys and values that the attention of the block of this index reads, and channels that it makes."""
    pairs = lenders(_of_attention(model))
    reads, lends = pairs.get(index), index in pairs.values()
    return _names(reads) if reads is not None else (), _names(index) if lends else ()


def _names(index: int) -> tuple[str, str]:
    return f"keys {index}", f"values {index}"


def used_heads(options: AttentionOptions, heads: int, first: int) -> list[int]:
    """The key/value heads that `heads` query heads from `first` on read, or the one that all of them read."""
    group = options.heads // options.kv_heads
    used = [(first + head) // group for head in range(heads)]
    return used[:1] if len(set(used)) == 1 else used
