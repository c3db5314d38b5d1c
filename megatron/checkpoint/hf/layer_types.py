"""Attention that differs by layer: a window, no positions, or rotary options of its own in some.

Our base options are those of the layers without a window; the others are variants: `sliding`, `nope`, `nope_sliding`.
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


def _no_more(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Windowed(Layers):
    """Layers of one pattern, of which some have a window (`layer_types`, `use_sliding_window`)."""

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
        """What they cannot express shows when it is read back."""
        model = config.model
        windows = [options_of(model, block.mixer).window for block in model.blocks if block.mixer is not None]
        used = sorted({window for window in windows if window is not None})
        return {
            "use_sliding_window": bool(used),
            "sliding_window": used[0] if used else None,
            "layer_types": [FULL if window is None else SLIDING for window in windows],
        }


def windowed(block: str) -> Windowed:
    return Windowed({block: ""})


@dataclass(frozen=True)
class ByLayer(Layers):
    """Layers of one pattern whose attention differs.

    Attributes:
        ropes: `rope_parameters` has an entry for each type of layer.
        unturned: `no_rope_layers` says which layers have no positions.
        more: further options of ours, from their configuration.
    """

    ropes: bool = False
    unturned: bool = False
    more: Callable[[PreTrainedConfig], dict[str, Any]] = _no_more

    def pattern(self, theirs: PreTrainedConfig) -> str:
        (block,) = self.blocks
        mixer, slash, ffn = block.partition("/")
        variants = self._variants(theirs)
        return runs_of([f"{mixer}@{name}{slash}{ffn}" if name else block for name in variants])

    def _variants(self, theirs: PreTrainedConfig) -> list[str]:
        """The variant of each layer; "" is none."""
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
        mixers = [options_of(model, block.mixer) for block in model.blocks if block.mixer is not None]
        kinds = [FULL if each.window is None else SLIDING for each in mixers]
        windows = sorted({each.window for each in mixers if each.window is not None})
        found = {
            "max_position_embeddings": config.training.sequence_length,
            "layer_types": kinds,
            "sliding_window": windows[0] if windows else None,
        }
        if self.unturned:
            found |= {"no_rope_layers": [int(each.position == "rotary") for each in mixers]}
            found |= {"use_sliding_window": bool(windows)}
        if self.ropes:
            rotary = {kind: each.rotary for kind, each in zip(reversed(kinds), reversed(mixers))}
            ropes = {each: rotary.get(each, model.attention.rotary) for each in (FULL, SLIDING)}
            found["rope_parameters"] = {each: rope_parameters(ropes[each], partial=False) for each in ropes}
        return found


def near_rotary(model: ModelSection) -> Any:
    """Rotary options of layers with a window; None where no layer has one."""
    mixers = (options_of(model, block.mixer) for block in model.blocks if block.mixer)
    return next((each.rotary for each in mixers if getattr(each, "window", None)), None)
