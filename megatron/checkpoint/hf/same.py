"""Compare two `model` sections by the function that they compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.config.kind import kinds_of
from megatron.config.pattern import BlockPattern
from megatron.config.sections.model import ModelSection
from megatron.config.variants import options_of

from .rope import NAMES

_TRAINING_ONLY = (
    *("init", "dropout", "vocab_multiple", "layers", "variants", "extensions", "multi_token_prediction"),
    *kinds_of(),
)
_ROUTER_TRAINING = ("jitter", "correction_rate", "sinkhorn_iterations", "sinkhorn_start", "width")
_NOT_COMPUTED = (
    *("init", "losses", "dropout", "chunk", "qk_clip", "decay_low", "decay_high"),
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
