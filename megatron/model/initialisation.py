"""Initialisation schemes, per role of a matrix."""

import math
from dataclasses import replace

from megatron.config.sections.model import InitOptions
from megatron.parallel.layout.initial import Init
from megatron.parallel.layout.shard import Growth

from .parametrization import Parametrization


def scheme_init(
    scheme: str, options: InitOptions, hidden_size: float, layers: float, fan_in: float, fan_out: float
) -> Init:
    """The initial distribution of a matrix [fan_out, fan_in] under a scheme.

    normal: N(0, std). scaled_normal: N(0, std / sqrt(2 L)) (GPT-2). single_residual_scaled_normal: N(0, std / sqrt(L)),
    for blocks that add to the stream once (GPT-NeoX's Mamba). small_init: N(0, sqrt(2 / (5 h)))
    (Nguyen and Salazar 2019). wang_init: N(0, 2 / (L sqrt(h))) (GPT-J). xavier: Glorot and Bengio 2010.
    fan_in_uniform: U(-1, 1) / sqrt(fan_in), the default of torch's Linear. scaled_fan_in_uniform divides it by sqrt(L)
    (Mamba). orthogonal: Saxe et al. 2013. half_orthogonal: the same with gain 0.5 sqrt(fan_out / fan_in), and
    tiny_uniform: U(-1e-4, 1e-4): the head and the embedding of RWKV."""
    if scheme in ("fan_in_uniform", "scaled_fan_in_uniform"):
        depth = layers if scheme == "scaled_fan_in_uniform" else 1
        return Init("uniform", 1.0 / math.sqrt(fan_in * depth))
    if scheme == "xavier_uniform":
        return Init("uniform", math.sqrt(6.0 / (fan_in + fan_out)))
    if scheme == "orthogonal":
        return Init("orthogonal", 1.0)
    if scheme == "half_orthogonal":
        return Init("orthogonal", 0.5 * math.sqrt(max(fan_out / fan_in, 1.0)))
    if scheme == "tiny_uniform":
        return Init("uniform", 1e-4)
    if scheme == "zeros":
        return Init("constant", 0.0)
    std = {
        "normal": options.std,
        "scaled_normal": options.std / math.sqrt(2.0 * layers),
        "single_residual_scaled_normal": options.std / math.sqrt(layers),
        "small_init": math.sqrt(2.0 / (5.0 * hidden_size)),
        "wang_init": 2.0 / (layers * math.sqrt(hidden_size)),
        "xavier_normal": math.sqrt(2.0 / (fan_in + fan_out)),
    }[scheme]
    return Init("normal", std)


def spread(init: Init, factor: float, base: float, actual: float) -> Init:
    """Numbers `factor` times as large as the base model's.

    Numbers of orthonormal rows or columns fall by themselves, with the root of the longer side, which is `base` in the
    base model and `actual` here."""
    if init.kind == "orthogonal":
        factor *= math.sqrt(actual / base)
    return init if factor == 1.0 else replace(init, value=init.value * factor)


class Initialisation:
    """Schemes of one model, by role. Fans are of the separate matrix, not of a fused one.

    Under a parametrization a scheme gives the base model's values, and this model's follow from them.

    Attributes:
        factors: the parametrization.
        blocks: number of blocks.
        layers: the number of blocks for the schemes.
        index: of the block that is made.
    """

    def __init__(
        self, own: InitOptions, hidden_size: int, blocks: int, index: int = 0, factors: Parametrization | None = None
    ):
        self.options, self.hidden_size, self.blocks, self.index = own, hidden_size, blocks, index
        self.factors = factors or Parametrization()
        self.layers = own.layers or blocks

    def at(self, index: int) -> "Initialisation":
        """The same for the block of this index."""
        return Initialisation(self.options, self.hidden_size, self.blocks, index, self.factors)

    def _of(self, scheme: str, fan_in: int, fan_out: int, growth: Growth) -> Init:
        m, of_base = self.factors.width, self.options
        if self.factors.type == "standard":
            return scheme_init(scheme, of_base, self.hidden_size, self.layers, fan_in, fan_out)
        inputs = fan_in / m if growth is not Growth.OUTPUTS else fan_in
        outputs = fan_out / m if growth in (Growth.BOTH, Growth.OUTPUTS) else fan_out
        depth = self.layers / self.factors.depth
        base = scheme_init(scheme, of_base, self.hidden_size / m, depth, inputs, outputs)
        factor = {Growth.BOTH: m**-0.5, Growth.INPUTS: 1.0 / m}.get(growth, 1.0)
        return spread(base, factor, max(inputs, outputs), max(fan_in, fan_out))

    def embedding(self, rows: int) -> Init:
        return self._of(self.options.embedding, rows, self.hidden_size, Growth.OUTPUTS)

    def head(self, rows: int) -> Init:
        return self._of(self.options.head or self.options.embedding, self.hidden_size, rows, Growth.HEAD)

    def hidden(self, fan_in: int, fan_out: int) -> Init:
        return self._of(self.options.hidden, fan_in, fan_out, Growth.BOTH)

    def output(self, fan_in: int, fan_out: int) -> Init:
        return self._of(self.options.output, fan_in, fan_out, Growth.BOTH)

    def reads(self, fan_in: int, fan_out: int) -> Init:
        """A matrix of the scheme `hidden` from the stream to a number of outputs that no width changes (routers)."""
        return self._of(self.options.hidden, fan_in, fan_out, Growth.INPUTS)

    def inside(self, fan_in: int, fan_out: int) -> Init:
        """A matrix of the scheme `hidden` between sizes that no width changes."""
        return scheme_init(
            self.options.hidden,
            self.options,
            self.hidden_size / self.factors.width,
            self.layers / self.factors.depth,
            fan_in,
            fan_out,
        )
