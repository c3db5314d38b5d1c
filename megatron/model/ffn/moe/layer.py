"""The mixture of experts as a feed-forward network: from the stream to the stream.

Shapes: B samples, S positions, s positions of this rank, T = B S tokens, H hidden, E experts, k experts per token.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.config.sections.moe import MoEOptions
from megatron.parallel.collectives import enter, leave
from megatron.parallel.parameters import ParameterFactory

from ...counts import Counts
from ...initialisation import Initialisation
from ...recompute import once
from ...stream import Stream
from ..mlp import KEPT
from .balance import Balance
from .choice import Choice, choose, scores_of, weights_of
from .dispatch import Stay
from .experts import Experts
from .permute import combine, permute, sort
from .router import LinearRouter
from .shared import SharedExpert

LOSS = "auxiliary_loss"


class MoE(nn.Module):
    """x [B, s, H] to the weighted sum of each token's experts (and the shared one), [B, s, H]."""

    def __init__(self, make: ParameterFactory, model: ModelSection, options: MoEOptions, init: Initialisation):
        super().__init__()
        self.mesh, self.options = make.mesh, options
        self.router = LinearRouter(make.scope("router"), model.hidden_size, options, init)
        self.balance = Balance(make.scope("router"), options)
        self.experts = Experts(make.scope("experts"), model.hidden_size, options, init)
        self.exchange = Stay()
        self.shared = None
        if options.shared_size:
            self.shared = SharedExpert(make.scope("shared"), model.hidden_size, options, init)

    def forward(self, x: Tensor, stream: Stream, cache: object = None) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        x_BSH = enter(x, self.mesh)
        x_TH = x_BSH.flatten(0, 1)
        logits_TE = self.router(x_TH)
        scores_TE = scores_of(logits_TE, self.options.router.score)
        choice = once(lambda: choose(logits_TE, scores_TE, self.balance.correction, self.options, self.training))
        y_TH = self._routed(x_TH, scores_TE, choice)
        if self.shared is not None:
            y_TH = y_TH + self.shared(x_TH)
        y = leave(y_TH.view_as(x_BSH), self.mesh)
        return y

    def _routed(self, x_TH: Tensor, scores_TE: Tensor, choice: Choice) -> Tensor:
        """The experts' part, summed over this rank's slices of them."""
        router = self.options.router
        rows = sort(choice, self.options.experts, self._capacity(x_TH.shape[0]))
        if choice.experts_Tk is not None:
            weights = weights_of(scores_TE.gather(1, choice.experts_Tk), router)
        else:
            weights = scores_TE.T.gather(1, choice.tokens_EC).flatten() * router.scale
        sent_RH, ends_E, sent = self.exchange.send(permute(x_TH, rows), rows.ends_E)
        y_RH = self.exchange.back(self.experts(sent_RH, ends_E), sent)
        return combine(y_RH, rows, weights, x_TH.shape[0])

    def _capacity(self, tokens: int) -> int | None:
        factor = self.options.capacity_factor
        if factor is None or self.options.router.select == "expert_choice":
            return None
        return max(1, math.ceil(factor * tokens * self.options.top_k / self.options.experts))

    @staticmethod
    def counts(model: ModelSection, options: MoEOptions, sequence_length: int) -> Counts:
        H, E, k, width = model.hidden_size, options.experts, options.top_k, options.hidden_size
        sides = 3 if options.gated else 2
        expert, shared = sides * H * width, sides * H * options.shared_size
        router = E * H + (E if options.router.bias else 0)
        gate = H if options.shared_size and options.shared_gate else 0
        made = (2 if options.gated else 1)
        kept = KEPT[options.activation][options.gated]
        # Of each expert of a token: its row, what its activation keeps, its result.
        return Counts(
            parameters=E * expert + shared + router + gate, idle=(E - k) * expert,
            flops=2 * (k * expert + shared + E * H + gate),
            activations=k * (2 * H + kept * width) + kept * options.shared_size + 4 * E,
            products=k * (H + made * width) + made * options.shared_size + H + E)
