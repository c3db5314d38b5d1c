"""Attention that differs by layer: a window, no positions, or rotary options of its own in some.

Our base options are those of the layers without a window; the others are variants: `sliding`, `nope`, `nope_sliding`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from megatron.config.pattern import parse
from megatron.config.sections.model import ModelSection
from megatron.config.sections.rotary import RotaryScaling
from megatron.config.variants import options_of

from .hybrids import Hybrid, runs_of
from .rope import rope_parameters, rope_values

FULL, SLIDING = "full_attention", "sliding_attention"


def _no_more(_: Any) -> dict[str, Any]:
    return {}


def _nothing(_model: ModelSection, _kinds: list[str]) -> dict[str, Any]:
    return {}


def _no_values(_theirs: PreTrainedConfig) -> tuple[dict[str, Any], list[str]]:
    return {}, []


@dataclass(frozen=True)
class ByLayer(Hybrid):
    """Layers of one pattern whose attention differs.

    Attributes:
        ropes: `rope_parameters` has an entry for each type of layer.
        unturned: `no_rope_layers` says which layers have no positions.
        more: further options of ours, from their configuration.
    """

    values: Callable = _no_values
    settings: Callable = _nothing
    ropes: bool = False
    unturned: bool = False
    more: Callable[[PreTrainedConfig], dict[str, Any]] = _no_more

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", self._values)
        object.__setattr__(self, "settings", self._settings)

    def pattern(self, theirs: PreTrainedConfig) -> str:
        (block,) = self.blocks
        words = (
            block.replace("attention", f"attention@{name}" if name else "attention") for name in self._names(theirs)
        )
        return runs_of(list(words))

    def _names(self, theirs: PreTrainedConfig) -> list[str]:
        """The variant of each layer; "" is none."""
        turned = theirs.no_rope_layers if self.unturned else [1] * theirs.num_hidden_layers
        parts = (
            ([] if has else ["nope"]) + (["sliding"] if kind == SLIDING else [])
            for has, kind in zip(turned, theirs.layer_types, strict=True)
        )
        return ["_".join(part) for part in parts]

    def _values(self, theirs: PreTrainedConfig) -> tuple[dict[str, Any], list[str]]:
        values, problems, own = self.more(theirs), [], {"window": theirs.sliding_window}
        if self.ropes:
            for kind in dict.fromkeys((FULL, *theirs.layer_types)):
                rotary, found = rope_values(theirs.rope_parameters[kind], partial=False)
                problems += found if kind in theirs.layer_types else []
                if kind == FULL:
                    values["attention.rotary"] = rotary
                else:
                    own["rotary"] = rotary | {"scaling": RotaryScaling().model_dump() | rotary.get("scaling", {})}
        every = {"sliding": own, "nope": {"position": "none"}, "nope_sliding": {"position": "none", **own}}
        used = {name: every[name] for name in self._names(theirs) if name}
        return values | ({"variants": used} if used else {}), problems

    def _settings(self, model: ModelSection, kinds: list[str]) -> dict[str, Any]:
        mixers = [options_of(model, block.mixer) for block in parse(model.layers)]
        kinds = [FULL if each.window is None else SLIDING for each in mixers]
        windows = sorted({each.window for each in mixers if each.window is not None})
        found = {"layer_types": kinds, "sliding_window": windows[0] if windows else None}
        if self.unturned:
            found |= {"no_rope_layers": [int(each.position == "rotary") for each in mixers]}
            found |= {"use_sliding_window": bool(windows)}
        if self.ropes:
            rotary = {kind: each.rotary for kind, each in zip(reversed(kinds), reversed(mixers))}
            ropes = {each: rotary.get(each, model.attention.rotary) for each in (FULL, SLIDING)}
            found["rope_parameters"] = {each: rope_parameters(ropes[each], partial=False) for each in ropes}
        return found
