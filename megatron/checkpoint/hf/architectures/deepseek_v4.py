"""DeepSeek-V4: attention to a window and compressed entries, rows of the stream, experts that a table may choose."""

from collections.abc import Collection
from typing import Any

from transformers import PreTrainedConfig

from megatron.config import Config
from megatron.config.section import RotaryScaling
from megatron.config.sections.model import ModelSection
from megatron.config.variants import options_of
from megatron.kinds.common.links import Link
from megatron.kinds.csa import hf as csa
from megatron.kinds.moe import hf as moe

from ..architecture import Architecture, Field, Found, Functions, Layers, runs_of
from ..layer_types import rope_parameters, rope_values
from . import common

_LAYER, _MIXERS = common.THEIRS, ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
_SPARSE, _HEAVY = _MIXERS[1:]
_VARIANTS = dict(zip(_MIXERS, ("sliding", "", "heavy")))
_ROWS = {"projection": "fn", "bias": "base", "scale": "scale"}


# -- layers: the base options are of sparse attention and of a learned choice of experts -------------------------------


def _rotary(theirs: PreTrainedConfig, name: str) -> tuple[dict[str, Any], list[str]]:
    values, problems = rope_values(theirs.rope_parameters[name], partial=True)
    if values.pop("fraction", theirs.partial_rotary_factor) != theirs.partial_rotary_factor:
        problems.append(f"rope_parameters.{name}.partial_rotary_factor must be partial_rotary_factor")
    return values, problems


class V4Layers(Layers):
    """`layer_types` and `mlp_layer_types`, with a variant of our options for each type."""

    def pattern(self, theirs: PreTrainedConfig) -> str:
        mixers = [f"csa@{_VARIANTS[each]}".rstrip("@") for each in theirs.layer_types]
        ffns = ["moe@hash" if each == "hash_moe" else "moe" for each in theirs.mlp_layer_types]
        return runs_of([f"{mixer}/{ffn}" for mixer, ffn in zip(mixers, ffns, strict=True)])

    def read(self, theirs: PreTrainedConfig) -> Found:
        rotary, problems = _rotary(theirs, "compress")
        values: dict[str, Any] = {
            "layers": self.pattern(theirs),
            "csa.rotary": rotary,
            "csa.rate": theirs.compress_rates[_SPARSE],
        }
        own, found = _rotary(theirs, "main")
        own = own | {"scaling": RotaryScaling().model_dump() | own.get("scaling", {})}
        variants = {
            "sliding": {"rate": None, "rotary": own},
            "heavy": {"rate": theirs.compress_rates[_HEAVY], "overlap": False, "index_top_k": None},
            "hash": {"router": {"select": "hash", "correction": "none"}},
        }
        values["variants"] = {name: each for name, each in variants.items() if f"@{name}" in values["layers"]}
        return values, [*problems, *(found if "sliding" in values["variants"] else [])]

    def write(self, config: Config) -> dict[str, Any]:
        """Reading back shows options that they cannot express."""
        model = config.model
        both = [_types(model, number) for number in range(len(model.blocks))]
        mixers = [options_of(model, block.mixer) for block in model.blocks if block.mixer is not None]
        of = {kind: own for (kind, _), own in reversed(list(zip(both, mixers)))}
        rates = {name: of[name].rate if name in of else rate for name, rate in ((_SPARSE, 4), (_HEAVY, 128))}
        compressed = of.get(_SPARSE, of.get(_HEAVY, model.csa))
        fraction = model.csa.rope_dim / model.csa.head_dim
        ropes = {"main": of.get(_MIXERS[0], compressed).rotary, "compress": compressed.rotary}
        return {
            "max_position_embeddings": config.training.sequence_length,
            "layer_types": [mixer for mixer, _ in both],
            "mlp_layer_types": [ffn for _, ffn in both],
            "compress_rates": rates,
            "partial_rotary_factor": fraction,
            "rope_theta": ropes["main"].base,
            "compress_rope_theta": ropes["compress"].base,
            "rope_parameters": {
                name: rope_parameters(each, partial=True) | {"partial_rotary_factor": fraction}
                for name, each in ropes.items()
            },
        }


def _types(model: ModelSection, number: int) -> tuple[str, str]:
    """Their types of a layer's mixer and of its feed-forward."""
    block = model.blocks[number]
    assert block.mixer is not None and block.ffn is not None
    mixer, ffn = options_of(model, block.mixer), options_of(model, block.ffn)
    name = _MIXERS[0] if mixer.rate is None else _SPARSE if mixer.indexed else _HEAVY
    return name, "hash_moe" if ffn.router.select == "hash" else "moe"


