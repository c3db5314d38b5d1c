"""Rotary options both ways."""

from __future__ import annotations

from typing import Any

from megatron.config.sections.rotary import RotaryOptions

_LENGTH = {"factor": "factor", "original_length": "original_max_position_embeddings"}
NAMES = {  # ours -> theirs, by type of scaling
    "none": {},
    "linear": {"factor": "factor"},
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
    if partial:
        found["partial_rotary_factor"] = rotary.fraction
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
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *NAMES[ours].values()}
    given = {name: value for name, value in parameters.items() if value is not None}
    if "attention_factor" in given:
        known |= {"mscale", "mscale_all_dim"}
    problems = [
        f"rope_parameters.{name}={value!r} is not computed here" for name, value in given.items() if name not in known
    ]
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
