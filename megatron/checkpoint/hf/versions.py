"""What version 4 of transformers reads, beside what version 5 does, so that either opens what is exported.

Version 5 has all rotary options in `rope_parameters`, writes infinite numbers as mappings, and calls the layers of
hybrids and the class of tokenizers otherwise. Version 4 knows none of that, and takes defaults without a word.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from megatron.config.pattern import parse
from megatron.config.sections.model import ModelSection
from megatron.config.sections.rotary import RotaryOptions
from megatron.config.variants import options_of

MOST = torch.finfo(torch.float32).max  # stands for no limit: JSON has no infinite numbers
OLD, NEW = "4.57", "5.23"  # the tests open exports with both
_ONLY_NEW = ("olmo_hybrid", "zaya")  # classes that version 4 does not have
_LEGACY_LAYERS = {"linear_attention": "mamba"}  # of `layers_block_type`


def unlimited(value: float) -> bool:
    """Whether an upper limit, read from a configuration, limits nothing."""
    return math.isinf(value) or value >= MOST


def least_version(architecture: str, model: ModelSection) -> tuple[str, str]:
    """The least version of transformers that gives the model's logits, and why it is no older one ("" if 4.57 does)."""
    mamba2 = model.mamba2
    if architecture in _ONLY_NEW:
        return NEW, "version 4 does not have the class"
    if architecture in ("bamba", "mamba2") and mamba2.groups > 1:
        return NEW, "version 4 norms the groups of Mamba-2 as one and gives other logits"
    if architecture == "bamba" and (mamba2.least_step > 0.0 or mamba2.most_step is not None):
        return NEW, "version 4 does not limit the time steps and gives other logits"
    near = _near(model)
    if architecture == "olmo3" and near and (near.base != model.attention.rotary.base or near.scaling.type != "none"):
        return NEW, "version 4 has one rotary base for all layers, and no scaling in those with a window"
    if architecture == "gemma3_text" and near and near.scaling.type != "none":
        return NEW, "version 4 has no rotary scaling in layers with a window"
    if architecture == "phi3" and model.attention.rotary.scaling.type != "none":
        return NEW, "version 4 refuses rotary scaling of this type"
    return OLD, ""


def _near(model: ModelSection) -> RotaryOptions | None:
    """Rotary options of layers with a window; None where no layer has one."""
    mixers = (options_of(model, block.mixer) for block in parse(model.layers) if block.mixer)
    return next((each.rotary for each in mixers if getattr(each, "window", None)), None)


def for_both(settings: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json of version 5, with what version 4 reads.

    Raises:
        ValueError: an infinite number stands where nobody knows what to write for it.
    """
    found = {name: _plain(value) for name, value in settings.items()}
    rope = found.get("rope_parameters") or {}
    if "full_attention" in rope:  # of each type of layers
        found |= _rope(rope["full_attention"])
        if found["model_type"] == "gemma3_text":
            found["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    if rope.get("rope_theta") is not None:
        found |= _rope(rope)
        if found["model_type"] == "gpt_neox":
            found |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope.get("partial_rotary_factor", 1.0)}
    if found.get("model_type") == "qwen3_moe":
        found["num_experts"] = found["num_local_experts"]  # version 4 knows no other name and would make 128 experts
    if "layers_block_type" in found:
        found["layers_block_type"] = [_LEGACY_LAYERS.get(each, each) for each in found["layers_block_type"]]
    return found


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary options as version 4 calls them."""
    own = ("rope_theta", "partial_rotary_factor")
    scaling = {name: value for name, value in parameters.items() if name not in own and value is not None}
    found = {"rope_theta": parameters["rope_theta"]}
    found["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    if "partial_rotary_factor" in parameters:
        found["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    return found


def _plain(value: Any) -> Any:
    """Values without the mappings that version 5 writes for infinite numbers."""
    if isinstance(value, dict) and "__float__" in value:
        number = float(value["__float__"])
        if number != math.inf:
            raise ValueError(f"{number} cannot be written so that all versions of transformers read it")
        return MOST
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value


def make_readable(folder: Path) -> None:
    """Rewrite config.json and tokenizer_config.json of a folder that version 5 has saved."""
    _rewrite(folder / "config.json", for_both)
    if (folder / "tokenizer_config.json").is_file():
        _rewrite(folder / "tokenizer_config.json", _tokenizer)


def _tokenizer(settings: dict[str, Any]) -> dict[str, Any]:
    """The class by the name that both know; version 4 takes a mapping where version 5 writes a list."""
    found = {name: value for name, value in settings.items() if name not in ("backend", "is_local")}
    if not found.get("extra_special_tokens", True):
        del found["extra_special_tokens"]
    return found | {"tokenizer_class": "PreTrainedTokenizerFast"}


def _rewrite(path: Path, change) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(change(settings), indent=2, sort_keys=True) + "\n", encoding="utf-8")
