"""What single architectures say that no table of fields has: read from their configurations, and written to them."""

from __future__ import annotations

import math
from typing import Any

from megatron.config import Config

from .versions import unlimited


def read_rwkv(theirs: Any) -> tuple[dict[str, Any], list[str]]:
    inner, hidden = theirs.attention_hidden_size, theirs.hidden_size
    return {}, [] if inner == hidden else [f"attention_hidden_size={inner} is not hidden_size={hidden}"]


def write_rwkv(config: Config) -> dict[str, Any]:
    """Halving the stream now and then changes no logits, but weights in place: it is switched off."""
    return {"rescale_every": 0, "context_length": config.training.sequence_length}


def read_mamba2(theirs: Any) -> tuple[dict[str, Any], list[str]]:
    least, most = theirs.time_step_limit
    return {"mamba2.least_step": float(least), "mamba2.most_step": None if unlimited(most) else float(most)}, []


def write_mamba2(config: Config) -> dict[str, Any]:
    own = config.model.mamba2
    return {
        "num_heads": own.expand * config.model.hidden_size // own.head_dim,
        "time_step_limit": (own.least_step, math.inf if own.most_step is None else own.most_step),
    }


def read_zaya(theirs: Any) -> tuple[dict[str, Any], list[str]]:
    """Its stream is always fp32, for which it has no option."""
    return {"residual.fp32": True}, []
