"""Latent attention to the tokens that an indexer chooses (DeepSeek-V3.2, 2025), cut over ranks by heads.

Attention is masked: it reads the chosen tokens, and costs what it costs to read all. The indexer's inputs are detached,
so that the model learns only by its own loss and the indexer only by the divergence.

Shapes: B samples, S positions, T tokens that were read, n heads of this rank."""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.attention.key_value_cache import KeyValueCache
from megatron.kinds.common.attention.paged_keys import PagedKeys
from megatron.kinds.dsa.options import DSAOptions
from megatron.kinds.mla.layer import MLA
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.costs.traffic import Event, Shared, TensorAxis, whole_events
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.stream import LOSS, Channel, Stream, with_loss
from megatron.parallel.layers.collectives import all_reduce, enter
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.precision import at_least_fp32

from .indexer import Indexer, chosen, divergence


@dataclass(eq=False)  # of many texts it is pages, which are compared as objects
class DSAState:
    """Decoding state: compressed vectors with turned keys, and the indexer's keys."""

    latents: KeyValueCache | PagedKeys = field(default_factory=KeyValueCache)
    index: KeyValueCache | PagedKeys = field(default_factory=KeyValueCache)


class DSA(MLA):
    """x [B, s, H] to its attention output [B, s, H], and the indexer's loss in its channel."""

    def __init__(self, make: ParameterFactory, model: ModelSection, options: DSAOptions, init: Initialisation):
        super().__init__(make, model, options, init)
        self.own = options
        self.indexer = Indexer(make.scope("indexer"), model.hidden_size, options, init)

    def new_state(self) -> DSAState:  # type: ignore[override]  # of two caches
        return DSAState()

    def forward(  # type: ignore[override]
        self, x: Tensor, stream: Stream, cache: DSAState | None = None
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        x_BSH, begin = enter(x, self.mesh), cache.latents.length if cache is not None else 0
        q, latent, turned, inputs, angles = self._vectors(x_BSH, stream, begin)
        queries, keys, weights = self.indexer(x_BSH.detach(), inputs.detach())
        if angles is not None and self.rotary is not None:
            queries, keys = self.rotary.turn(queries, angles), self.rotary.turn(keys, angles)
        keys = keys.transpose(1, 2)
        if cache is not None and isinstance(cache.latents, PagedKeys):
            return self.output(self._paged(q, latent, turned, (queries, keys, weights), cache).flatten(2))
        if cache is not None:
            assert isinstance(cache.latents, KeyValueCache) and isinstance(cache.index, KeyValueCache)
            latent, turned = cache.latents.append(latent, turned)
            keys, _ = cache.index.append(keys, keys[..., :0])
        index = (queries, keys.squeeze(1), weights)
        read = self._seen(begin, x_BSH.shape[1], stream)
        if not self.own.warm_up:
            read = chosen(*index, read, self.own.index_top_k)
        if begin:
            y = self._among_latents(q, latent, turned, lambda q, k, v: self._reading(q, k, v, read))
        else:
            k, v = self._expanded(latent, turned)
            y = self._reading(q, k, v, read)
        y = self.output(y.transpose(1, 2).reshape(*x_BSH.shape[:2], -1))
        if not self.own.index_loss:
            return y
        loss = torch.zeros((), device=y.device)
        if self.training and cache is None:
            target = self._target(q.detach(), k.detach(), read)
            # every rank has the whole loss, and the gradients of the indexer are summed
            loss = self.own.index_loss * divergence(*index, read, target) / self.mesh.tensor.size
        return y, with_loss(stream, y, loss)

    def _paged(
        self, q: Tensor, latent: Tensor, turned: Tensor, index: tuple[Tensor, Tensor, Tensor], cache: DSAState
    ) -> Tensor:
        """The same of one token of each of many texts, [T, 1, n, V]. `PagedKeys.attend` has the shapes."""
        queries, keys, weights = index
        assert isinstance(cache.latents, PagedKeys) and isinstance(cache.index, PagedKeys)
        now = cache.latents.current.read
        pools = (
            *cache.latents.write(now, latent.squeeze(2), turned.squeeze(2)),
            cache.index.write(now, keys.squeeze(2), keys.squeeze(2)[..., :0])[0],
        )
        y_TnV = q.new_zeros(*q.shape[:2], self.options.value_dim)
        for group in now.groups:
            latents, angled, known = (PagedKeys.pages_of(pool, group.pages) for pool in pools)
            read = torch.arange(latents.shape[2], device=q.device) <= group.places.unsqueeze(-1)
            if not self.own.warm_up:
                own = (queries.squeeze(1)[group.rows], known.squeeze(1), weights.squeeze(1)[group.rows])
                read = chosen(*own, read, self.own.index_top_k)
            y = self._among_latents(
                q.squeeze(2)[group.rows].transpose(1, 2),
                latents,
                angled,
                lambda q, k, v, read=read: self._reading(q, k, v, read),  # type: ignore[misc]
            )
            y_TnV[group.targets] = y.transpose(1, 2).flatten(0, 1)[group.real]
        return y_TnV.unsqueeze(1)

    def _seen(self, begin: int, length: int, stream: Stream) -> Tensor:
        """Tokens that each position may read, of its own document, bool [B or 1, S, T]."""
        device, documents = self.query.weight.device, stream.documents
        causal = torch.ones(length, begin + length, dtype=torch.bool, device=device).tril(begin).unsqueeze(0)
        samples = stream.hidden.shape[0]
        if documents is None:
            return causal.expand(samples, -1, -1)
        return causal & (documents.unsqueeze(2) == documents.unsqueeze(1))

    def _reading(self, q: Tensor, k: Tensor, v: Tensor, read_BST: Tensor) -> Tensor:
        k, v = (each.expand(-1, q.shape[1], -1, -1) for each in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=read_BST.unsqueeze(1), scale=self.pattern.scale)

    @torch.no_grad()
    def _target(self, q: Tensor, k: Tensor, read_BST: Tensor) -> Tensor:
        """Probabilities of attention, their mean over all heads, [B, S, T] in fp32."""
        total = torch.zeros(read_BST.shape, dtype=at_least_fp32(q[:0]).dtype, device=q.device)
        for head in range(self.heads):
            logits = at_least_fp32(q[:, head] @ k[:, head].transpose(-1, -2)) * self.pattern.scale
            total += logits.masked_fill(~read_BST, float("-inf")).softmax(-1)
        return all_reduce(total, self.mesh.tensor) / self.options.heads

    @staticmethod
    def channels(model: ModelSection, options: DSAOptions, ranks: int) -> dict[str, Channel]:
        return {LOSS: Channel(1)} if options.index_loss else {}

    @staticmethod
    def needs_output(model: ModelSection, options: DSAOptions) -> bool:
        """Whether the backward pass needs tensors after the sum over the ranks: the loss."""
        return bool(options.index_loss)

    @staticmethod
    def sends(model: ModelSection, options: DSAOptions, tensor: TensorAxis) -> list[Event]:  # type: ignore[override]
        H, h, D = model.hidden_size, options.index_heads, options.index_dim
        first, *others = MLA.sends(model, options, tensor)
        matrices = ((h * D, options.query_rank or H), (D, H), (h, H))
        index = [event for rows, columns in matrices for event in whole_events(rows, columns)]
        learns = [*index, Shared(D), Shared(D)] if options.index_loss else []
        return [first, *learns, *others]

    @staticmethod
    def exchanges(  # type: ignore[override]
        model: ModelSection, options: DSAOptions, around: Around
    ) -> list[LayerMessage]:
        """The sum of probabilities over all heads."""
        if not options.index_loss or around.tensor == 1:
            return []
        size = around.samples * around.length * around.length
        return [LayerMessage("tensor", "all_reduce", size, "fp32", training=True)]

    @staticmethod
    def counts(model: ModelSection, options: DSAOptions, sequence_length: int) -> Counts:  # type: ignore[override]
        H, h, D, S = model.hidden_size, options.index_heads, options.index_dim, sequence_length
        inputs = options.query_rank or H
        matrices = inputs * h * D + H * D + H * h
        made = h * D + D + h
        found = MLA.counts(model, options, sequence_length) + Counts(
            parameters=matrices + 2 * D,
            flops=2 * (matrices + S * h * (D + 1)),
            activations=made + D + h,
            products=made,
            state=D * S,
        )
        loss = S if options.index_loss else 0  # the probabilities that it learns
        return replace(found, activations=found.activations + loss, whole=found.whole + made + D + h + loss)
