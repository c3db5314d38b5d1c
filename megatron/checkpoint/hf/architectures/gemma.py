"""Gemma 1 to 4: from 2 on norms on both sides, attention with a window in some layers."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from megatron.config import Config
from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Form, Link, stacked
from megatron.kinds.moe import hf as moe

from ..architecture import Architecture, Field, Found, Functions, Power, numbers_of, runs_of, without_variants
from ..layer_types import FULL, SLIDING, ByLayer, RotaryPart, mixers_of, near_rotary
from . import common

_GEMMA_LINKS = (
    *(common.EMBEDDING, *common.LLAMA_ATTENTION, *common.LLAMA_MLP, common.HEAD, common.FINAL_NORM),
    Link(f"{common.OURS}.mixer_norm", f"{common.THEIRS}.input_layernorm"),
    Link(f"{common.OURS}.mixer_output_norm", f"{common.THEIRS}.post_attention_layernorm"),
    Link(f"{common.OURS}.ffn_norm", f"{common.THEIRS}.pre_feedforward_layernorm"),
    Link(f"{common.OURS}.ffn_output_norm", f"{common.THEIRS}.post_feedforward_layernorm"),
)
_GEMMA_FIELDS = (
    *(field for field in common.LLAMA_SIZES if field.theirs != "hidden_act"),
    *(common.activation("hidden_activation"), common.HEAD_DIM, *common.ATTENTION_BIASES),
    Power("attention.scale", "query_pre_attn_scalar", power=-0.5),
    Field("head.softcap", "final_logit_softcapping"),
)
_GEMMA_FIXED = {**common.LLAMA_FIXED, "residual.norm": "both", "norm.unit_offset": True, "mlp.bias": False}


def _more_gemma(theirs: PreTrainedConfig) -> dict[str, Any]:
    return {"embedding.multiplier": theirs.hidden_size**0.5}


GEMMA = common.dense(
    "gemma",
    common.LLAMA_LINKS,
    more=(common.HEAD_DIM, *common.ATTENTION_BIASES),
    fixed={"norm.unit_offset": True, "mlp.bias": False},
    required={"use_bidirectional_attention": None},
    parts=(RotaryPart(), Functions(lambda theirs: (_more_gemma(theirs), []))),
)

GEMMA2 = Architecture(
    "gemma2",
    _GEMMA_LINKS,
    ByLayer({"attention/mlp": ""}, more=_more_gemma),
    fields=(*_GEMMA_FIELDS, Field("attention.softcap", "attn_logit_softcapping")),
    fixed=_GEMMA_FIXED,
    required={"use_bidirectional_attention": None},
    parts=(RotaryPart(),),
)


def _newer_gemma3(model: ModelSection) -> str:
    near = near_rotary(model)
    scaled = near is not None and near.scaling.type != "none"
    return "version 4 has no rotary scaling in layers with a window" if scaled else ""


GEMMA3 = Architecture(
    "gemma3_text",
    (*_GEMMA_LINKS, *common.QK_NORMS),
    ByLayer({"attention/mlp": ""}, ropes=True, more=_more_gemma),
    fields=_GEMMA_FIELDS,
    fixed={**_GEMMA_FIXED, "attention.qk_norm": "head"},
    # its attention has the option and does not use it
    required={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    newer=_newer_gemma3,
    older=lambda settings: {"rope_local_base_freq": settings["rope_parameters"][SLIDING]["rope_theta"]},
)


# -- Gemma 4: heads of layers without a window are wider, and their keys may be their values ---------------------------


def _of_kind(theirs: PreTrainedConfig, kind: str) -> list[tuple[int, int]]:
    """(channels, key/value heads) of the layers of a kind, without repetition."""
    layers = (theirs.per_layer_config[at] for at, own in enumerate(theirs.layer_types) if own == kind)
    return list(dict.fromkeys((each.head_dim, each.num_key_value_heads) for each in layers))


@dataclass(frozen=True)
class _TwoWidths(ByLayer):
    """Layers with a window have heads of another width and number than the others. All have experts, or none.

    The last ones may read the keys of the last layer of their type before them, with MLPs of twice the width."""

    def pattern(self, theirs: PreTrainedConfig) -> str:
        ffn = "moe" if theirs.enable_moe_block else "mlp"
        variants, own = self._variants(theirs), theirs.num_hidden_layers - theirs.num_kv_shared_layers
        names = [*variants[:own], *(_READER[each] for each in variants[own:])]
        ffns = [ffn] * own + [f"{ffn}@wide" if theirs.use_double_wide_mlp else ffn] * theirs.num_kv_shared_layers
        return runs_of([f"attention@{name}/{ffn}" if name else f"attention/{ffn}" for name, ffn in zip(names, ffns)])

    def read(self, theirs: PreTrainedConfig) -> Found:
        shared, layers = theirs.num_kv_shared_layers, theirs.num_hidden_layers
        if not 0 <= shared < layers:
            rule = f"must be at least 0 and below num_hidden_layers={layers}, not {shared}"
            return {}, [f"num_kv_shared_layers {rule}"]
        values, problems = super().read(theirs)
        if "layers" not in values:
            return values, problems
        near = values.get("variants", {}).get("sliding", {})
        if near:
            near["rotary"] = {"fraction": 1.0, **near["rotary"]}
        for kind, own, start in ((FULL, values, "attention."), (SLIDING, near, "")):
            shapes = _of_kind(theirs, kind)
            if len(shapes) > 1:
                problems.append(f"per_layer_config: heads of {kind} must have one shape to be computed here")
            for head_dim, kv_heads in shapes:
                own |= {f"{start}head_dim": head_dim, f"{start}kv_heads": kv_heads}
        values["attention.values"] = "keys" if theirs.attention_k_eq_v else "projected"
        near |= {"values": "projected"} if near else {}
        problems += _read_earlier(theirs, values, near)
        if theirs.use_bidirectional_attention == "all":
            problems.append("use_bidirectional_attention='all' is not computed here")
        return values, problems

    def write(self, config: Config) -> dict[str, Any]:
        found, mixers = super().write(config), mixers_of(config.model)
        near = next((each for each in mixers if each.window is not None), mixers[-1])
        far = {at: each for at, each in enumerate(mixers) if each.window is None}
        own = {at: {"head_dim": each.head_dim, "num_key_value_heads": each.kv_heads} for at, each in far.items()}
        return found | {
            "head_dim": near.head_dim,
            "num_key_value_heads": near.kv_heads,
            "attention_k_eq_v": any(each.values == "keys" for each in far.values()),
            "per_layer_config": own,
            "enable_moe_block": "attention/moe" in map(without_variants, config.model.blocks),
            "num_kv_shared_layers": sum(each.keys == "earlier" for each in mixers),
            "use_double_wide_mlp": any(block.ffn and block.ffn.variant for block in config.model.blocks),
            **({"vocab_size_per_layer_input": config.model.vocab_size} if config.model.residual.token_inputs else {}),
        }


_READER = {"": "reader", "sliding": "sliding_reader"}  # our variants of layers that read earlier keys


def _read_earlier(theirs: PreTrainedConfig, values: dict[str, Any], near: dict[str, Any]) -> list[str]:
    """Add the variants of layers that read earlier keys and of their MLPs. Gives problems."""
    types = theirs.layer_types[theirs.num_hidden_layers - theirs.num_kv_shared_layers :]
    own = {FULL: {"keys": "earlier"}, SLIDING: {**near, "keys": "earlier"}}
    if types:
        found = values.setdefault("variants", {})
        found |= {_READER["" if kind == FULL else "sliding"]: own[kind] for kind in set(types)}
        if theirs.use_double_wide_mlp and not theirs.enable_moe_block:
            found["wide"] = {"hidden_size": 2 * theirs.intermediate_size}
    problems = []
    if theirs.enable_moe_block and types and theirs.use_double_wide_mlp:
        problems.append("use_double_wide_mlp=True is not computed here with experts")
    if theirs.hidden_size_per_layer_input:
        if theirs.vocab_size_per_layer_input != theirs.vocab_size:
            problems.append("vocab_size_per_layer_input must be vocab_size to be computed here")
        if theirs.hidden_activation != "gelu_pytorch_tanh":
            problems.append(f"hidden_activation={theirs.hidden_activation!r} is not computed with inputs per layer")
    return problems


def _input_links(ours: Collection[str]) -> tuple[Link, ...]:
    """Tables and projections of all layers are one tensor each."""
    layers = [number for number in numbers_of(ours) if f"layers.{number}.inputs.table.weight" in ours]
    if not layers:
        return ()

    def each(name: str) -> tuple[str, ...]:
        return tuple(f"layers.{number}.inputs.{name}" for number in layers)

    tables = Form(lambda ours: [torch.cat(ours, 1)], lambda theirs: list(theirs[0].chunk(len(layers), 1)))
    return (
        Link(each("table"), "model.embed_tokens_per_layer", tables),
        Link(
            each("projection"),
            "model.per_layer_model_projection",
            lambda model: stacked(*[model.residual.token_inputs] * len(layers)),
        ),
        Link("inputs_norm", "model.per_layer_projection_norm"),
    )


def _unused(name: str, needed: Collection[str]) -> bool:
    """Files have keys and values of layers that read earlier ones."""
    found = re.fullmatch(r"(model\.layers\.\d+\.self_attn)\.(k_proj|v_proj|k_norm)\.(weight|bias)", name)
    return found is not None and f"{found[1]}.k_proj.weight" not in needed


_THEIR_EXPERTS = f"{common.THEIRS}.experts"
_GEMMA4_EXPERTS = (
    *(*moe.experts_as_one(_THEIR_EXPERTS), *moe.shared_alone(f"{common.THEIRS}.mlp")),
    Link(f"{moe.OURS}.router", f"{common.THEIRS}.router.proj"),
    *(
        Link(f"{moe.OURS}.{ours}", f"{common.THEIRS}.{theirs}", suffixes=("",))
        for ours, theirs in {
            "router.scale": "router.scale",
            "router.expert_scale": "router.per_expert_scale",
            "shared_scale": "pre_feedforward_layernorm.weight",
            "routed_scale": "pre_feedforward_layernorm_2.weight",
            "shared_norm.weight": "post_feedforward_layernorm_1.weight",
            "routed_norm.weight": "post_feedforward_layernorm_2.weight",
        }.items()
    ),
)
_BLOCKS = ("attention/mlp", "attention/moe")
_BY_LAYER = ("attention.head_dim", "attention.kv_heads", "attention.scale")
GEMMA4 = Architecture(
    "gemma4_text",
    (
        *(*_GEMMA_LINKS, *common.QK_NORMS, *_GEMMA4_EXPERTS),
        Link(f"{common.OURS}.attention.key", f"{common.THEIRS}.self_attn.k_proj"),
        Link(f"{common.OURS}.scale", f"{common.THEIRS}.layer_scalar", suffixes=("",)),
        Link(f"{common.OURS}.inputs.gate", f"{common.THEIRS}.per_layer_input_gate"),
        Link(f"{common.OURS}.inputs.output", f"{common.THEIRS}.per_layer_projection"),
        Link(f"{common.OURS}.inputs.output_norm", f"{common.THEIRS}.post_per_layer_input_norm"),
    ),
    _TwoWidths(
        dict.fromkeys(_BLOCKS, ""), links=_input_links, unused=_unused, needed=_BLOCKS, ropes=True, more=_more_gemma
    ),
    fields=(
        *(field for field in _GEMMA_FIELDS if field.ours not in _BY_LAYER),
        Field("residual.token_inputs", "hidden_size_per_layer_input"),
        *(Field("moe.shared_size", "intermediate_size"), common.activation("hidden_activation", "moe")),
        *common.fields("moe", hidden_size="moe_intermediate_size", experts="num_experts", top_k="top_k_experts"),
    ),
    fixed={
        **{**_GEMMA_FIXED, "norm.unit_offset": False, "residual.block_scale": True},
        **common.options("attention", qk_norm="head", value_norm=True, scale=1.0),
        **{**common.EXPERTS_FIXED, "moe.own_norms": True},
        **common.options("moe.router", normalize=True, expert_scale=True, scale=1.0, groups=1),
    },
    by_layer=("head_dim", "num_key_value_heads"),
    newer=lambda model: "version 4 does not have the class",
)
