"""Settings for version 4 of transformers in addition to version 5, so that both open an export.

Version 5 has all rotary options in `rope_parameters`, writes infinite numbers as mappings, and has other names for the
layers of hybrids. Version 4 silently takes defaults for them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from megatron.config.sections.model import ModelSection

from .architecture import MOST, Architecture

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
OLD, NEW = "4.57", "5.23"  # the tests open exports with both
_LEGACY_LAYERS = {"linear_attention": "mamba"}  # of `layers_block_type`


def least_version(architecture: Architecture, model: ModelSection) -> tuple[str, str]:
    """The least version of transformers that gives the model's logits, and why ("" if 4.57 does)."""
    reason = architecture.newer(model)
    return NEW if reason else OLD, reason


def for_both(settings: dict[str, Any], architecture: Architecture | None = None) -> dict[str, Any]:
    """The content of a config.json of version 5, with version 4's settings, general ones and the architecture's.

    Raises:
        ValueError: an infinite number that cannot be replaced.
    """
    found = {name: finite(value) for name, value in settings.items()}
    rope = found.get("rope_parameters") or {}
    if "full_attention" in rope:  # of each type of layers
        found |= _rope(rope["full_attention"])
    if rope.get("rope_theta") is not None:
        found |= _rope(rope)
    if architecture is not None:
        found |= architecture.older(found)
    if "layers_block_type" in found:
        found["layers_block_type"] = [_LEGACY_LAYERS.get(each, each) for each in found["layers_block_type"]]
    return found


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    own = ("rope_theta", "partial_rotary_factor")
    scaling = {name: value for name, value in parameters.items() if name not in own and value is not None}
    found = {"rope_theta": parameters["rope_theta"]}
    found["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    if "partial_rotary_factor" in parameters:
        found["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    return found


def finite(value: Any) -> Any:
    """Replace version 5's mappings of infinite numbers.

    Raises:
        ValueError: an infinite number that cannot be replaced.
    """
    if isinstance(value, dict) and "__float__" in value:
        number = float(value["__float__"])
        if number != math.inf:
            raise ValueError(f"{number} cannot be written so that all versions of transformers read it")
        return MOST
    if isinstance(value, list):
        return [finite(each) for each in value]
    return {name: finite(each) for name, each in value.items()} if isinstance(value, dict) else value


def make_readable(folder: Path, architecture: Architecture) -> None:
    """Rewrite the config.json of a folder that version 5 has saved."""
    path = folder / "config.json"
    settings = for_both(json.loads(path.read_text(encoding="utf-8")), architecture)
    settings = dict.fromkeys(IDS) | settings  # an absent one means the class's default, of another vocabulary
    if settings["eos_token_id"] is None:  # some classes take null for absent
        read = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
        settings["eos_token_id"] = None if read.eos_token_id is None else []
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
