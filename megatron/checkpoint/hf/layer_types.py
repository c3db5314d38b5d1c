"""Attention that differs by layer: a window, no positions, or own rotary options in some.

Our base options belong to layers without a window. Others are variants: `sliding`, `nope`, `nope_sliding`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from megatron.config import Config
from megatron.config.sections.model import ModelSection
from megatron.config.sections.rotary import RotaryScaling
from megatron.config.variants import options_of

from .layers import Layers, runs_of
from .parts import Found
from .rope import rope_parameters, rope_values

FULL, SLIDING = "full_attention", "sliding_attention"


def mixers_of(model: ModelSection) -> list[Any]:
    """The options of each layer's mixer."""
    return [options_of(model, block.mixer) for block in model.blocks if block.mixer is not None]


def window_settings(mixers: list[Any]) -> dict[str, Any]:
    """`layer_types`, and the smallest window. Reading back shows other windows."""
    windows = {each.window for each in mixers if each.window is not None}
    kinds = [FULL if each.window is None else SLIDING for each in mixers]
    return {"layer_types": kinds, "sliding_window": min(windows, default=None)}


@dataclass(frozen=True)
class Windowed(Layers):
    """Layers of one pattern, some with a window (`layer_types`, `use_sliding_window`)."""

    def pattern(self, theirs: PreTrainedConfig) -> str:
        (block,) = self.blocks
        if SLIDING not in theirs.layer_types:
            return f"({block}) x{theirs.num_hidden_layers}"
        mixer, slash, ffn = block.partition("/")
        return " ".join(f"{mixer}@sliding{slash}{ffn}" if kind == SLIDING else block for kind in theirs.layer_types)

    def read(self, theirs: PreTrainedConfig) -> Found:
        values, window = {"layers": self.pattern(theirs)}, {"window": theirs.sliding_window}
        return values | ({"variants": {"sliding": window}} if SLIDING in theirs.layer_types else {}), []

    def write(self, config: Config) -> dict[str, Any]:
        """Reading back shows options that they cannot express."""
        settings = window_settings(mixers_of(config.model))
        return {"use_sliding_window": settings["sliding_window"] is not None, **settings}


def windowed(block: str) -> Windowed:
    return Windowed({block: ""})


@dataclass(frozen=True)
class ByLayer(Layers):
    """Layers of one pattern with different attention.

    Attributes:
        ropes: `rope_parameters` has an entry for each type of layer.
        unturned: `no_rope_layers` lists the layers without positions.
        more: further options of ours, from their configuration.
    """

    ropes: bool = False
    unturned: bool = False
    more: Callable[[PreTrainedConfig], dict[str, Any]] = lambda theirs: {}

    def pattern(self, theirs: PreTrainedConfig) -> str:
        (block,) = self.blocks
        mixer, slash, ffn = block.partition("/")
        variants = self._variants(theirs)
        return runs_of([f"{mixer}@{name}{slash}{ffn}" if name else block for name in variants])

    def _variants(self, theirs: PreTrainedConfig) -> list[str]:
        turned = theirs.no_rope_layers if self.unturned else [1] * theirs.num_hidden_layers
        parts = (
            ([] if has else ["nope"]) + (["sliding"] if kind == SLIDING else [])
            for has, kind in zip(turned, theirs.layer_types, strict=True)
        )
        return ["_".join(part) for part in parts]

    def read(self, theirs: PreTrainedConfig) -> Found:
        values: dict[str, Any] = {"layers": self.pattern(theirs), **self.more(theirs)}
        problems: list[str] = []
        own: dict[str, Any] = {"window": theirs.sliding_window}
        if self.ropes:
            for kind in dict.fromkeys((FULL, *theirs.layer_types)):
                rotary, found = rope_values(theirs.rope_parameters[kind], partial=False)
                problems += found if kind in theirs.layer_types else []
                if kind == FULL:
                    values["attention.rotary"] = rotary
                else:
                    own["rotary"] = rotary | {"scaling": RotaryScaling().model_dump() | rotary.get("scaling", {})}
        every = {"sliding": own, "nope": {"position": "none"}, "nope_sliding": {"position": "none", **own}}
        used = {name: every[name] for name in self._variants(theirs) if name}
        return values | ({"variants": used} if used else {}), problems

    def write(self, config: Config) -> dict[str, Any]:
        model = config.model
        mixers = mixers_of(model)
        found = {"max_position_embeddings": config.training.sequence_length, **window_settings(mixers)}
        if self.unturned:
            found |= {"no_rope_layers": [int(each.position == "rotary") for each in mixers]}
            found |= {"use_sliding_window": found["sliding_window"] is not None}
        if self.ropes:
            rotary = dict(zip(reversed(found["layer_types"]), (each.rotary for each in reversed(mixers))))
            ropes = {each: rotary.get(each, model.attention.rotary) for each in (FULL, SLIDING)}
            found["rope_parameters"] = {each: rope_parameters(ropes[each], partial=False) for each in ropes}
        return found


def near_rotary(model: ModelSection) -> Any:
    """Rotary options of layers with a window. None without such a layer."""
    return next((each.rotary for each in mixers_of(model) if getattr(each, "window", None)), None)
