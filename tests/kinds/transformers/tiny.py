"""Tiny settings of every causal language model of the installed transformers, found from the classes' own settings."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

TYPES = sorted(NAMES)
VOCABULARY = 96
WIDTH, LAYERS, HEADS, GROUPS, HEAD, EXPERTS, CHOSEN = 32, 2, 4, 2, 8, 4, 2
# Settings by transformers' names. Each is used where the class has a number there.
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim_model", "embedding_size", "lru_width"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "hidden_size_global", "out_hidden_size", "backbone_hidden_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "depth"), LAYERS),
    **dict.fromkeys(("encoder_layers", "conf_num_hidden_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("conf_num_attention_heads", "index_n_heads", "mamba_num_heads", "mamba_n_heads"), HEADS),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), GROUPS
    ),
    **dict.fromkeys(("head_dim", "swa_head_dim", "global_head_dim", "dim_head", "kv_channels", "rotary_dim"), HEAD),
    **dict.fromkeys(
        ("v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim", "attention_head_size"), HEAD
    ),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "query_pre_attn_scalar"), HEAD),
    "linear_num_value_heads": HEADS,
    "linear_num_key_heads": GROUPS,
    "linear_num_heads": GROUPS,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "gated_norm_rank", "laurel_rank", "hc_lowrank"), 16),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "n_inner"), 64
    ),
    **dict.fromkeys(("d_inner", "dff", "dim_ff", "feed_forward_size", "intermediate_size_mlp", "mlp_dim"), 64),
    **dict.fromkeys(("shared_intermediate_size", "dense_intermediate_size", "shared_experts_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "hidden_size_per_layer_input", "projection_dim"), 24),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"), CHOSEN),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "o_groups"), 1),
    **dict.fromkeys(("zero_expert_num", "first_k_dense_replace"), 1),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups", "n_mamba_heads"), 1),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_multiple_of"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 64),
    **dict.fromkeys(("sliding_window", "attention_window_size", "sliding_window_size", "window_size"), 8),
    **dict.fromkeys(("index_topk", "local_attention", "attention_chunk_size"), 8),
    "full_attention_interval": 2,
    "image_size": 32,
    "patch_size": 16,
}
PARTS = ("text_config", "vision_config", "audio_config", "decoder_config", "encoder_config")
PARTS += ("speech_config", "patcher_config", "global_config")
# Settings of single classes: where the sizes above do not fit each other.
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "topk_group": 1},
    "big_bird": {"attention_type": "original_full"},  # which short sequences switch to
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3]},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "reformer": {
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 8,
    },
    "rwkv": {"rescale_every": 0},  # else evaluations change its weights
    "roc_bert": {"shape_vocab_size": 32, "shape_embed_dim": 16, "pronunciation_vocab_size": 32},
    "xlm": {"emb_dim": 32, "n_words": 96, "causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
}
DECODERS = ("is_decoder",)


def tiny(name: str) -> dict[str, Any]:
    """Settings of a type, for `model.transformers.options`."""
    return _smaller(CONFIG_MAPPING[name]()) | OWN.get(name, {})


def _smaller(config: PreTrainedConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    values = config.to_dict()
    for key, value in values.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        if key in SIZES and number:
            found[key] = min(SIZES[key], value)
        elif key in DECODERS:
            found[key] = True
        elif isinstance(value, float) and 0 < value < 1 and ("drop" in key or "jitter" in key):
            found[key] = 0.0
        elif key.endswith("token_id") and number and value >= VOCABULARY:
            found[key] = 1
        elif key in PARTS and isinstance(value, dict):
            found[key] = _smaller(getattr(config, key))
    if "kv_lora_rank" in found and "num_key_value_heads" in found:  # latent attention has a key per head
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found
