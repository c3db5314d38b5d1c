"""DeepSeek-V2 and V3 (multi-head latent attention) and GLM-4.5: an MLP in the first layers, experts in the others."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig

from megatron.config import Config
from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link
from megatron.kinds.mla import hf as mla
from megatron.kinds.mla.options import yarn_multiplier
from megatron.kinds.moe import hf as moe

from ..architecture import Architecture, Field, Found, Functions, Listed
from ..layer_types import RotaryPart, rope_parameters, rope_values
from . import common

_ATTENTION, _MOE = f"{common.THEIRS}.self_attn", f"{common.THEIRS}.mlp"
FFNS = (  # of all layers: an MLP, or experts
    *common.LLAMA_MLP,
    Link(f"{moe.OURS}.router", f"{_MOE}.gate", suffixes=("weight",)),
    *moe.experts(f"{_MOE}.experts"),
    *moe.shared_alone(f"{_MOE}.shared_experts"),
)
CORRECTION = Link(f"{moe.OURS}.router.correction", f"{_MOE}.gate.e_score_correction_bias", suffixes=("",))
_LINKS = (common.EMBEDDING, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS, *mla.mixer(_ATTENTION), *FFNS)


def first_dense(theirs: PreTrainedConfig) -> list[str]:
    """An MLP in the first `first_k_dense_replace` layers ("dense"), experts in the others ("sparse")."""
    dense = theirs.first_k_dense_replace or 0
    return ["dense" if index < dense else "sparse" for index in range(theirs.num_hidden_layers)]


def dense_layers(_model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    """Reading back shows layers with an MLP that follow others."""
    return {"first_k_dense_replace": kinds.count("dense")}


def queries(ours: Collection[str]) -> tuple[Link, ...]:
    return mla.queries(_ATTENTION, any(".mla.query_down." in name for name in ours))


# Of a layer that predicts further tokens: copies of the model's tensors, and its own tensors outside of its block.
_COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
_FURTHER = (
    Link("layers.{n}.embedding_norm", f"{common.THEIRS}.enorm"),
    Link("layers.{n}.hidden_norm", f"{common.THEIRS}.hnorm"),
    Link("layers.{n}.projection", f"{common.THEIRS}.eh_proj"),
    Link("layers.{n}.output_norm", f"{common.THEIRS}.shared_head.norm"),
)


def _copied(name: str, saved: Collection[str]) -> str | None:
    """Source of such a layer's copy. A tied head is the embedding."""
    found = re.fullmatch(r"model\.layers\.\d+\.(.+)", name)
    source = _COPIES.get(found[1]) if found else None
    return "model.embed_tokens.weight" if source == "lm_head.weight" and source not in saved else source


_LAYERS = Listed(
    {"mla/moe": "sparse", "mla/mlp": "dense"},
    listed=first_dense,
    settings=dense_layers,
    links=queries,
    source=_copied,
    needed=("mla/moe", "mla/mlp"),
)


# -- rotary options: YaRN's two multipliers ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LatentRotary:
    """Rotary options of a kind of latent attention."""

    kind: str = "mla"

    def read(self, theirs: Any) -> Found:
        values, problems = _read_rotary(theirs)
        return {f"{self.kind}.{name}": value for name, value in values.items()}, problems

    def write(self, config: Config) -> dict[str, Any]:
        return _write_rotary(getattr(config.model, self.kind))


def _read_rotary(theirs: PreTrainedConfig) -> Found:
    """`mscale_all_dim` multiplies the scale of attention, and divides what `mscale` multiplies cos and sin by."""
    parameters, values = dict(theirs.rope_parameters), {}
    if parameters.get("rope_type") == "yarn":
        mscale, every, factor = parameters.get("mscale"), parameters.get("mscale_all_dim"), float(parameters["factor"])
        if parameters.get("attention_factor") is None and mscale and every:
            parameters["attention_factor"] = yarn_multiplier(factor, mscale) / yarn_multiplier(factor, every)
        parameters.pop("mscale", None)
        values["mscale_all_dim"] = float(parameters.pop("mscale_all_dim", None) or 0.0)
    rotary, problems = rope_values(parameters, partial=False)
    return values | {"rotary": rotary}, problems


def _read_heads(theirs: PreTrainedConfig) -> Found:
    """Their classes have the option, but the same number of heads for keys as for queries."""
    if theirs.num_key_value_heads != theirs.num_attention_heads:
        return {}, [f"num_key_value_heads={theirs.num_key_value_heads!r} must be num_attention_heads"]
    return {}, []


