"""Rotary positions."""

from __future__ import annotations

import math
from typing import Literal

from ..section import Derivable, Derived, Needed, Section, key


class RotaryScaling(Section):
    type: Literal["none", "linear", "llama3", "yarn", "dynamic"] = key(
        "none", "How rotary frequencies are stretched for longer contexts."
    )
    factor: float = key(1.0, "Ratio of the new context length to the original one.", gt=0)
    original_length: Needed[int] = key(
        None, "Context length the frequencies were made for. llama3, yarn and dynamic need it.", unit="tokens", gt=0
    )
    low_frequency_factor: float = key(
        1.0, "llama3: wavelengths longer than original_length over this are fully stretched.", gt=0
    )
    high_frequency_factor: float = key(
        4.0, "llama3: wavelengths shorter than original_length over this are not stretched.", gt=0
    )
    beta_fast: float = key(32.0, "yarn: number of rotations above which a frequency is not stretched.", gt=0)
    beta_slow: float = key(1.0, "yarn: number of rotations below which a frequency is fully stretched.", gt=0)
    truncate: bool = key(True, "yarn: round the two channels between which frequencies are stretched (not: GPT-OSS).")
    attention_factor: Derivable[float] = key(
        None,
        "yarn: multiplier of cos and sin.",
        derived=Derived(
            "0.1 * ln(factor) + 1",
            lambda own, at: 0.1 * math.log(max(own["factor"], 1.0)) + 1.0 if own["type"] == "yarn" else None,
            (".factor",),
        ),
        gt=0,
    )


class RotaryOptions(Section):
    base: float = key(10000.0, "Base of the rotary frequencies (rope theta).", gt=0)
    fraction: float = key(1.0, "Share of each head's channels that are rotated (rotary_pct).", ge=0, le=1)
    scaling: RotaryScaling = key(RotaryScaling, "Frequency scaling for contexts longer than the original.")
