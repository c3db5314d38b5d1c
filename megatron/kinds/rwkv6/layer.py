"""RWKV-6 "Finch" (Peng et al. 2024): RWKV-5 whose token shift and decays depend on the token.

Shapes: B samples, S positions, H hidden, R rank of the five matrices of the token shift.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.kinds.common.rwkv.low_rank import LowRank, Whole
from megatron.kinds.common.rwkv.start import Start
from megatron.kinds.common.rwkv.token_shift import mixed, shifted
from megatron.kinds.rwkv5.layer import RWKV5, Mixes
from megatron.kinds.rwkv6.options import RWKV6Options
from megatron.model.costs.traffic import Enter, Event, Leave, Shared, TensorAxis
from megatron.model.counts import Counts
from megatron.parallel.layers.collectives import sum_gradient
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import Init
from megatron.parallel.layout.shard import Role


class RWKV6(RWKV5[RWKV6Options]):
    """x [B, s, H] to its output [B, s, H]: output(norm(wkv) * silu(gate))."""

    def make_mixes(self, make: ParameterFactory, H: int, options: RWKV6Options, start: Start) -> None:
        rest = start.rest
        self.mix_all = make.parameter("mix_all", (1, H), role=Role.STATE, init=start.mixes(rest))
        self.mix = make.parameter(
            "mix",
            (5, H),
            role=Role.STATE,
            init=start.mixes(rest, rest, rest, 0.5 * rest, 0.5 * rest, lift=0.3 * start.ratio, lifted=2),
        )
        self.mix_down = Whole(make.scope("mix_down"), H, 5 * options.mix_rank)
        self.mix_up = make.parameter("mix_up", (5, options.mix_rank, H), role=Role.STATE, init=Init("uniform", 0.01))
        self.move = LowRank(make.scope("move"), H, options.decay_rank, H, Init("uniform", 0.01), torch.tanh)

    def mixes(self, x_BSH: Tensor, last: Tensor | None, starts: Tensor | None) -> Mixes:
        whole = self.mesh.tensor
        (both,) = mixed(x_BSH, sum_gradient(self.mix_all, whole), last, starts)
        w, k, v, r, g = recomputed(
            _mixed,
            x_BSH,
            self.mix_down(both),
            sum_gradient(self.mix_up, whole),
            sum_gradient(self.mix, whole),
            last,
            starts,
        )
        return k, v, r, g, self.move(w)

    @classmethod
    def sends(cls, model: ModelSection, options: RWKV6Options, tensor: TensorAxis) -> list[Event]:
        H, rank = model.hidden_size, options.mix_rank
        mixes = [Shared(H), Shared(5 * rank * H), Shared(5 * rank * H), Shared(5 * H)]
        return [Enter(H), *mixes, Shared(options.decay_rank * H), Leave(H)]

    @classmethod
    def counts(cls, model: ModelSection, options: RWKV6Options, sequence_length: int) -> Counts:
        H, ranks = model.hidden_size, 5 * options.mix_rank + options.decay_rank
        matrices = 2 * H * ranks
        # In addition to RWKV-5: two mixed tensors, results of the matrices of low rank, and moved decays.
        more = Counts(
            parameters=matrices + 2 * H, flops=2 * matrices, activations=2 * H + ranks + H, products=ranks + 5 * H + H
        )
        return super().counts(model, options, sequence_length) + more


def _mixed(
    x_BSH: Tensor, inner: Tensor, up_5RH: Tensor, mix_5H: Tensor, last: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, ...]:
    """x + (shift(x) - x) * (mix + tanh(inner) up) for decay, key, value, receptance and gate."""
    parts = torch.tanh(inner).unflatten(-1, (5, -1))
    offsets = torch.einsum("bsmr,mrh->mbsh", parts, up_5RH.to(inner.dtype))
    difference = shifted(x_BSH, last, starts) - x_BSH
    return tuple(x_BSH + difference * (mix + offset) for mix, offset in zip(mix_5H.to(x_BSH.dtype), offsets))
