"""The residual stream from one layer to the next, on one rank or across pipeline stages.

Shapes: B samples, S positions of this rank's tensor parallel group, s positions of this rank, H hidden. S is the whole
sequence, or with context parallelism a part of it. s is S/t with sequence parallelism, else S."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .relay import Relay


@dataclass(frozen=True)
class Chunk:
    """The part of a sequence in a stream, where layers compute one part after the other (`model/chunks.py`)."""

    number: int  # of the part, from 0
    first: int  # tokens of the sequence before it
    tokens: int  # of the part, on all ranks with context parallelism
    whole: int  # tokens of the sequence

    @property
    def last(self) -> bool:
        return self.first + self.tokens == self.whole


@dataclass(frozen=True)
class Stream:
    """Hidden state and side channels.

    Attributes:
        hidden: [B, s, H].
        positions: int [B, S], position of each token in its document. None where it is its index (never with context
            parallelism).
        documents: int [B, S], number of each token's document within the sample. None where all is one document.
        samples: int64 [B], global sample numbers, the keys of dropout. None where nothing is drawn.
        channels: further float tensors from some layers to later ones, by name (see `Channel`).
        chunk: the part of the sequence. None: the whole.
        memo: values that several layers derive from the same side channels (masks, rotary angles).
    """

    hidden: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    samples: Tensor | None = None
    channels: dict[str, Tensor] = field(default_factory=dict)
    chunk: Chunk | None = None
    memo: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def remember(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value made once under this key and shared by the layers of this rank."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    @property
    def first(self) -> int:
        """Tokens of the sequence before this part of it."""
        return 0 if self.chunk is None else self.chunk.first

    @property
    def sample_numbers(self) -> Tensor:
        """`samples`. ValueError where the stream has none, but random numbers need them."""
        if self.samples is None:
            raise ValueError("random numbers in training must have the numbers of the samples, which are their keys")
        return self.samples

    def with_hidden(self, hidden: Tensor) -> Stream:
        return replace(self, hidden=hidden)

    def with_channels(self, values: Mapping[str, Tensor]) -> Stream:
        return replace(self, channels={**self.channels, **values})


COLUMNS = "columns"  # in the memo of a stream: numbers of each label from the data, by name
LOSS = "auxiliary_loss"  # a channel whose mean the head adds to the loss of the micro-batch


def with_loss(stream: Stream, y: Tensor, total: Tensor | float) -> dict[str, Tensor]:
    """The channel of auxiliary losses with one more of this rank's tokens. `y` has the stream's shape and type."""
    return {LOSS: sum_of_losses(stream.channels.get(LOSS), y, torch.as_tensor(total, device=y.device))}


def sum_of_losses(before: Tensor | None, y: Tensor, total: Tensor) -> Tensor:
    """The channel `before`, or zeros, and one more loss.

    It is spread before it is rounded, so that the gradient is summed in fp32: scaled for fp16, the sum is none of its
    numbers."""
    before = y.new_zeros((*y.shape[:2], 1)) if before is None else before
    return before + total.expand_as(before).to(y.dtype)


INJECTED = "injected"  # a channel inside of a recurrent core: the output of the prelude


@dataclass(frozen=True)
class Channel:
    """A float tensor next to the hidden state, of the same type, on one rank.

    Attributes:
        width: last dimension.
        whole: [B, S, width], all positions on every tensor parallel rank. Else [B, s, width] like the hidden state.
        embedded: the embedding makes it: its output, or digits of token ids. Otherwise the first layer that declares
            the channel makes it.
    """

    width: int
    whole: bool = False
    embedded: bool = False


EMBEDDING = "embedding"  # a channel of the embedding itself
TOKENS = "tokens"  # a channel of the digits of token ids, for layers that read them
DIGITS, BASE = 3, 256  # whole numbers up to 256 are exact in every type
TOKEN_CHANNEL = Channel(DIGITS, whole=True, embedded=True)


def token_digits(tokens_BS: Tensor, like: Tensor) -> Tensor:
    """The digits of token ids, [B, S, DIGITS] of the type of `like`."""
    return torch.stack([tokens_BS // BASE**place % BASE for place in range(DIGITS)], -1).to(like.dtype)


def token_ids(stream: Stream) -> Tensor:
    """Token ids [B, S] of the channel `TOKENS`."""
    ids, *higher = stream.channels[TOKENS].detach().long().unbind(-1)
    for place, digits in enumerate(higher, 1):
        ids = ids.add(digits, alpha=BASE**place)
    return ids


def live_channels(used: Sequence[Mapping[str, Channel]]) -> list[dict[str, Channel]]:
    """The channels of the stream before each layer and after the last: from their first to their last user, which is
    the head for `LOSS`.

    Args:
        used: the channels that each layer declares.
    """

    def alive(name: str, channel: Channel, index: int) -> bool:
        made = channel.embedded or any(name in each for each in used[:index])
        return made and (name == LOSS or any(name in each for each in used[index:]))

    known = {name: channel for each in used for name, channel in each.items()}
    return [{name: known[name] for name in sorted(known) if alive(name, known[name], i)} for i in range(len(used) + 1)]


@dataclass(frozen=True)
class StreamForm:
    """The tensors of a stream at one point of the model, by which a pipeline stage unpacks it."""

    positions: bool = False
    documents: bool = False
    samples: bool = False
    channels: Mapping[str, Channel] = field(default_factory=dict)

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of the integer side channels that this form has, in the order of packing."""
        return tuple(name for name in ("positions", "documents", "samples") if getattr(self, name))

    def name(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.optional, tensors))

    def pack(self, stream: Stream) -> tuple[Tensor, ...]:
        """The tensors of this form in a fixed order, hidden first."""
        optional = [getattr(stream, name) for name in self.optional]
        return (stream.hidden, *(stream.channels[name] for name in self.channels), *optional)

    def unpack(self, tensors: tuple[Tensor, ...] | Tensor) -> Stream:
        tensors = (tensors,) if isinstance(tensors, Tensor) else tensors
        rest = list(tensors[1:])
        channels = {name: rest.pop(0) for name in self.channels}
        named = self.name(rest)
        return Stream(
            tensors[0], named.get("positions"), named.get("documents"), named.get("samples"), channels=channels
        )

    def join(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Packed tensors with all floats in one, [B, elements of a sample].

        A pipeline engine runs one backward pass per float tensor of a stage's output, so there is only one."""
        if not self.channels:
            return tensors
        floats = 1 + len(self.channels)
        return (torch.cat([each.flatten(1) for each in tensors[:floats]], 1), *tensors[floats:])

    def _shapes(self, hidden_size: int, cut: int) -> list[tuple[int, int]]:
        """(positions, in units of the hidden state's here, and width) of each float tensor."""
        return [(1, hidden_size), *((cut if each.whole else 1, each.width) for each in self.channels.values())]

    def sample_width(self, hidden_size: int, cut: int) -> int:
        """Floats of a sample for each position of the hidden state here. Arguments are as in `split`."""
        return sum(times * width for times, width in self._shapes(hidden_size, cut))

    def common_width(self, hidden_size: int, cut: int) -> int:
        """The largest number that divides the floats of each tensor for each position. Arguments are as in `split`.

        A block of this number of values, or of a divisor, is of one tensor."""
        return math.gcd(*(times * width for times, width in self._shapes(hidden_size, cut)))

    def split(self, tensors: tuple[Tensor, ...], hidden_size: int, cut: int) -> tuple[Tensor, ...]:
        """The reverse of `join`.

        Args:
            cut: ranks over which the sequence of the hidden state is cut.
        """
        if not self.channels:
            return tensors
        shapes = self._shapes(hidden_size, cut)
        length = tensors[0].shape[1] // self.sample_width(hidden_size, cut)
        parts = tensors[0].split([length * times * width for times, width in shapes], 1)
        return (*(part.unflatten(1, (-1, width)) for part, (_, width) in zip(parts, shapes)), *tensors[1:])


def apply_layer(
    layer: nn.Module, x: Tensor, stream: Stream, state: Any, relay: Relay | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """A layer's output, and the channels that it writes, if any.

    Args:
        state: of the layer. One with a method `read` calls the layer itself.
        relay: where ranks send on the states of this layer.
    """
    if relay is not None:
        y = relay.through(layer, x, stream)
    else:
        y = state.read(layer, x, stream) if hasattr(state, "read") else layer(x, stream, state)
    return (y, {}) if isinstance(y, Tensor) else y
