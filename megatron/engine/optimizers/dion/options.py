"""Facts of Dion."""

from __future__ import annotations

from megatron.config.optimizer_kind import CAUTIOUS, OptimizerKind, Option

from ..muon.options import OPTIMIZER as MUON
from ..muon.options import muon_has_a_rate

RANK = 0.25
OPTIMIZER = OptimizerKind(
    update="megatron.engine.optimizers.dion.update:Dion",
    # The momentum, and columns * rank numbers of the basis: at most 4 bytes times the share per element.
    state_bytes=lambda config: 4 + int(4 * config.optimizer.options.get("rank", RANK)),
    reads=("betas", "epsilon", "muon_lr", "muon_momentum"),
    options={
        "rank": Option(RANK, 1e-4, 1, "rank of a step, as a share of the shorter side of its matrix"),
        "cautious": CAUTIOUS,
    },
    rates_for=MUON.rates_for,
    whole_matrices=True,
    rules=(muon_has_a_rate,),
)
