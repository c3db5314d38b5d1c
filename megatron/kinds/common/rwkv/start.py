"""Initial values of RWKV layers: the formulas of the authors' training code.

n is a channel of C, l the layer of L. `ratio` runs from 0 in the first layer to 1 in the last, `rest` from 1 to 1/L.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from megatron.model.initialisation import Initialisation
from megatron.parallel.layout.initial import ZEROS, Init, formula


class Start:
    """Initial values of one layer.

    Args:
        scheme: `RWKVOptions.init`.
        size: channels of the residual stream.
    """

    def __init__(self, scheme: str, init: Initialisation, size: int):
        self.scheme, self.init, self.size = scheme, init, size
        self.ratio = init.index / max(init.blocks - 1, 1)
        self.rest = 1.0 - init.index / init.blocks

    def reads(self, inputs: int, outputs: int, gain: float = 1.0, spread: float = 1.0) -> Init:
        """A matrix that reads the stream: orthogonal with this gain, or uniform in +-`spread` / sqrt(inputs)."""
        if self.scheme == "model":
            return self.init.hidden(inputs, outputs)
        if self.scheme == "uniform":
            return Init("uniform", spread / math.sqrt(inputs))
        return Init("orthogonal", gain) if gain else ZEROS

    def writes(self, inputs: int, outputs: int) -> Init:
        """A matrix that writes to the stream."""
        return self.init.output(inputs, outputs) if self.scheme == "model" else ZEROS

    def shares(self, *powers: float, lift: float = 0.0, lifted: int = -1) -> Init:
        """[m, C]: (n / C)^power, the share of the token itself. Row `lifted` (the values) is higher by `lift`."""
        return formula(self._shares(powers, lift, lifted))

    def _shares(self, powers: tuple[float, ...], lift: float, lifted: int) -> Callable[..., np.ndarray]:
        return lambda mix, n: (n / self.size) ** np.asarray(powers)[mix] + lift * (mix == lifted)

    def mixes(self, *powers: float, lift: float = 0.0, lifted: int = -1) -> Init:
        """[m, C]: the share of the token before, 1 less that of the token itself."""
        own = self._shares(powers, lift, lifted)
        return formula(lambda mix, n: 1.0 - own(mix, n))

    def norm(self) -> Init:
        """Weight of the norm of the heads."""
        return Init("constant", ((1 + self.init.index) / self.init.blocks) ** 0.7)

    def decays(self, low: float, span: float) -> Init:
        """A vector [C] of logarithms of decay rates: slow in the first channels, the more so in deep layers."""
        return self.along(lambda x: low + span * x ** (0.7 + 1.3 * self.ratio))

    def along(self, function: Callable[..., np.ndarray]) -> Init:
        """A vector [C]: `function` of n / (C - 1)."""
        return formula(lambda n: function(n / max(self.size - 1, 1)))
