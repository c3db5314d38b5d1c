"""Modules that predict further tokens than the next one (DeepSeek-V3, arXiv 2412.19437, section 2.2).

With t the tokens, E the embedding and h^0 the input of the head, module k = 1 ... D has of position i
    h^k_i = norm(block(W [norm(E(t_{i+k})), norm(h^{k-1}_i)]))
and the model's own head predicts t_{i+k+1} from it. The loss of the next token gets the further term
    `loss_weight / D * sum over k of (sum over i of w_{i+k} c^k_i) / (sum of w)`
with the weight w and the cost c of a label. The weight is 0 where a sample has no more labels, and where the tokens are
of several documents that do not attend to each other.

The parts of W are in the order of DeepSeek's files (the reverse of the paper's), and the modules are numbered after the
blocks of the stack, as there.

Shapes: B samples, S positions of this rank's tensor parallel group, s of this rank, H hidden, K modules."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.parallel.layers.collectives import enter
from megatron.parallel.layers.linear import RowLinear, VocabEmbedding
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.shard import Role, Shard

from .block import Block
from .initialisation import Initialisation
from .norm import Norm
from .stream import Stream


class FurtherLabels(NamedTuple):
    """Labels int64 [K, ..., S] and their weights [K, ..., S], of module k at index k - 1."""

    labels: Tensor
    weights: Tensor


def further_labels(labels: Tensor, weights: Tensor, documents: Tensor | None, depth: int) -> FurtherLabels:
    """Labels of the modules.

    Args:
        labels, weights: of the next token, [..., S], of whole samples.
        documents: number of each input's document in its sample, [..., S]. None where all attend to each other.
        depth: K.
    """
    length, found = labels.shape[-1], []
    for ahead in range(1, depth + 1):
        places = torch.arange(ahead, length + ahead, device=labels.device)
        there, places = places < length, places.clamp(max=length - 1)
        counted = weights[..., places] * there
        if documents is not None:
            counted = counted * (documents[..., places] == documents)
        found.append((labels[..., places], counted))
    return FurtherLabels(torch.stack([each for each, _ in found]), torch.stack([each for _, each in found]))


class FurtherToken(nn.Module):
    """One module: the head's input for a token, and the embedding of the next token, to the head's input for that."""

    def __init__(self, make: ParameterFactory, model: ModelSection, init: Initialisation, block: Block, output: Norm):
        """`output`: the norm of its result."""
        super().__init__()
        H, cut = model.hidden_size, make.mesh.layout.sequence
        self.mesh = make.mesh
        (self.span,) = Shard(1).spans(2 * H, make.mesh.tensor.rank, make.mesh.tensor.size)
        self.embedding_norm = Norm(make.scope("embedding_norm"), H, model.norm, partial=cut)
        self.hidden_norm = Norm(make.scope("hidden_norm"), H, model.norm, partial=cut)
        self.projection = RowLinear(make.scope("projection"), 2 * H, H, init=init.hidden(2 * H, H), role=Role.HIDDEN)
        self.block, self.output_norm = block, output

    def forward(self, embedded: Tensor, x: Tensor, stream: Stream) -> tuple[Tensor, Stream]:
        """(h^k, the stream after the block) of E(t_{i+k}) and h^{k-1}, [B, s, H] each."""
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(x)], -1)
        mine = enter(both, self.mesh)[..., self.span.start : self.span.stop]
        stream = self.block(stream.with_hidden(self.projection(mine).to(stream.hidden.dtype)))
        return self.output_norm(stream.hidden), stream


class MultiTokenPrediction(nn.Module):
    """All modules.

    Attributes:
        weight: of each module's loss.
        sums: fp64 [2, K], weighted cross-entropies and weights in training since they were cleared.
    """

    def __init__(self, modules: Sequence[FurtherToken], table: VocabEmbedding, model: ModelSection):
        """`table`: the token embedding, or a copy of it with the same weights."""
        super().__init__()
        self.tokens, self.table, self.multiplier = nn.ModuleList(modules), table, model.embedding.multiplier
        self.weight = model.multi_token_prediction.loss_weight / len(modules)
        self.sums = torch.zeros(2, len(modules), dtype=torch.float64, device=table.weight.device)

    def forward(
        self, x: Tensor, stream: Stream, labels_BS: Tensor, further: FurtherLabels
    ) -> tuple[list[Tensor], Stream]:
        """(what the head reads for each module, [B, s, H] each, the stream behind the last), of what it read."""
        found = []
        for module, read_BS in zip(self.tokens, (labels_BS, *further.labels[:-1])):
            embedded = self.table(read_BS)
            x, stream = module(embedded if self.multiplier == 1.0 else embedded * self.multiplier, x, stream)
            found.append(x)
        return found, stream

    @torch.no_grad()
    def add(self, ce_KBS: Tensor, weights_KBS: Tensor) -> None:
        """Add a micro-batch to the sums."""
        both = torch.stack([ce_KBS * weights_KBS, weights_KBS]).double()
        self.sums += both.flatten(2).sum(2)
