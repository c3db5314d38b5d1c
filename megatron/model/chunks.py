"""A sequence that each layer works on in chunks (`training.sequence_chunks`, FPDT, Yao et al. 2024).

A block reads one chunk after the other, as it reads pieces of a text when it decodes: its layers continue from their
state after the chunks before (`new_state`). Only the input of a chunk is kept. The backward pass computes each chunk
again, the last one first, and so has the intermediate tensors of one chunk of one block at a time. Keys and values of
attention wait in the host's memory.

With sequence parallelism each tensor parallel rank has its share of every chunk, one after the other, and with context
parallelism, too."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config import Config

from .recompute import deciding
from .stream import Chunk, Stream


@dataclass(frozen=True)
class Chunks:
    """How a run's sequences are cut."""

    tokens: int = 0  # of a chunk on all ranks. 0 where sequences are not cut.
    context: int = 1  # ranks that share a sequence
    cut: int = 1  # tensor parallel ranks that share the hidden state's positions

    @classmethod
    def of(cls, config: Config) -> "Chunks":
        training, parallel = config.training, config.parallel
        if training.sequence_chunks == 1:
            return cls()
        tokens = training.sequence_length // training.sequence_chunks
        return cls(tokens, parallel.context, parallel.tensor if parallel.sequence else 1)

    def of_length(self, length: int) -> list[Chunk]:
        """The chunks of a sequence, where this rank has `length` of its tokens."""
        whole = length * self.context
        begins = range(0, whole, self.tokens)
        return [Chunk(number, first, min(self.tokens, whole - first), whole) for number, first in enumerate(begins)]

    def parts(self, x: Tensor, length: int) -> tuple[Tensor, ...]:
        """The part of each chunk, in order, of a tensor [B, .. of `length` tokens ..]."""
        sizes = [chunk.tokens * x.shape[1] // chunk.whole for chunk in self.of_length(length)]
        return x.split(sizes, 1)

    def streams(self, stream: Stream) -> list[Stream]:
        """The stream's chunks."""
        length = stream.hidden.shape[1] * self.cut
        chunks = self.of_length(length)

        def parts(x: Tensor | None) -> tuple[Tensor | None, ...]:
            return (None,) * len(chunks) if x is None else self.parts(x, length)

        channels = {name: self.parts(each, length) for name, each in stream.channels.items()}
        both = zip(chunks, parts(stream.hidden), parts(stream.positions), parts(stream.documents))
        return [
            Stream(
                hidden, positions, documents, stream.samples, {name: each[at] for name, each in channels.items()}, chunk
            )
            for at, (chunk, hidden, positions, documents) in enumerate(both)
            if hidden is not None
        ]


WHOLE = Chunks()  # sequences are not cut


def mapped(state: Any, instead: Callable[[Any], Any]) -> Any:
    """A copy of a block's state, with `instead` of each part that is not None."""
    if isinstance(state, dict):
        return {name: mapped(each, instead) for name, each in state.items()}
    if isinstance(state, tuple | list):
        return type(state)(mapped(each, instead) for each in state)
    if not dataclasses.is_dataclass(state) or isinstance(state, type):
        return state
    if (other := instead(state)) is not None:
        return other
    return replace(state, **{one.name: mapped(getattr(state, one.name), instead) for one in dataclasses.fields(state)})


def recomputed_call(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, which keeps only its inputs for the backward pass."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=deciding)


def work_in_chunks(block: nn.Module, chunks: Chunks) -> None:
    """Make the block compute one chunk after the other, and recompute each in the backward pass."""
    if not chunks.tokens:
        return
    plain, new_state = block.forward, cast(Callable[[], Any], block.new_state)

    def step(stream: Stream, state: Any) -> tuple[Stream, Any]:
        state = mapped(state, lambda each: None)  # a copy, whose fields can be set
        return plain(stream, state), state

    @functools.wraps(plain)
    def forward(stream: Stream, state: Any = None) -> Stream:
        if state is not None:
            return plain(stream, state)
        state, found = mapped(new_state(), lambda each: each.in_chunks() if hasattr(each, "in_chunks") else None), []
        for part in chunks.streams(stream):
            given, state = recomputed_call(step, part, state)
            found.append(given)
        names = found[0].channels
        channels = {name: torch.cat([each.channels[name] for each in found], 1) for name in names}
        return replace(stream, hidden=torch.cat([each.hidden for each in found], 1), channels=channels)

    block.forward = forward


def embed_in_chunks(embedding: nn.Module, chunks: Chunks) -> None:
    """Make the embedding give each rank its share of every chunk, one after the other."""
    if not chunks.tokens:
        return
    plain = embedding.forward

    @functools.wraps(plain)
    def forward(
        tokens_BS: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
        begin: int | None = None,
    ) -> Stream:
        if begin is not None:
            return plain(tokens_BS, positions, documents, samples, begin)
        length = tokens_BS.shape[1]
        found = []
        for at, chunk in enumerate(chunks.of_length(length)):
            tokens, own = (None if each is None else chunks.parts(each, length)[at] for each in (tokens_BS, positions))
            found.append(plain(tokens, own, None, samples, chunk.first, chunk))
        channels = {name: torch.cat([each.channels[name] for each in found], 1) for name in found[0].channels}
        return Stream(torch.cat([each.hidden for each in found], 1), positions, documents, samples, channels)

    embedding.forward = forward
