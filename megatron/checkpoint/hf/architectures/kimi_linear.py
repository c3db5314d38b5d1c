"""Kimi Linear: Kimi delta attention or latent attention without positions, an MLP or experts as in DeepSeek-V3."""

from megatron.kinds.common.links import Link
from megatron.kinds.gated_delta import hf as gated_delta
from megatron.kinds.mla import hf as mla
from megatron.kinds.moe import hf as moe

from ..architecture import Architecture, Field
from . import common
from .deepseek import HEADS, MLA_FIELDS, MOE_FIELDS, SHARED_EXPERTS, V3_FIELDS, V3_FIXED, queries

_MIXER, _MOE = f"{common.THEIRS}.self_attn", f"{common.THEIRS}.block_sparse_moe"

KIMI_LINEAR = Architecture(
    "kimi_linear",
    (
        *(common.EMBEDDING, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS, *common.LLAMA_MLP),
        *(*mla.mixer(_MIXER), *gated_delta.kimi(_MIXER)),
        Link(f"{moe.OURS}.router", f"{_MOE}.gate", suffixes=("weight",)),
        Link(f"{moe.OURS}.router.correction", f"{_MOE}.gate.e_score_correction_bias", suffixes=("",)),
        *(*moe.experts(f"{_MOE}.experts", "w1", "w3", "w2"), *moe.shared_alone(f"{_MOE}.shared_experts")),
    ),
    common.mixed({"gated_delta": "linear_attention", "mla": "full_attention"}, links=queries),
    fields=(
        *(*common.STREAM, common.rms_norm(), *MLA_FIELDS, *V3_FIELDS),
        *(field for field in MOE_FIELDS if field.theirs != "n_routed_experts"),
        Field("moe.experts", "num_local_experts"),
        *common.fields("gated_delta", heads="linear_num_heads", key_heads="linear_num_heads"),
        *common.fields("gated_delta", **dict.fromkeys(("key_dim", "value_dim", "rank"), "linear_head_dim")),
        Field("gated_delta.convolution", "linear_conv_kernel_dim"),
    ),
    fixed={
        **common.BARE,
        **common.options("mla", position="none", norm_epsilon=1e-6),
        **common.options("gated_delta", decay="channel", gate="sigmoid", convolution_bias=False),
        **V3_FIXED,
        **{"embedding.tied": False, "residual.form": "sequential"},
    },
    required={"hidden_act": "silu", "tie_word_embeddings": False},
    parts=(HEADS, SHARED_EXPERTS),
    renamed=(  # of modules in memory
        (r"\.mlp\.(?=(gate|experts|shared_experts)\.)", ".block_sparse_moe."),
        (r"\.block_sparse_moe\.(?=(gate|up|down)_proj\.)", ".mlp."),
        (r"\.forget_gate\.", "."),
    ),
    newer=lambda model: "version 4 does not have the class",
)
