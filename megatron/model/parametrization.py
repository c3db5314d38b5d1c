"""Width and depth in initial values, multipliers and rates: muP (Yang et al. 2022, arXiv 2203.03466) and CompleteP
(Dey et al. 2025, arXiv 2505.01618).

m is the width over the base model's, L the number of blocks over the base model's (1 under muP), a the depth exponent.
All widths are of the logical tensors, never of a shard, so no layout changes them.

    | tensor                                   | initial std | learning rate     | weight decay | epsilon (CompleteP) |
    | both fans grow: hidden matrices          | / sqrt(m)   | / m  * L^(a-1)    | * m          | / m  * L^-a         |
    | only inputs grow: routers                | / m         | / m  * L^(a-1)    | * m          | 1    * L^-a         |
    | inputs do not grow: embedding, vectors   | 1           | 1    * L^(a-1)    | 1            | / m  * L^-a         |
    | head                                     | 1           | 1                 | 1            | / m                 |

Depth factors hold only inside blocks. Logits are divided by m, branches are multiplied by L^-a, and attention's scale
by sqrt(base_head_dim / head_dim). The rates are for optimizers whose steps do not depend on the size of gradients (Adam
and similar). A step of SGD does: gradients of tensors whose outputs grow fall with 1 / m. So under SGD hidden matrices
keep their rate, and tensors whose inputs do not grow, and the head, have m times the rate (Tensor Programs V, table 8).
Decoupled weight decay is multiplied by the inverse of the rate's factor of width, so that the decay per step stays."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.config import Config
from megatron.config.kind import kinds_of
from megatron.config.sections.model import ModelSection, ParametrizationOptions
from megatron.config.tree import thaw
from megatron.config.variants import options_of
from megatron.parallel.layout.shard import UNSCALED, Growth, Scales


@dataclass(frozen=True)
class Parametrization:
    """The factors of one model."""

    type: str = "standard"  # `ParametrizationOptions.type`
    width: float = 1.0  # hidden_size over that of the base model
    depth: float = 1.0  # number of blocks over that of the base model. 1 without depth scaling.
    exponent: float = 1.0  # of the depth, in the multiplier of branches
    base_head_dim: int | None = None  # channels per head of the base model, if heads grow in size
    by_gradient: bool = False  # the optimizer's steps are proportional to gradients (SGD)
    inside: bool = False  # for the tensors of a block

    @classmethod
    def of(cls, model: ModelSection, optimizer: str = "adamw") -> "Parametrization":
        """The parametrization of a resolved model, for an optimizer of this type."""
        own = model.parametrization
        if own.type == "standard":
            return cls()
        width = model.hidden_size / (own.base_width or model.hidden_size)
        blocks = len(model.blocks)
        depth = blocks / (own.base_depth or blocks) if own.type == "completep" else 1.0
        return cls(own.type, width, depth, own.depth_exponent, own.base_head_dim, optimizer == "sgd")

    @property
    def in_block(self) -> "Parametrization":
        """The same for the tensors of a block."""
        return replace(self, inside=True)

    @property
    def head(self) -> float:
        """Multiplier of logits."""
        return 1.0 / self.width

    @property
    def branch(self) -> float:
        """Multiplier of branches."""
        return self.depth**-self.exponent

    def attention(self, head_dim: int) -> float:
        """Multiplier of attention's scale."""
        return 1.0 if self.base_head_dim is None else math.sqrt(self.base_head_dim / head_dim)

    def scales(self, growth: Growth) -> Scales:
        """Factors of rate, decay and epsilon of a tensor with this growth."""
        if self.type == "standard":
            return UNSCALED
        rate = self._rate(growth)
        lr, epsilon = rate, 1.0
        if self.inside:
            lr *= self.depth ** (self.exponent - 1.0)
        if self.type == "completep":
            epsilon = (1.0 if growth is Growth.INPUTS else 1.0 / self.width) * (self.branch if self.inside else 1.0)
        return Scales(lr, 1.0 / rate, epsilon)

    def _rate(self, growth: Growth) -> float:
        """The rate's factor of width."""
        if self.by_gradient:
            return {Growth.BOTH: 1.0, Growth.INPUTS: 1.0 / self.width, Growth.OUTPUTS: self.width}.get(
                growth, self.width
            )
        return 1.0 / self.width if growth in (Growth.BOTH, Growth.INPUTS) else 1.0


def folded(model: ModelSection) -> ModelSection:
    """The same function without a parametrization, with multipliers in the model's own sections."""
    factors = Parametrization.of(model)
    if factors.type == "standard":
        return model
    changes: dict[str, Any] = {
        "parametrization": ParametrizationOptions(),
        "head": _with(model.head, multiplier=model.head.multiplier * factors.head),
        "residual": _with(model.residual, multiplier=model.residual.multiplier * factors.branch),
    }
    variants: dict[str, Mapping[str, Any]] = thaw(dict(model.variants))
    for kind in {kind for block in model.blocks for kind in block.kinds}:
        width = kinds_of(tuple(model.extensions))[kind.name].head_width
        if width is None:
            continue
        options = options_of(model, kind)
        scale = options.scale * factors.attention(width(options))
        if kind.variant is None:
            changes[kind.name] = _with(options, scale=scale)
        else:
            variants[kind.variant] = {**variants[kind.variant], "scale": scale}
    return _with(model, variants=variants, **changes)


def _with(section: Any, **changes: Any) -> Any:
    return section.model_copy(update=changes)


def folded_config(config: Config) -> Config:
    """`folded` for a whole configuration."""
    model = folded(config.model)
    return config if model is config.model else _with(config, model=model)
