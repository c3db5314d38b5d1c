"""The residual stream: what one layer hands to the next, on one rank or across pipeline stages.

Shapes: B samples, S positions of the whole sequence, s positions held by this rank (S/t with sequence
parallelism, else S), H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Stream:
    """Hidden state and side channels.

    Attributes:
        hidden: [B, s, H].
        positions: int [B, S], position of each token in its document; None where it is its index.
        documents: int [B, S], number of each token's document within the sample; None where all is one document.
        samples: int64 [B], global sample numbers, the keys of dropout; None where nothing is drawn.
        channels: further float tensors by name that some architectures carry from layer to layer.
        memo: what several layers derive from the same side channels (masks, rotary angles), made once.
    """

    hidden: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    samples: Tensor | None = None
    channels: dict[str, Tensor] = field(default_factory=dict)
    memo: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def remember(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value made once under this key and shared by the layers of this rank."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def with_hidden(self, hidden: Tensor) -> Stream:
        return replace(self, hidden=hidden)

    def with_channel(self, name: str, value: Tensor) -> Stream:
        return replace(self, channels={**self.channels, name: value})

    def pack(self) -> tuple[Tensor, ...]:
        """The tensors that exist, hidden first, in a fixed order."""
        optional = [t for t in (self.positions, self.documents, self.samples) if t is not None]
        return (self.hidden, *(self.channels[name] for name in sorted(self.channels)), *optional)


@dataclass(frozen=True)
class StreamForm:
    """Which tensors a stream of this model has: what a pipeline stage must know to unpack one."""

    positions: bool = False
    documents: bool = False
    samples: bool = False
    channels: tuple[str, ...] = ()

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of the integer side channels that this form has, in the order of packing."""
        return tuple(name for name in ("positions", "documents", "samples") if getattr(self, name))

    def name(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.optional, tensors))

    def unpack(self, tensors: tuple[Tensor, ...] | Tensor) -> Stream:
        tensors = (tensors,) if isinstance(tensors, Tensor) else tensors
        rest = list(tensors[1:])
        channels = {name: rest.pop(0) for name in sorted(self.channels)}
        return Stream(tensors[0], channels=channels, **self.name(rest))
