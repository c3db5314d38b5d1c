"""Configurations both ways: a Hugging Face configuration as our `model` section, and ours as theirs.

Limits of an architecture are found without a list of them. Our section is converted to a Hugging Face configuration and
back, and every option that then computes something else is reported."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from megatron.config import Config, ConfigError, resolve
from megatron.config.arithmetic.recurrence import core_of
from megatron.config.kind import kinds_of
from megatron.config.pattern import BlockPattern, parse
from megatron.config.registry import ARCHITECTURE, RegistryError, offered_by, registry_of
from megatron.config.sections.model import ModelSection
from megatron.config.variants import options_of
from megatron.model.parametrization import folded_config

from ..format.errors import CheckpointError
from .architecture import Architecture, without_variants
from .companions import Companions
from .layer_types import NAMES

Extensions = tuple[str, ...]
UNLIMITED = 2048  # tokens of a sample where the model itself sets no limit


def names(extensions: Extensions = ()) -> tuple[str, ...]:
    """The known model_types, in the order in which export tries them."""
    return registry_of(extensions).names(ARCHITECTURE)


def extensions_for(name: Any, extensions: Extensions = ()) -> Extensions:
    """The extensions that know a model_type: the given ones, or one more that an installed package offers."""
    if isinstance(name, str) and name not in names(extensions) and (module := offered_by(ARCHITECTURE, name)):
        return (*extensions, module)
    return extensions


def known_architectures(name: Any, extensions: Extensions = ()) -> Architecture:
    """The tables of a model_type.

    Raises:
        CheckpointError: there are none.
        RegistryError: an extension's table is unusable.
    """
    extensions = extensions_for(name, extensions)
    if not isinstance(name, str) or name not in names(extensions):
        there = ", ".join(sorted(names(extensions)))
        raise CheckpointError(str(name), f"models of this architecture are not exchanged. Known are {there}")
    registry = registry_of(extensions)
    found = registry.load(ARCHITECTURE, name)
    if not isinstance(found, Architecture) or found.name != name:
        rule = "describe it as the files of megatron/checkpoint/hf/architectures do"
        raise RegistryError(f"{registry.path(ARCHITECTURE, name)} must be an Architecture whose name is {name!r}", rule)
    return found


def architecture_of(config: PreTrainedConfig, extensions: Extensions = ()) -> Architecture:
    """The tables of a Hugging Face configuration. Errors as of `known_architectures`."""
    return known_architectures(config.model_type, extensions)


def _all(extensions: Extensions) -> list[Architecture]:
    return [known_architectures(name, extensions) for name in names(extensions)]


# -- theirs to ours ------------------------------------------------------------------------------------------------


def model_values(theirs: PreTrainedConfig, extensions: Extensions = ()) -> dict[str, Any]:
    """Our `model` section, as nested plain values, of a Hugging Face configuration.

    Raises:
        CheckpointError: with every setting that our model does not compute.
    """
    architecture, problems = architecture_of(theirs, extensions), []
    if others := _of_single_layers(theirs) - set(architecture.by_layer):
        raise CheckpointError(
            theirs.model_type, f"per_layer_config: {', '.join(sorted(others))} of single layers is not computed here"
        )
    values: dict[str, Any] = {}
    for ours, value in architecture.fixed.items():
        _put(values, ours, value)
    for field in architecture.fields:
        try:
            _put(values, field.ours, field.read(theirs))
        except KeyError as error:
            problems.append(
                f"{field.theirs}={error.args[0]!r} is not computed here: "
                f"{field.ours} must be one of {', '.join(map(str, field.values or ()))}"
            )
    for name, value in architecture.required.items():
        if getattr(theirs, name) != value:
            problems.append(f"{name}={getattr(theirs, name)!r} is not computed here, only {value!r}")
    for part in (*architecture.parts, architecture.layers):
        more, found = part.read(theirs)
        for ours, value in more.items():
            _put(values, ours, value)
        problems += found
    if problems:
        raise CheckpointError(theirs.model_type, problems)
    return values


def _of_single_layers(theirs: PreTrainedConfig) -> set[str]:
    """Settings that some layer has for itself. Version 5 of transformers gives them to models of any architecture."""
    own = theirs.to_dict().get("per_layer_config") or {}
    return {str(name) for each in own.values() for name in each}


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *above, last = key.split(".")
    for name in above:
        values = values.setdefault(name, {})
    if value is not None:
        values[last] = value


def longest(theirs: PreTrainedConfig) -> int:
    """Tokens of the longest sequence that a model was made for. `UNLIMITED` where nothing limits it (Mamba)."""
    return _limit(theirs) or UNLIMITED


def _limit(theirs: PreTrainedConfig) -> int | None:
    names = ("max_position_embeddings", "context_length")
    return next((value for name in names if (value := getattr(theirs, name, None))), None)


# -- ours to theirs ------------------------------------------------------------------------------------------------


def hf_config(
    config: Config, name: str | None = None, kept: Companions | None = None, *, ids: bool = True
) -> tuple[Architecture, PreTrainedConfig]:
    """The Hugging Face configuration that computes the same as ours.

    Args:
        config: resolved.
        name: model_type of the architecture. None: that of the imported model, else the first that can express the
            model.
        kept: companions of the imported model that the weights began as. Its settings stay where they do not contradict
            ours.
        ids: whether to keep its special ids.

    Raises:
        CheckpointError: none can (or the given one cannot), with the options in the way.
    """
    config = folded_config(config)
    extensions = tuple(config.model.extensions)
    tried = {}
    first = [known_architectures(name, extensions)] if name else []
    if not name and kept is not None and kept.model_type in names(extensions):
        first = [known_architectures(kept.model_type, extensions)]
    for each in first if name else (*first, *_all(extensions)):
        own = kept if kept is not None and kept.model_type == each.name else None
        theirs, problems = _express(config, each, own, ids)
        if not problems:
            return each, theirs
        tried[each.class_name] = (_distance(config.model, each, theirs, problems), problems)
    if name is None:
        _refuse_unknown_kinds(config.model)
    nearest = min(tried, key=lambda each: tried[each][0])
    raise CheckpointError(f"the model cannot be written as {nearest}", tried[nearest][1])


def _kinds(blocks: Iterable[BlockPattern]) -> set[str]:
    return {kind.name for block in blocks for kind in block.kinds}


def _known(architecture: Architecture) -> set[str]:
    return _kinds(block for text in architecture.blocks for block in parse(text))


def _distance(
    model: ModelSection, architecture: Architecture, theirs: PreTrainedConfig | None, problems: list[str]
) -> tuple:
    """Distance of an architecture from a model: by its mixers, its other layers, then by differing options."""
    ours, own = _kinds(model.blocks), _known(architecture)
    other_layers = problems[0].startswith("model.layers")  # farther than errors of their own validation
    mixers = sum(kinds_of(tuple(model.extensions))[kind].role == "mixer" for kind in ours - own)
    return mixers, len(ours - own), len(own - ours), theirs is None, other_layers, len(problems)


def _refuse_unknown_kinds(model: ModelSection) -> None:
    """Raise CheckpointError for kinds of layers that no architecture has, and for a repeated core."""
    if core_of(model.blocks):
        raise CheckpointError(
            "the model",
            "no class of transformers repeats a core of blocks (`recurrent(...)` in model.layers): read its "
            "checkpoints with megatron.training.text.load_model",
        )
    extensions = tuple(model.extensions)
    everywhere = set().union(*map(_known, _all(extensions)))
    unknown = sorted(_kinds(model.blocks) - everywhere)
    if unknown:
        ways = dict.fromkeys(kinds_of(extensions)[kind].exchange for kind in unknown)
        advice = "".join(f"; {way}" for way in ways if way)
        raise CheckpointError("the model", f"no class of transformers computes {', '.join(unknown)}{advice}")


def _express(
    config: Config, architecture: Architecture, kept: Companions | None, ids: bool
) -> tuple[PreTrainedConfig | None, list[str]]:
    model = config.model
    blocks = model.blocks
    strange = sorted({str(block) for block in blocks if without_variants(block) not in architecture.blocks})
    if strange:
        return None, [f"model.layers: {block} is no block of {' or '.join(architecture.blocks)}" for block in strange]
    if not set(architecture.needed) & set(map(without_variants, blocks)):
        return None, [f"model.layers has no {' or '.join(architecture.needed)}"]
    settings, length = _settings(config, architecture), config.training.sequence_length
    if kept is not None:
        theirs, problems = _tried(config, architecture, partial(kept.settings, ids=ids))
        if theirs is not None and not problems and (_limit(theirs) or length) >= length:
            return theirs, []
        theirs, problems = _tried(config, architecture, partial(kept.settings, settings, ids=ids))
        if theirs is not None and not problems:
            return theirs, []
    return _tried(config, architecture, partial(CONFIG_MAPPING[architecture.name], **settings))


def _settings(config: Config, architecture: Architecture) -> dict[str, Any]:
    model = config.model
    settings: dict[str, Any] = {
        "num_hidden_layers": len(model.blocks),
        "architectures": [architecture.class_name],
        "dtype": "float32",
        "initializer_range": model.init.std,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": config.tokenizer.eod_id,
        **architecture.required,
    }
    kinds, extensions = _kinds(model.blocks), tuple(model.extensions)
    for field in architecture.fields:
        section = field.ours.split(".")[0]
        if section in kinds or section not in kinds_of(extensions):  # sizes of absent layers are unknown
            settings[field.theirs] = field.to_hf(_get(model, field.ours))
    for part in (*architecture.parts, architecture.layers):
        settings.update(part.write(config))
    return settings


def _tried(
    config: Config, architecture: Architecture, make: Callable[[], PreTrainedConfig]
) -> tuple[PreTrainedConfig | None, list[str]]:
    """The configuration that `make` gives and its differences. None if it cannot be read back."""
    model, extensions = config.model, tuple(config.model.extensions)
    try:
        theirs = make()
        training = {"steps": 1, "sequence_length": config.training.sequence_length}
        again = {**model_values(theirs, extensions), "extensions": list(extensions)}
        back = resolve({"model": again, "training": training})
    # their own validation, or ours of their configuration
    except (ValueError, TypeError, StrictDataclassError, ConfigError, CheckpointError) as error:
        return None, [str(error)]
    return theirs, differences(model, back.model)


def _get(model: ModelSection, key: str) -> Any:
    value: Any = model
    for name in key.split("."):
        value = getattr(value, name)
    return value


_TRAINING_ONLY = (
    *("init", "dropout", "vocab_multiple", "layers", "variants", "extensions", "multi_token_prediction"),
    *kinds_of(),
)
_ROUTER_TRAINING = ("jitter", "correction_rate", "sinkhorn_iterations", "sinkhorn_start", "width")
_NOT_COMPUTED = (
    *("init", "losses", "dropout", "chunk", "qk_clip", "index_loss", "decay_low", "decay_high"),
    *("time_step_low", "time_step_high", "time_step_floor"),
)


def differences(model: ModelSection, other: ModelSection) -> list[str]:
    """Options of `model` that `other` computes differently, one sentence each. Options that matter only in training
    (initial values, dropout), or that have no effect, are ignored."""
    found = list(_differing("model", _stack(model), _stack(other)))
    blocks, others = _blocks(model), _blocks(other)
    if len(blocks) != len(others):
        return [*found, f"model.layers: {len(blocks)} blocks, not {len(others)}"]
    seen: set[str] = set()
    for number, (mine, theirs) in enumerate(zip(blocks, others)):
        for key, problem in ((each.split(" ")[0], each) for each in _differing("model", mine, theirs)):
            if key not in seen:
                found.append(f"{problem} (layer {number})" if len({str(each) for each in blocks}) > 1 else problem)
            seen.add(key)
    return found


def _stack(model: ModelSection) -> dict[str, Any]:
    values = {name: value for name, value in model.model_dump().items() if name not in _TRAINING_ONLY}
    if model.norm.type != "layernorm":
        values["norm"]["bias"] = None
    if model.norm.type == "nonparametric":
        values["norm"]["unit_offset"] = None
    if model.embedding.position != "learned":
        values["embedding"]["max_positions"] = None
    del values["residual"]["fp32"]  # other rounding of the same function
    return values


def _blocks(model: ModelSection) -> list[dict[str, Any]]:
    return [_block(model, block) for block in model.blocks]


def _block(model: ModelSection, block: BlockPattern) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in block.kinds:
        values = options_of(model, kind).model_dump()
        values = {name: value for name, value in values.items() if name not in _NOT_COMPUTED}
        if "inner_size" in values and values["inner_size"] == values["expand"] * model.hidden_size:
            values["inner_size"] = None  # the default
        values.pop("mscale_all_dim", None)  # its effect is in `scale`
        if "rotary" in values:
            _drop_idle_rotary(values)
        if isinstance(values.get("router"), dict):
            idle = _ROUTER_TRAINING if values["router"]["groups"] > 1 else (*_ROUTER_TRAINING, "group_score")
            values["router"] = {name: value for name, value in values["router"].items() if name not in idle}
        found[kind.name] = values
    return found


def _drop_idle_rotary(values: dict[str, Any]) -> None:
    if values["position"] != "rotary":
        values["rotary"] = None
        return
    scaling = values["rotary"]["scaling"]
    used = ("type", *NAMES[scaling["type"]], *(("original_length",) if scaling["type"] == "dynamic" else ()))
    values["rotary"]["scaling"] = {name: scaling[name] for name in used}


def _differing(path: str, mine: Any, theirs: Any) -> Iterator[str]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in dict.fromkeys((*mine, *theirs)):
            yield from _differing(f"{path}.{name}", mine.get(name), theirs.get(name))
    elif mine != theirs and not _close(mine, theirs):
        yield f"{path} = {mine!r} cannot be expressed (it would become {theirs!r})"


def _close(mine: Any, theirs: Any) -> bool:
    """Floats that differ by rounding of a derivation or of a text are equal."""
    both = isinstance(mine, (int, float)) and isinstance(theirs, (int, float))
    return both and not isinstance(mine, bool) and abs(mine - theirs) <= 1e-12 * max(abs(mine), abs(theirs))
