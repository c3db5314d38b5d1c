"""How the parameters of RWKV layers start: the formulas of the authors' training code.

n is a channel of C, l the layer of L; `ratio` runs from 0 in the first layer to 1 in the last, `rest` from 1 to 1/L.
"""

from __future__ import annotations

import math

import numpy as np

from megatron.parallel.initial import Init, formula

from ..initialisation import Initialisation


class Start:
    """Initial values of one layer.

    Args:
        scheme: `RWKVOptions.init`.
        size: channels of the residual stream.
    """

    def __init__(self, scheme: str, init: Initialisation, size: int):
        self.scheme, self.init, self.size = scheme, init, size
        self.ratio = init.index / max(init.layers - 1, 1)
        self.rest = 1.0 - init.index / init.layers

    def reads(self, inputs: int, outputs: int, gain: float = 1.0, spread: float = 1.0) -> Init:
        """A matrix that reads the stream: orthogonal with this gain, or uniform in +-`spread` / sqrt(inputs)."""
        if self.scheme == "model":
            return self.init.hidden(inputs, outputs)
        return Init("orthogonal", gain) if self.scheme == "published" else Init("uniform", spread / math.sqrt(inputs))

    def writes(self, inputs: int, outputs: int) -> Init:
        """A matrix that writes to the stream."""
        return self.init.output(inputs, outputs) if self.scheme == "model" else Init("constant", 0.0)

    def mixes(self, *powers: float) -> Init:
        """[m, C]: 1 - (n / C)^power, the share of the token before."""
        return formula(lambda mix, n: 1.0 - (n / self.size) ** np.asarray(powers)[mix])

    def norm(self) -> Init:
        """Weight of the norm of the heads."""
        return Init("constant", ((1 + self.init.index) / self.init.layers) ** 0.7)

    def along(self, function) -> Init:
        """A vector [C]: `function` of n / (C - 1)."""
        return formula(lambda n: function(n / max(self.size - 1, 1)))