def _write_rotary(own: Any) -> dict[str, Any]:
    found = rope_parameters(own.rotary, partial=False)
    if own.rotary.scaling.type == "yarn":
        found["mscale_all_dim"] = own.mscale_all_dim
    return {"rope_parameters": found}


# -- experts -----------------------------------------------------------------------------------------------------------


def _read_shared(theirs: PreTrainedConfig) -> Found:
    """Shared experts are one of their summed width."""
    if not theirs.n_shared_experts:
        return {}, [f"n_shared_experts={theirs.n_shared_experts!r} is not computed there, only 1 and more"]
    return {"moe.shared_size": theirs.n_shared_experts * theirs.moe_intermediate_size}, []


def _write_shared(config: Config) -> dict[str, Any]:
    own = config.model.moe
    return {"n_shared_experts": own.shared_size // own.hidden_size if own.hidden_size else 0}


SHARED_EXPERTS = Functions(_read_shared, _write_shared)


def _read_groups(theirs: PreTrainedConfig) -> Found:
    if theirs.topk_method == "greedy":
        return {}, []
    if theirs.topk_method != "group_limited_greedy":
        return {}, [f"topk_method={theirs.topk_method!r} is not computed here, only greedy and group_limited_greedy"]
    groups = {"groups": theirs.n_group, "top_groups": theirs.topk_group, "group_score": "top_one"}
    return {f"moe.router.{name}": value for name, value in groups.items()}, []


def _write_groups(config: Config) -> dict[str, Any]:
    own = config.model.moe.router
    method = "group_limited_greedy" if own.groups > 1 else "greedy"
    return {"topk_method": method, "n_group": own.groups, "topk_group": own.top_groups}


def _further_layers(config: Config) -> dict[str, Any]:
    kept = DEEPSEEK_V3.keeps_further(config.model)
    return {"num_nextn_predict_layers": len(config.model.further_blocks) if kept else 0}


MOE_FIELDS = (
    Field("mlp.hidden_size", "intermediate_size"),
    common.activation("hidden_act"),
    common.activation("hidden_act", "moe"),
    *common.fields("moe", hidden_size="moe_intermediate_size", experts="n_routed_experts", top_k="num_experts_per_tok"),
    Field("moe.router.scale", "routed_scaling_factor"),
)


def latent_fields(kind: str) -> tuple[Field, ...]:
    """Options of latent attention that both sides have."""
    return (
        *common.fields(kind, heads="num_attention_heads", query_rank="q_lora_rank", kv_rank="kv_lora_rank"),
        *common.fields(kind, nope_dim="qk_nope_head_dim", rope_dim="qk_rope_head_dim", value_dim="v_head_dim"),
        Field(f"{kind}.bias", "attention_bias"),
    )


MLA_FIELDS = latent_fields("mla")
_FIELDS = (*(*common.STREAM, common.TIED, common.rms_norm(), *MOE_FIELDS), *MLA_FIELDS)
V3_FIELDS = common.fields("moe.router", normalize="norm_topk_prob", groups="n_group", top_groups="topk_group")
_MOE_FIXED = {**common.options("mlp", gated=True, bias=False), **common.EXPERTS_FIXED, "moe.shared_gate": False}
V3_ROUTER = common.options("moe.router", score="sigmoid", correction="sign", group_score="top_two")
V3_FIXED = {**_MOE_FIXED, **V3_ROUTER}
_BASE = {
    **common.BARE,
    "residual.form": "sequential",
    **common.options("mla", position="rotary", norm_epsilon=1e-6),
}  # of their class
HEADS = Functions(_read_heads, lambda config: {"num_key_value_heads": config.model.mla.heads})
_PARTS = (HEADS, LatentRotary(), SHARED_EXPERTS)


def _newer_v2(model: ModelSection) -> str:
    stretched = model.mla.rotary.scaling.type == "yarn" and model.mla.mscale_all_dim > 0
    return "version 4 does not multiply the scale of attention for YaRN" if stretched else ""


DEEPSEEK_V2 = Architecture(
    "deepseek_v2",
    _LINKS,
    _LAYERS,
    fields=_FIELDS,
    fixed={**_BASE, **_MOE_FIXED, "moe.router.normalize": False},
    required={"norm_topk_prob": False, "mlp_bias": False},
    parts=(*_PARTS, Functions(_read_groups, _write_groups)),
    newer=_newer_v2,
)

DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    (*_LINKS, *_FURTHER, CORRECTION),
    _LAYERS,
    fields=(*_FIELDS, *V3_FIELDS),
    fixed={**_BASE, **V3_FIXED},
    required={"rope_interleave": True},
    parts=(*_PARTS, Functions(write=_further_layers)),
    predicts_more=True,
    further_block="mla/moe",
    further_copies=tuple(_COPIES),
)


