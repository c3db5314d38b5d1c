"""A further input of each block, made of its tokens (Gemma 4's embeddings per layer, Google 2026).

    p = (norm(W e / sqrt(H)) + sqrt(P) T[token]) / sqrt(2)     e the embedding, T a table of the block's own
    x <- x + norm(O (gelu(G x) * p))                           after the block's branches

All blocks share the weights of the norm of W e. A table per block, and not one of all blocks, is on the block's stage.

Shapes: B samples, S positions, s of this rank, H hidden, P channels of the input."""

from dataclasses import replace
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.parallel.layers.linear import VocabEmbedding, WholeLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.shard import Role

from .counts import Counts
from .initialisation import Initialisation
from .norm import Norm, norm_activations, norm_parameters
from .stream import EMBEDDING, TOKEN_CHANNEL, TOKENS, Channel, Stream, token_ids

SHARED = "inputs_norm"  # logical name of the norm that all blocks share


class TokenInputs(nn.Module):
    """x [B, s, H] to what is added to it.

    Args:
        shared: modules that blocks of this rank share. The first one owns the norm.
    """

    def __init__(
        self, make: ParameterFactory, model: ModelSection, init: Initialisation, shared: dict[str, nn.Module]
    ) -> None:
        super().__init__()
        H, P, partial = model.hidden_size, model.residual.token_inputs, make.mesh.layout.sequence
        self.factors, self.dtype = (P**0.5, H**-0.5), make.dtype
        self.table = VocabEmbedding(make.scope("table"), model.vocab_size, P, init=init.embedding(model.vocab_size))
        self.projection = WholeLinear(make.scope("projection"), H, P, init=init.hidden(H, P), role=Role.HIDDEN)
        self.gate = WholeLinear(make.scope("gate"), H, P, init=init.hidden(H, P), role=Role.HIDDEN)
        self.output = WholeLinear(make.scope("output"), P, H, init=init.output(P, H))
        self.output_norm = Norm(make.scope("output_norm"), H, model.norm, partial=partial)
        self.owned: Norm | None = None
        if SHARED not in shared:
            own = replace(make, prefix=SHARED)
            self.owned = shared[SHARED] = Norm(own, P, model.norm, partial=partial, stream=False)
        self.borrowed = (cast(Norm, shared[SHARED]),)  # a tuple, so that it does not become a submodule

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        of_table, of_embedding = self.factors
        seen = self.borrowed[0](self.projection(stream.channels[EMBEDDING].to(self.dtype)) * of_embedding)
        known = self.table(token_ids(stream)) * of_table
        gated = F.gelu(self.gate(x.to(self.dtype)), approximate="tanh") * ((seen + known) * 0.5**0.5)
        return self.output_norm(self.output(gated))


def input_channels(model: ModelSection) -> dict[str, Channel]:
    """Channels from the embedding."""
    return {EMBEDDING: Channel(model.hidden_size, embedded=True), TOKENS: TOKEN_CHANNEL}


def input_counts(model: ModelSection, index: int) -> Counts:
    """Costs of a block's input. The first block counts the norm that all share."""
    H, P, norm = model.hidden_size, model.residual.token_inputs, model.norm
    vectors = norm_parameters(norm, H) + (0 if index else norm_parameters(norm, P))
    # the stream, the gate before and after its activation, the input, their product, what the norms read, 64-bit ids
    kept = H + 4 * P + norm_activations(norm, P) + norm_activations(norm, H) + 2
    parameters, products = model.vocab_size * P + 3 * H * P + vectors, 2 * P + H
    return Counts(parameters, 6 * H * P, activations=kept, copies=2, products=products)