def _connections(ours: Collection[str]) -> tuple[Link, ...]:
    """The connection before the head is the last block's."""
    last = [name.rpartition(".")[0] for name in ours if name.endswith(".rows.projection")]
    found = {
        f"{common.OURS}.{branch}_rows": f"{_LAYER}.hc_{name}_" for branch, name in (("mixer", "attn"), ("ffn", "ffn"))
    }
    found |= {name: "model.hc_head.hc_" for name in last}
    return tuple(
        Link(f"{mine}.{part}", f"{theirs}{name}", suffixes=("",))
        for mine, theirs in found.items()
        for part, name in _ROWS.items()
    )


# -- options -----------------------------------------------------------------------------------------------------------


def _read_sizes(theirs: PreTrainedConfig) -> Found:
    problems = []
    if theirs.num_key_value_heads != 1:
        problems.append(f"num_key_value_heads={theirs.num_key_value_heads!r} is not computed there, only 1")
    width = theirs.n_shared_experts * theirs.moe_intermediate_size
    if theirs.n_shared_experts != 1:
        problems.append(f"n_shared_experts={theirs.n_shared_experts!r} is not computed there, only 1")
    turned = int(theirs.head_dim * theirs.partial_rotary_factor)
    limits = {"moe.limit": theirs.swiglu_limit, "moe.shared_limit": theirs.swiglu_limit}
    return {"csa.rope_dim": turned, "moe.shared_size": width, **limits}, problems


def _write_sizes(config: Config) -> dict[str, Any]:
    return {
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "swiglu_limit": config.model.moe.limit,
        "pad_token_id": None,
    }


_RENAMED = (  # of modules in memory, and of files of DeepSeek's own
    (r"^embed\.", "model.embed_tokens."),
    (r"^(model\.)?hc_head_", "model.hc_head.hc_"),
    (r"^lm_head\.", "head."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.kv_norm\.", ".norm."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.(q_a|q_b|o_a|o_b|kv)_proj\.", r".w\1."),
    (r"(?<=compressor)\.gate_proj\.", ".wgate."),
    (r"(?<=shared_experts)\.gate_proj\.", ".w1."),
    (r"(?<=shared_experts)\.down_proj\.", ".w2."),
    (r"(?<=shared_experts)\.up_proj\.", ".w3."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
)

DEEPSEEK_V4 = Architecture(
    "deepseek_v4",
    (
        *(common.EMBEDDING, common.FINAL_NORM, Link("head", "head"), *common.norms("attn_norm", "ffn_norm")),
        *csa.mixer(f"{_LAYER}.attn"),
        Link(f"{moe.OURS}.router", f"{_LAYER}.ffn.gate", suffixes=("weight",)),
        Link(f"{moe.OURS}.router.correction", f"{_LAYER}.ffn.gate.bias", suffixes=("",)),
        moe.table(f"{_LAYER}.ffn.gate.tid2eid"),
        *moe.experts(f"{_LAYER}.ffn.experts", "w1", "w3", "w2"),
        *moe.shared_alone(f"{_LAYER}.ffn.shared_experts", "w1", "w3", "w2"),
    ),
    V4Layers({"csa/moe": ""}, links=_connections),
    fields=(
        *(*common.STREAM, common.rms_norm(), common.activation("hidden_act", "moe")),
        *common.fields("residual", streams="hc_mult", sinkhorn_iterations="hc_sinkhorn_iters"),
        *common.fields("csa", heads="num_attention_heads", head_dim="head_dim", query_rank="q_lora_rank"),
        *common.fields("csa", window="sliding_window", groups="o_groups", output_rank="o_lora_rank"),
        *common.fields("csa", index_heads="index_n_heads", index_dim="index_head_dim", index_top_k="index_topk"),
        *common.fields("moe", hidden_size="moe_intermediate_size", experts="n_routed_experts"),
        *common.fields("moe", top_k="num_experts_per_tok"),
        Field("moe.router.scale", "routed_scaling_factor"),
        Field("moe.router.score", "scoring_func", {"sqrt_softplus": "sqrtsoftplus", "sigmoid": "sigmoid"}),
    ),
    fixed={
        **common.BARE,
        **common.EXPERTS_FIXED,
        **common.options("moe.router", correction="sign", normalize=True, groups=1),
        **{"moe.shared_gate": False, "residual.form": "sequential", "embedding.tied": False},
        **common.options("csa", position="rotary", overlap=True),
    },
    required={"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "hc_eps": 1e-6},
    parts=(Functions(_read_sizes, _write_sizes),),
    renamed=_RENAMED,
    predicts_more=True,
    newer=lambda model: "version 4 does not have the class",
)
