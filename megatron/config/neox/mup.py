"""GPT-NeoX's keys of muP.

The translation follows GPT-NeoX's intent, not its computation. There the schedule overwrites the rates of muP, only one
of the attention implementations divides by the head dimension, and the gradient of the embedding multiplier is missing.
"""

from __future__ import annotations

from typing import Any

from .reader import Flat, Native

# Key -> GPT-NeoX's default.
KEYS: dict[str, Any] = {"use_mup": False, "mup_init_scale": 1.0, "mup_embedding_mult": 1.0}


def translate(flat: Flat, native: Native) -> None:
    """Translate the keys, where muP is on, after the topic of the model."""
    if not flat.boolean("use_mup"):
        native.unused("at a value that changes nothing", "use_mup")
        native.unused("use_mup is off", "mup_init_scale", "mup_embedding_mult")
        return
    native.put("model.parametrization.type", "mup", "use_mup")
    native.put("model.parametrization.base_head_dim", 1, "use_mup")
    std = float(flat.number("init_method_std") or 0.02) * float(flat.number("mup_init_scale") or 1.0)
    native.put("model.init.std", std, "init_method_std", "mup_init_scale")
    native.put("model.embedding.multiplier", float(flat.number("mup_embedding_mult") or 1.0), "mup_embedding_mult")
    native.note(
        "use_mup: the width of the base model is in the file of base shapes, which is not read: give it as "
        "model.parametrization.base_width. The rates of muP hold during the whole schedule, attention is divided by "
        "the head dimension, and the embedding's multiplier has its gradient. GPT-NeoX loses all three"
    )
