"""Configurations both ways: a Hugging Face configuration as our `model` section, and ours as theirs.

What an architecture cannot express is found without a list of its limits: our section is mapped to a Hugging Face
configuration, that one back to a section, and every option that then computes something else is named.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from megatron.config import Config, ConfigError, resolve
from megatron.config.kind import kinds_of
from megatron.config.pattern import Block, parse
from megatron.config.sections.model import ModelSection
from megatron.config.variants import options_of
from megatron.model.rotary import rotated_channels

from ..errors import CheckpointError
from .architecture import Architecture
from .architectures import ARCHITECTURES
from .hybrids import without_variants
from .links import Dims
from .rope import rope_parameters, rope_values
from .same import differences


def known(name: Any) -> Architecture:
    """The tables of a model_type.

    Raises:
        CheckpointError: we have none.
    """
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            str(name), f"models of this architecture are not exchanged; there are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def architecture_of(config: PreTrainedConfig) -> Architecture:
    """The tables of a Hugging Face configuration; errors as of `known`."""
    return known(config.model_type)


def dims_of(model: ModelSection) -> Dims:
    inner, mamba2, delta, cca = model.mamba2.expand * model.hidden_size, model.mamba2, model.gated_delta, model.cca
    return Dims(
        model.attention.heads,
        model.attention.head_dim,
        (inner, 2 * mamba2.groups * mamba2.state_size, inner // mamba2.head_dim),
        model.moe.experts,
        (2 * (delta.key_heads or 0) * (delta.key_dim or 0), (delta.heads or 0) * (delta.value_dim or 0)),
        ((cca.heads or 0) * (cca.head_dim or 0), (cca.kv_heads or 0) * (cca.head_dim or 0)),
        model.mamba.heads,
        rotated_channels(model.attention.rotary, model.attention.head_dim) if model.attention.head_dim else 0,
    )


# -- theirs to ours ------------------------------------------------------------------------------------------------


def model_values(theirs: PreTrainedConfig) -> dict[str, Any]:
    """Our `model` section, as nested plain values, of a Hugging Face configuration.

    Raises:
        CheckpointError: with every setting that our model does not compute.
    """
    architecture, problems = architecture_of(theirs), []
    values: dict[str, Any] = {}
    for ours, value in architecture.fixed.items():
        _put(values, ours, value)
    for field in architecture.fields:
        try:
            _put(values, field.ours, field.read(theirs))
        except KeyError as error:
            problems.append(
                f"{field.theirs}={error.args[0]!r} is not computed here; "
                f"{field.ours} is one of {', '.join(map(str, field.values))}"
            )
    for name, value in architecture.required.items():
        if getattr(theirs, name) != value:
            problems.append(f"{name}={getattr(theirs, name)!r} is not computed here, only {value!r}")
    if architecture.rotary != "none":
        rotary, found = rope_values(theirs.rope_parameters, partial=architecture.rotary == "partial")
        _put(values, "attention.rotary", rotary)
        problems += found
    _put_layers(values, architecture, theirs)
    if architecture.hybrid is not None:
        more, found = architecture.hybrid.values(theirs)
        for ours, value in more.items():
            _put(values, ours, value)
        problems += found
    more, found = architecture.reads(theirs)
    for ours, value in more.items():
        _put(values, ours, value)
    problems += found
    if problems:
        raise CheckpointError(theirs.model_type, problems)
    return values


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *above, last = key.split(".")
    for name in above:
        values = values.setdefault(name, {})
    if value is not None:
        values[last] = value


def _put_layers(values: dict[str, Any], architecture: Architecture, theirs: PreTrainedConfig) -> None:
    """The pattern, with a window where there is one: in all layers, or in the variant `sliding`."""
    count = theirs.num_hidden_layers
    values["layers"] = f"({architecture.block}) x{count}"
    if architecture.hybrid is not None:
        values["layers"] = architecture.hybrid.pattern(theirs)
    if architecture.window == "all" and theirs.sliding_window is not None:
        values["attention"]["window"] = theirs.sliding_window
    if architecture.window == "layer" and "sliding_attention" in theirs.layer_types:
        values["layers"] = " ".join(
            "attention@sliding/mlp" if kind == "sliding_attention" else "attention/mlp" for kind in theirs.layer_types
        )
        values["variants"] = {"sliding": {"window": theirs.sliding_window}}


# -- ours to theirs ------------------------------------------------------------------------------------------------


def hf_config(config: Config, name: str | None = None) -> tuple[Architecture, PreTrainedConfig]:
    """The Hugging Face configuration that computes what ours does.

    Args:
        config: resolved.
        name: model_type of the architecture; None takes the first that can express the model.

    Raises:
        CheckpointError: none can (or the named one cannot), with the options that are in the way.
    """
    tried = {}
    for each in [known(name)] if name else ARCHITECTURES.values():
        theirs, problems = _express(config, each)
        if not problems:
            return each, theirs
        tried[each.class_name] = (_distance(config.model, each, theirs, problems), problems)
    if name is None:
        _refuse_unknown_kinds(config.model)
    nearest = min(tried, key=lambda each: tried[each][0])
    raise CheckpointError(f"the model cannot be written as {nearest}", tried[nearest][1])


def _kinds(blocks: Iterable[Block]) -> set[str]:
    return {kind.name for block in blocks for kind in block.kinds}


def _known(architecture: Architecture) -> set[str]:
    """The kinds of layers that an architecture has."""
    return _kinds(block for text in architecture.blocks for block in parse(text))


def _distance(model: ModelSection, architecture: Architecture, theirs, problems: list[str]) -> tuple:
    """How far an architecture is from a model: by its mixers, its other layers, then by what it computes otherwise."""
    ours, own = _kinds(model.blocks), _known(architecture)
    other_layers = problems[0].startswith("model.layers")  # farther than what their own validation does not like
    mixers = sum(kinds_of(tuple(model.extensions))[kind].role == "mixer" for kind in ours - own)
    return mixers, len(ours - own), len(own - ours), theirs is None, other_layers, len(problems)


def _refuse_unknown_kinds(model: ModelSection) -> None:
    """Raises CheckpointError for kinds of layers that are in no architecture at all."""
    everywhere = set().union(*map(_known, ARCHITECTURES.values()))
    unknown = sorted(_kinds(model.blocks) - everywhere)
    if unknown:
        advice = ""
        if any(kind.startswith("rwkv") for kind in unknown):
            advice = "; tools/checkpoint/to_rwkv.py writes RWKV-5, 6 and 7 in the layout of their authors"
        raise CheckpointError("the model", f"no class of transformers computes {', '.join(unknown)}{advice}")


def _express(config: Config, architecture: Architecture) -> tuple[PreTrainedConfig | None, list[str]]:
    """A configuration of this architecture, and what it computes differently."""
    model = config.model
    blocks = model.blocks
    strange = sorted({str(block) for block in blocks if without_variants(block) not in architecture.blocks})
    if strange:
        return None, [f"model.layers: {block} is no block of {' or '.join(architecture.blocks)}" for block in strange]
    if not set(architecture.needed) & set(map(without_variants, blocks)):
        return None, [f"model.layers has no {' or '.join(architecture.needed)}"]
    settings: dict[str, Any] = {
        "num_hidden_layers": len(blocks),
        "architectures": [architecture.class_name],
        "dtype": "float32",
        "initializer_range": model.init.std,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": config.tokenizer.eod_id,
        **architecture.required,
    }
    kinds = _kinds(model.blocks)
    for field in architecture.fields:
        section = field.ours.split(".")[0]
        if section in kinds or section not in kinds_of():  # sizes of layers that are not there are not known
            settings[field.theirs] = field.to_hf(_get(model, field.ours))
    if architecture.rotary != "none":
        settings["max_position_embeddings"] = config.training.sequence_length
        settings["rope_parameters"] = rope_parameters(model.attention.rotary, partial=architecture.rotary == "partial")
    if settings.get("n_positions", 0) is None:
        settings["n_positions"] = config.training.sequence_length
    settings.update(_windows(model, architecture))
    if architecture.hybrid is not None:
        settings["max_position_embeddings"] = config.training.sequence_length
        settings.update(architecture.hybrid.settings(model, architecture.hybrid.kinds(model)))
    settings.update(architecture.writes(config))
    try:
        theirs = CONFIG_MAPPING[architecture.name](**settings)
        training = {"steps": 1, "sequence_length": config.training.sequence_length}
        back = resolve({"model": model_values(theirs), "training": training})
    # their own validation, or ours of what they made of it
    except (ValueError, StrictDataclassError, ConfigError, CheckpointError) as error:
        return None, [str(error)]
    return theirs, differences(model, back.model)


def _get(model: ModelSection, key: str) -> Any:
    value: Any = model
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _windows(model: ModelSection, architecture: Architecture) -> dict[str, Any]:
    """Settings of sliding windows; what they cannot express shows when they are read back."""
    if architecture.window == "none":
        return {}
    windows = [options_of(model, block.mixer).window for block in model.blocks]
    if architecture.window == "all":
        return {"sliding_window": windows[0]}
    if architecture.window == "layer":
        used = sorted({window for window in windows if window is not None})
        return {
            "use_sliding_window": bool(used),
            "sliding_window": used[0] if used else None,
            "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        }
    return {}
