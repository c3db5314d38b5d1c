"""Prediction of tokens further ahead than the next one (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..section import Derivable, Derived, Section, key


def _block(own: dict[str, Any], at: Any) -> str | None:
    return str(replace(at.blocks[-1], recurrent=False)) if own["depth"] and at.blocks else None


class MultiTokenOptions(Section):
    depth: int = key(
        0,
        "Modules behind the stack, each of which predicts one token further ahead than the one before it; 0: the next "
        "token alone is predicted. They are trained and saved, and evaluation and generation leave them out.",
        unit="tokens",
        ge=0,
        le=16,
    )
    loss_weight: float = key(
        0.3, "The mean of the modules' losses is multiplied by this and added to the loss of the next token.", ge=0
    )
    block: Derivable[str] = key(
        None,
        "The block of each module, as in model.layers and of kinds that it has too.",
        derived=Derived("the last block of model.layers", _block, ("model.layers", ".depth")),
    )
