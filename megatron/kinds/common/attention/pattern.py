"""Options of attention: masks, changes of logits, dropout."""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from megatron.config.sections.model import FusedAttentionOptions


@dataclass(frozen=True)
class Pattern:
    """Masks in addition to causality, and changes of the logits."""

    scale: float  # multiplier of query-key products
    window: int | None = None  # a token sees itself and the window - 1 before it
    softcap: float | None = None  # logits c become softcap * tanh(c / softcap).
    # ALiBi slope of each local query head. The logit of key k at query q gets slope * (k - q).
    slopes: tuple[float, ...] | None = None
    flash: str = "auto"  # see `model.fused_attention`
    most_documents: int | None = None  # of a sample for `varlen`, on average over a micro-batch. None without `varlen`.

    def computed_by(self, options: FusedAttentionOptions) -> "Pattern":
        """The same, on a GPU by these kernels."""
        most = options.most_documents if options.documents == "varlen" else None
        return replace(self, flash=options.flash, most_documents=most)


@dataclass(frozen=True)
class Dropped:
    """Dropout of probabilities, drawn by key."""

    rate: float  # share of dropped probabilities
    key: int  # of the draws, from `site_key`
    samples_B: Tensor  # int64 [B], global sample numbers
    first_head: int = 0  # number of the first query head in the model.
    # Positions of the whole sequence. None where the keys are all of them. The keys are its first ones.
    length: int | None = None


def alibi_slopes(heads: int) -> list[float]:
    """Slopes of Press et al. 2021: geometric for powers of two, interleaved with the next power otherwise."""

    def powers(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (index + 1) / count) for index in range(count)]

    base = 1 << int(math.log2(heads))
    return powers(base) + powers(2 * base)[0::2][: heads - base]
