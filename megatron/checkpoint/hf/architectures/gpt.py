"""GPT-NeoX (Pythia) and GPT-2."""

from __future__ import annotations

from typing import Any

from megatron.config import Config
from megatron.kinds.attention import hf as attention
from megatron.kinds.common.links import Link, transposed
from megatron.kinds.mlp import hf as mlp

from ..architecture import Architecture, Field
from ..layers import uniform
from ..parts import Functions, RotaryPart
from .common import ATTENTION_BIASES, HEAD, SIZES, activation, options

LAYERNORM_FIXED = {
    **options("norm", type="layernorm", bias=True),
    "residual.norm": "pre",
    **options("attention", position="rotary", qk_norm="none"),
    "embedding.position": "none",
}
PARALLEL = Field("residual.form", "use_parallel_residual", {"parallel": True, "sequential": False})
GPT2_FIELDS = (
    *(*SIZES, activation("activation_function")),
    Field("mlp.hidden_size", "n_inner"),
    Field("norm.epsilon", "layer_norm_epsilon"),
)
_OURS, _NEOX, _GPT2 = "layers.{n}", "gpt_neox.layers.{n}", "transformer.h.{n}"


def _older(settings: dict[str, Any]) -> dict[str, Any]:
    rope = settings.get("rope_parameters") or {}
    if rope.get("rope_theta") is None:
        return {}
    return {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope.get("partial_rotary_factor", 1.0)}


GPT_NEOX = Architecture(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    (
        Link("embedding.tokens", "gpt_neox.embed_in"),
        Link(f"{_OURS}.mixer_norm", f"{_NEOX}.input_layernorm"),
        *attention.joined(
            f"{_NEOX}.attention.query_key_value", f"{_NEOX}.attention.dense", attention.query_key_value_by_head
        ),
        Link(f"{_OURS}.ffn_norm", f"{_NEOX}.post_attention_layernorm"),
        *mlp.plain(f"{_NEOX}.mlp.dense_h_to_4h", f"{_NEOX}.mlp.dense_4h_to_h"),
        Link("final_norm", "gpt_neox.final_layer_norm"),
        Link("head", "embed_out"),
    ),
    uniform("attention/mlp"),
    fields=(
        *(*SIZES, *ATTENTION_BIASES, activation("hidden_act")),
        Field("mlp.hidden_size", "intermediate_size"),
        Field("norm.epsilon", "layer_norm_eps"),
        PARALLEL,
    ),
    fixed={**LAYERNORM_FIXED, "residual.shared_norm": False, **options("mlp", gated=False, bias=True)},
    parts=(RotaryPart(partial=True),),
    aliases={"lm_head.weight": "embed_out.weight"},
    prefix="gpt_neox.",
    buffers=(r".*rotary_emb\.inv_freq", r".*\.attention\.(bias|masked_bias)"),
    older=_older,
)


def _positions(config: Config) -> dict[str, Any]:
    """Reading back shows a model without learned positions, which this architecture cannot express."""
    return {"n_positions": config.model.embedding.max_positions or config.training.sequence_length}


GPT2 = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    (
        Link("embedding.tokens", "transformer.wte"),
        Link("embedding.positions", "transformer.wpe"),
        Link(f"{_OURS}.mixer_norm", f"{_GPT2}.ln_1"),
        *attention.joined(
            f"{_GPT2}.attn.c_attn",
            f"{_GPT2}.attn.c_proj",
            lambda model: transposed(attention.query_key_value(model)),
            transposed(),
        ),
        Link(f"{_OURS}.ffn_norm", f"{_GPT2}.ln_2"),
        *mlp.plain(f"{_GPT2}.mlp.c_fc", f"{_GPT2}.mlp.c_proj", transposed()),
        Link("final_norm", "transformer.ln_f"),
        HEAD,
    ),
    uniform("attention/mlp"),
    fields=(*GPT2_FIELDS, Field("embedding.max_positions", "n_positions")),
    fixed={
        **LAYERNORM_FIXED,
        "residual.form": "sequential",
        **options("attention", position="none", qkv_bias=True, output_bias=True),
        **options("mlp", gated=False, bias=True),
        "embedding.position": "learned",
    },
    required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    parts=(Functions(write=_positions),),
    prefix="transformer.",
    buffers=(r".*\.attn\.(bias|masked_bias)",),
)