# -- GLM-4.7-Flash: DeepSeek-V3 with a list of its feed-forward networks -----------------------------------------------


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    links=(*_LINKS, CORRECTION),
    layers=replace(
        _LAYERS,
        listed=lambda theirs: theirs.mlp_layer_types,
        settings=lambda model, names: {"mlp_layer_types": names},
        source=lambda name, saved: None,
    ),
    parts=_PARTS,
    further_block="",
    further_copies=(),
    newer=lambda model: "version 4 does not have the class",
)

# -- GLM-4.5 and 4.6: attention, and experts chosen as in DeepSeek-V3 --------------------------------------------------

_GLM_FIXED = {**common.ATTENTION_FIXED, **V3_FIXED, "attention.output_bias": False}
del _GLM_FIXED["attention.qk_norm"]  # an option of theirs


GLM4_MOE = Architecture(
    "glm4_moe",
    (common.EMBEDDING, *common.LLAMA_ATTENTION, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS, *FFNS, CORRECTION),
    Listed(
        {"attention/moe": "sparse", "attention/mlp": "dense"},
        listed=first_dense,
        settings=dense_layers,
        links=lambda ours: common.QK_NORMS if any(".query_norm." in name for name in ours) else (),
        needed=("attention/moe",),
    ),
    fields=(
        *common.SIZES,
        Field("attention.kv_heads", "num_key_value_heads"),
        Field("attention.head_dim", "head_dim", optional=True),
        Field("attention.qk_norm", "use_qk_norm", {"head": True, "none": False}),
        common.QKV_BIAS,
        common.rms_norm(),
        *MOE_FIELDS,
        *V3_FIELDS,
    ),
    fixed=_GLM_FIXED,
    parts=(RotaryPart(partial=True), SHARED_EXPERTS, Functions(write=lambda config: {"num_nextn_predict_layers": 0})),
    predicts_more=True,
)


# -- V3.2: an indexer chooses the tokens that latent attention reads ---------------------------------------------------

_DSA = (
    *latent_fields("dsa"),
    *common.fields("dsa", index_heads="index_n_heads", index_dim="index_head_dim", index_top_k="index_topk"),
)
_SPARSE = (
    *(common.EMBEDDING, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS, *FFNS, CORRECTION),
    *(*mla.mixer(_ATTENTION, "dsa"), *mla.queries(_ATTENTION, True, "dsa")),
)
DEEPSEEK_V32 = Architecture(
    "deepseek_v32",
    (*_SPARSE, *mla.indexer(f"{_ATTENTION}.indexer")),
    common.mixed({"dsa": "indexed_attention"}),
    fields=(*(*common.STREAM, common.TIED, common.rms_norm(), *MOE_FIELDS), *_DSA, *V3_FIELDS),
    fixed={
        **common.BARE,
        "residual.form": "sequential",
        **common.options("dsa", position="rotary", norm_epsilon=1e-6, warm_up=False),
        **V3_FIXED,
    },
    required={"mlp_bias": False},
    parts=(
        Functions(_read_heads, lambda config: {"num_key_value_heads": config.model.dsa.heads}),
        LatentRotary("dsa"),
        SHARED_EXPERTS,
    ),
    predicts_more=True,
    newer=lambda model: "version 4 does not have the class",
)


def _read_indexers(theirs: PreTrainedConfig) -> Found:
    """Layers that use the choice of the layer before are not computed here."""
    shared = [index for index, kind in enumerate(theirs.indexer_types) if kind != "full"]
    return {}, [f"indexer_types[{shared[0]}]={theirs.indexer_types[shared[0]]!r} must be 'full'"] if shared else []


GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    name="glm_moe_dsa",
    links=(*_SPARSE, *mla.indexer(f"{_ATTENTION}.indexer", pairs=True)),
    parts=(*DEEPSEEK_V32.parts, Functions(_read_indexers)),
)
