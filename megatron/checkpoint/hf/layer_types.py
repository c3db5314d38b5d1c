"""Rotary options, and attention that differs by layer: a window, no positions, or own rotary options in some.

Our base options belong to layers without a window. Others are variants: `sliding`, `nope`, `nope_sliding`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from megatron.config import Config
from megatron.config.section import RotaryOptions, RotaryScaling
from megatron.config.sections.model import ModelSection
from megatron.config.variants import options_of

from .architecture import Found, Layers, runs_of

_LENGTH = {"factor": "factor", "original_length": "original_max_position_embeddings"}
NAMES = {  # ours -> theirs, by type of scaling
    "none": {},
    "linear": {"factor": "factor"},
    "proportional": {"factor": "factor"},
    "dynamic": {"factor": "factor"},  # the original length is max_position_embeddings
    "llama3": {**_LENGTH, "low_frequency_factor": "low_freq_factor", "high_frequency_factor": "high_freq_factor"},
    "yarn": {**_LENGTH, **{name: name for name in ("beta_fast", "beta_slow", "truncate", "attention_factor")}},
}
_TYPES = {name: "default" if name == "none" else name for name in NAMES}


def rope_parameters(rotary: RotaryOptions, *, partial: bool) -> dict[str, Any]:
    """`rope_parameters` of a Hugging Face configuration.

    Args:
        partial: whether the architecture can rotate part of a head's channels.
    """
    found = {"rope_type": _TYPES[rotary.scaling.type], "rope_theta": rotary.base}
    if partial or rotary.scaling.type == "proportional":
        found["partial_rotary_factor"] = rotary.fraction
    if rotary.scaling.type == "proportional" and rotary.scaling.factor == 1.0:
        return found
    return found | {theirs: getattr(rotary.scaling, ours) for ours, theirs in NAMES[rotary.scaling.type].items()}


def rope_values(
    parameters: dict[str, Any], *, partial: bool, longest: int | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Our `attention.rotary` values, and problems.

    Args:
        longest: `max_position_embeddings`, where dynamic frequencies begin to change. None: the architecture's dynamic
            frequencies are not computed here.
    """
    kind = parameters.get("rope_type", "default")
    ours = next((ours for ours, theirs in _TYPES.items() if theirs == kind), None)
    if ours is None or (ours == "dynamic" and longest is None):
        return {}, [f"rope_type={kind!r} is not computed here: it must be one of {', '.join(_TYPES.values())}"]
    partial = partial or ours == "proportional"
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *NAMES[ours].values()}
    given = {name: value for name, value in parameters.items() if value is not None}
    if "attention_factor" in given:
        known |= {"mscale", "mscale_all_dim"}
    problems = [f"rope_parameters.{name}={v!r} is not computed here" for name, v in given.items() if name not in known]
    fraction = given.get("partial_rotary_factor", 1.0)
    if not partial and fraction != 1.0:
        problems.append(f"rope_parameters.partial_rotary_factor={fraction} is not computed here")
    scaling = {mine: _plain(given[theirs]) for mine, theirs in NAMES[ours].items() if theirs in given}
    if ours == "dynamic":
        scaling["original_length"] = longest
    values = {"base": float(given["rope_theta"]), "scaling": {"type": ours, **scaling}}
    return values | ({"fraction": float(fraction)} if partial else {}), problems


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class RotaryPart:
    """Rotary options that all layers share, and the longest sequence.

    Attributes:
        partial: whether it can rotate only part of a head's channels.
        section: of our options.
    """

    partial: bool = False
    section: str = "attention"

    def read(self, theirs: Any) -> Found:
        longest = theirs.max_position_embeddings
        rotary, problems = rope_values(theirs.rope_parameters, partial=self.partial, longest=longest)
        return {f"{self.section}.rotary": rotary}, problems

    def write(self, config: Config) -> dict[str, Any]:
        rotary = getattr(config.model, self.section).rotary
        dynamic = rotary.scaling.type == "dynamic"
        return {
            "max_position_embeddings": rotary.scaling.original_length if dynamic else config.training.sequence_length,
            "rope_parameters": rope_parameters(rotary, partial=self.partial),
        }


@dataclass(frozen=True)
class WindowPart:
    """One sliding window in all layers, or in none."""

    section: str = "attention"

    def read(self, theirs: Any) -> Found:
        return {f"{self.section}.window": theirs.sliding_window}, []

    def write(self, config: Config) -> dict[str, Any]:
        """The window of the first layer. Reading back shows layers that differ."""
        first = config.model.blocks[0].mixer
        return {"sliding_window": None if first is None else options_of(config.model, first).window}


# -- attention that differs by layer -----------------------------------------------------------------------------------

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
        if unknown := sorted(set(theirs.layer_types) - {FULL, SLIDING}):
            return {}, [f"layer_types: {', '.join(unknown)} is not computed here, only {FULL} and {SLIDING}"]
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
