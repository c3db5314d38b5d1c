"""Mixers that read the same and whose outputs are summed (`attention&mamba2`; Falcon-H1, Zuo et al. 2025).

    y = mixer_1(x) + mixer_2(x) + ...

Each is the layer that it would be alone: its options say what it multiplies its input and its output by.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from .relay import Relay, new_state
from .stream import Stream, apply_layer


class SideBySide(nn.ModuleDict):
    """x [B, s, H] to the sum of its layers' outputs [B, s, H], and the channels that they write, if any.

    Args:
        layers: by the names of their kinds, in the pattern's order.
        relays: of those layers whose states ranks hand on, by the same names.
    """

    def __init__(self, layers: dict[str, nn.Module], relays: dict[str, Relay]) -> None:
        super().__init__(layers)
        self.relays = relays

    def forward(
        self, x: Tensor, stream: Stream, states: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        outputs, written = [], {}
        for name, layer in self.items():
            y, own = apply_layer(layer, x, stream, states and states[name], self.relays.get(name))
            outputs.append(y)
            written.update(own)
        return sum(outputs[1:], outputs[0]), written

    def new_state(self) -> dict[str, Any]:
        """Of each layer, what it keeps between pieces of a sequence."""
        return {name: new_state(layer) for name, layer in self.items()}

    def prepare(self, stream: Stream) -> None:
        """What a compiled block finds in the stream's memo (see `Attention.prepare`)."""
        for layer in self.values():
            cast(Any, layer).prepare(stream)
