"""AdamW (Loshchilov & Hutter 2019), torch's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import Config

from ..base import EagerAdamW
from ..groups import use_fused


class AdamW(EagerAdamW):
    """State: `step`, `exp_avg`, `exp_avg_sq`."""

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> AdamW:
        options = config.optimizer
        # None, unlike False, lets torch choose its next best implementation.
        fused = use_fused(config, groups) or None
        return cls(groups, lr=0.0, betas=options.betas, eps=options.epsilon, fused=fused)

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "step")
