"""Logits and gradients of random tiny models equal transformers' own, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

from tests.float64 import DOUBLE, wider
from tests.model.parity import LLAMA_LIKE, TINY, compare
from tests.model.recurrent_cases import RECURRENT

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 700.0, "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

CASES = {
    "neox parallel": hf.GPTNeoXConfig(**TINY, intermediate_size=96),
    "neox sequential": hf.GPTNeoXConfig(**TINY, intermediate_size=48, use_parallel_residual=False),
    "neox odd fraction, tanh": hf.GPTNeoXConfig(
        **{**TINY, "num_attention_heads": 2},
        intermediate_size=96,
        rotary_pct=0.5,
        hidden_act="gelu_new",
        layer_norm_eps=1e-3,
        rotary_emb_base=200,
    ),
    "neox without attention biases": hf.GPTNeoXConfig(**TINY, intermediate_size=96, attention_bias=False),
    "neox tied": hf.GPTNeoXConfig(**TINY, intermediate_size=96, tie_word_embeddings=True),
    "llama grouped": hf.LlamaConfig(**LLAMA_LIKE),
    "llama multi-head, tied": hf.LlamaConfig(**{**LLAMA_LIKE, "num_key_value_heads": 4}, tie_word_embeddings=True),
    "llama multi-query": hf.LlamaConfig(**{**LLAMA_LIKE, "num_key_value_heads": 1}),
    "llama head_dim, biases": hf.LlamaConfig(**LLAMA_LIKE, head_dim=12, attention_bias=True, mlp_bias=True),
    "llama linear": hf.LlamaConfig(
        **LLAMA_LIKE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
    ),
    "llama llama3": hf.LlamaConfig(**LLAMA_LIKE, rope_parameters=LLAMA3),
    "llama yarn": hf.LlamaConfig(**LLAMA_LIKE, max_position_embeddings=64, rope_parameters=YARN),
    "llama yarn, factor given": hf.LlamaConfig(
        **LLAMA_LIKE,
        max_position_embeddings=64,
        rope_parameters={**YARN, "attention_factor": 0.7, "beta_fast": 8.0, "beta_slow": 2.0},
    ),
    "llama yarn, not rounded": hf.LlamaConfig(
        **LLAMA_LIKE, max_position_embeddings=64, rope_parameters={**YARN, "truncate": False}
    ),
    "llama proportional": hf.LlamaConfig(
        **LLAMA_LIKE,
        rope_parameters={"rope_type": "proportional", "rope_theta": 1e3, "factor": 2.0, "partial_rotary_factor": 0.5},
    ),
    "llama dynamic": hf.LlamaConfig(**LLAMA_LIKE, max_position_embeddings=7, rope_parameters=DYNAMIC),
    "neox dynamic, part of the channels": hf.GPTNeoXConfig(
        **TINY,
        intermediate_size=96,
        max_position_embeddings=5,
        rope_parameters={**DYNAMIC, "partial_rotary_factor": 0.5},
    ),
    "llama dynamic, not longer": hf.LlamaConfig(**LLAMA_LIKE, max_position_embeddings=64, rope_parameters=DYNAMIC),
    "mistral window": hf.MistralConfig(**LLAMA_LIKE, sliding_window=5),
    "mistral wide window": hf.MistralConfig(**LLAMA_LIKE, sliding_window=64),
    "mistral no window": hf.MistralConfig(**LLAMA_LIKE, sliding_window=None, rms_norm_eps=1e-4),
    "qwen3": hf.Qwen3Config(**LLAMA_LIKE, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3 wide heads, tied": hf.Qwen3Config(**LLAMA_LIKE, head_dim=20, tie_word_embeddings=True),
    "qwen3 biases, some windows": hf.Qwen3Config(
        **{**LLAMA_LIKE, "num_hidden_layers": 3},
        head_dim=8,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
    ),
    "olmo2": hf.Olmo2Config(**LLAMA_LIKE, rms_norm_eps=1e-6, eos_token_id=1, pad_token_id=None),
    "olmo2 multi-head, biases": hf.Olmo2Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 4},
        attention_bias=True,
        eos_token_id=1,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "gpt2": hf.GPT2Config(
        vocab_size=61, n_positions=24, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1
    ),
    "gpt2 untied, relu": hf.GPT2Config(
        vocab_size=61,
        n_positions=40,
        n_embd=24,
        n_layer=3,
        n_head=2,
        n_inner=50,
        activation_function="relu",
        tie_word_embeddings=False,
        layer_norm_epsilon=1e-3,
        bos_token_id=1,
        eos_token_id=1,
    ),
}


EXPERTS = {**LLAMA_LIKE, "intermediate_size": 20, "num_experts_per_tok": 2}
CASES |= {
    "mixtral": hf.MixtralConfig(**EXPERTS, num_local_experts=4),
    "mixtral three of six, window": hf.MixtralConfig(
        **{**EXPERTS, "num_experts_per_tok": 3}, num_local_experts=6, sliding_window=7, tie_word_embeddings=True
    ),
    "qwen3_moe": hf.Qwen3MoeConfig(
        **EXPERTS, num_experts=6, moe_intermediate_size=12, norm_topk_prob=True, head_dim=12, attention_bias=True
    ),
    "qwen3_moe not normalised": hf.Qwen3MoeConfig(
        **{**EXPERTS, "num_experts_per_tok": 3}, num_experts=8, moe_intermediate_size=8, norm_topk_prob=False
    ),
    "qwen3_moe some layers dense": hf.Qwen3MoeConfig(
        **{**EXPERTS, "num_hidden_layers": 4},
        num_experts=4,
        moe_intermediate_size=12,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
    "qwen2_moe": hf.Qwen2MoeConfig(
        **EXPERTS, num_experts=4, moe_intermediate_size=12, shared_expert_intermediate_size=28
    ),
    "qwen2_moe some layers dense, no biases": hf.Qwen2MoeConfig(
        **{**EXPERTS, "num_hidden_layers": 3},
        num_experts=5,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=16,
        norm_topk_prob=True,
        qkv_bias=False,
        mlp_only_layers=[0],
        tie_word_embeddings=True,
    ),
    "olmoe": hf.OlmoeConfig(**EXPERTS, num_experts=8, eos_token_id=1, pad_token_id=None),
    "olmoe normalised, gelu": hf.OlmoeConfig(
        **{**EXPERTS, "num_experts_per_tok": 4},
        num_experts=5,
        norm_topk_prob=True,
        hidden_act="gelu",
        eos_token_id=1,
        pad_token_id=None,
    ),
}


DENSE = {**LLAMA_LIKE, "num_hidden_layers": 3}
NEIGHBOURS = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}
CASES |= {
    "seed_oss": hf.SeedOssConfig(**LLAMA_LIKE, head_dim=8, pad_token_id=None),
    "seed_oss all biases": hf.SeedOssConfig(
        **LLAMA_LIKE, head_dim=12, attention_out_bias=True, mlp_bias=True, pad_token_id=None
    ),
    "arcee": hf.ArceeConfig(**LLAMA_LIKE, bos_token_id=None, eos_token_id=1),
    "arcee biases": hf.ArceeConfig(**LLAMA_LIKE, attention_bias=True, mlp_bias=True, bos_token_id=None, eos_token_id=1),
    "apertus": hf.ApertusConfig(**LLAMA_LIKE, pad_token_id=None),
    "apertus biases, silu": hf.ApertusConfig(
        **LLAMA_LIKE, pad_token_id=None, attention_bias=True, hidden_act="silu", rope_parameters=YARN
    ),
    "olmo": hf.OlmoConfig(**LLAMA_LIKE, pad_token_id=None, eos_token_id=1),
    "olmo biases, tied": hf.OlmoConfig(
        **LLAMA_LIKE, pad_token_id=None, attention_bias=True, tie_word_embeddings=True, eos_token_id=1
    ),
    "ernie4_5": hf.Ernie4_5Config(**LLAMA_LIKE, pad_token_id=None, head_dim=8),
    "ernie4_5 biases, untied": hf.Ernie4_5Config(
        **LLAMA_LIKE, pad_token_id=None, head_dim=12, use_bias=True, tie_word_embeddings=False
    ),
    "helium": hf.HeliumConfig(**LLAMA_LIKE, head_dim=8, pad_token_id=None),
    "glm": hf.GlmConfig(**LLAMA_LIKE, head_dim=8, pad_token_id=None, eos_token_id=1),
    "glm no biases": hf.GlmConfig(
        **LLAMA_LIKE, head_dim=12, attention_bias=False, rope_parameters=NEIGHBOURS, pad_token_id=None, eos_token_id=1
    ),
    "gemma": hf.GemmaConfig(**LLAMA_LIKE, pad_token_id=None, head_dim=8),
    "gemma wide heads, biases": hf.GemmaConfig(**LLAMA_LIKE, pad_token_id=None, head_dim=20, attention_bias=True),
    "cohere": hf.CohereConfig(**LLAMA_LIKE, pad_token_id=None, eos_token_id=1),
    "cohere biases, untied": hf.CohereConfig(
        **LLAMA_LIKE,
        pad_token_id=None,
        attention_bias=True,
        logit_scale=0.3,
        layer_norm_eps=1e-3,
        tie_word_embeddings=False,
        eos_token_id=1,
    ),
    "cohere2": hf.Cohere2Config(**DENSE, pad_token_id=None, sliding_window=5, sliding_window_pattern=3, eos_token_id=1),
    "cohere2 windows only": hf.Cohere2Config(
        **LLAMA_LIKE, pad_token_id=None, sliding_window=6, layer_types=["sliding_attention"] * 2, eos_token_id=1
    ),
    "starcoder2": hf.Starcoder2Config(**LLAMA_LIKE, sliding_window=5, bos_token_id=1, eos_token_id=1),
    "starcoder2 no biases": hf.Starcoder2Config(**LLAMA_LIKE, use_bias=False, bos_token_id=1, eos_token_id=1),
    "nemotron": hf.NemotronConfig(**LLAMA_LIKE),
    "nemotron biases": hf.NemotronConfig(**LLAMA_LIKE, attention_bias=True, mlp_bias=True, rope_parameters=NEIGHBOURS),
    "stablelm": hf.StableLmConfig(**LLAMA_LIKE),
    "stablelm parallel, biases": hf.StableLmConfig(**LLAMA_LIKE, use_parallel_residual=True, use_qkv_bias=True),
    "phi": hf.PhiConfig(**{**LLAMA_LIKE, "num_key_value_heads": 4}),
    "phi grouped": hf.PhiConfig(**LLAMA_LIKE, rope_parameters=NEIGHBOURS, hidden_act="gelu"),
    "gptj": hf.GPTJConfig(vocab_size=61, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, bos_token_id=1, eos_token_id=1),
    "gptj every channel": hf.GPTJConfig(
        vocab_size=61, n_embd=24, n_layer=2, n_head=3, rotary_dim=8, n_inner=50, bos_token_id=1, eos_token_id=1
    ),
}
V32 = {
    **{**TINY, "num_key_value_heads": 4, "intermediate_size": 40, "num_hidden_layers": 3},
    **{"kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"index_n_heads": 8, "index_head_dim": 8, "moe_intermediate_size": 12, "num_experts_per_tok": 2},
}
CASES |= {
    "deepseek_v32": hf.DeepseekV32Config(
        **V32, n_routed_experts=4, n_group=1, topk_group=1, index_topk=5, first_k_dense_replace=1
    ),
    "deepseek_v32 every token, groups, yarn": hf.DeepseekV32Config(
        **V32,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        index_topk=64,
        max_position_embeddings=64,
        mlp_layer_types=["sparse", "dense", "sparse"],
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "glm_moe_dsa": hf.GlmMoeDsaConfig(**V32, n_routed_experts=4, index_topk=5, first_k_dense_replace=1),
    "glm4_moe_lite": hf.Glm4MoeLiteConfig(
        **{name: value for name, value in V32.items() if not name.startswith("index")},
        n_routed_experts=4,
        mlp_layer_types=["sparse", "dense", "sparse"],
    ),
    "minimax_m2": hf.MiniMaxM2Config(**EXPERTS, num_local_experts=4, head_dim=12),
    "minimax_m2 half of the channels": hf.MiniMaxM2Config(
        **{**EXPERTS, "num_experts_per_tok": 3},
        num_local_experts=6,
        head_dim=8,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
    ),
}
V4 = {
    **TINY,
    **{"num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 12, "partial_rotary_factor": 0.5, "sliding_window": 6},
    **{"o_groups": 2, "o_lora_rank": 6, "index_n_heads": 8, "index_head_dim": 10, "index_topk": 3, "hc_mult": 3},
    **{"moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4},
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5},
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "compressed_sparse", "heavily_compressed")]
    + ["compressed_sparse_attention"],
}
CASES |= {
    "deepseek_v4": hf.DeepseekV4Config(**V4, mlp_layer_types=["hash_moe", "moe", "moe", "hash_moe"]),
    "deepseek_v4 every entry, yarn, limits": hf.DeepseekV4Config(
        **{**V4, "index_topk": 64, "hc_mult": 2, "o_groups": 4},
        num_hash_layers=1,
        swiglu_limit=0.1,
        rope_parameters={**YARN},  # the class adds to it
        max_position_embeddings=64,
    ),
}
GLM4_MOE = {**EXPERTS, "num_hidden_layers": 3, "moe_intermediate_size": 12, "routed_scaling_factor": 1.5}
CASES |= {
    "glm4_moe": hf.Glm4MoeConfig(**GLM4_MOE, n_routed_experts=4, n_shared_experts=1),
    "glm4_moe norms, biases, groups": hf.Glm4MoeConfig(
        **GLM4_MOE,
        n_routed_experts=8,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        use_qk_norm=True,
        attention_bias=True,
        norm_topk_prob=False,
        first_k_dense_replace=2,
    ),
}


FULL, SLIDING = "full_attention", "sliding_attention"
NO_TOKENS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}

GEMMA = {**LLAMA_LIKE, **NO_TOKENS, "num_hidden_layers": 4, "head_dim": 12}


def rope(base: float, **more) -> dict:
    return {"rope_type": "default", "rope_theta": base, **more}


CASES |= {
    "qwen2": hf.Qwen2Config(**LLAMA_LIKE, rope_parameters=rope(1e6)),
    "qwen2 tied, some windows": hf.Qwen2Config(
        **{**LLAMA_LIKE, "num_hidden_layers": 3},
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        rope_parameters={**YARN, "rope_theta": 500.0},
    ),
    "smollm3": hf.SmolLM3Config(
        **{**LLAMA_LIKE, "num_hidden_layers": 4}, **NO_TOKENS, no_rope_layer_interval=3, rope_parameters=rope(5e4)
    ),
    "smollm3 biases, untied, windows": hf.SmolLM3Config(
        **{**LLAMA_LIKE, "num_hidden_layers": 4},
        **NO_TOKENS,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        no_rope_layers=[1, 0, 1, 0],
        layer_types=[FULL, FULL, SLIDING, SLIDING],
        use_sliding_window=True,
        sliding_window=5,
        rope_parameters=LLAMA3,
    ),
    "olmo3": hf.Olmo3Config(
        **{**LLAMA_LIKE, "num_hidden_layers": 4}, **NO_TOKENS, sliding_window=6, rope_parameters=rope(5e5)
    ),
    "olmo3 ropes of their own, biases": hf.Olmo3Config(
        **{**LLAMA_LIKE, "num_hidden_layers": 3, "num_key_value_heads": 4},
        **NO_TOKENS,
        attention_bias=True,
        sliding_window=4,
        max_position_embeddings=64,
        layer_types=[SLIDING, FULL, SLIDING],
        rope_parameters={FULL: {**YARN, "rope_theta": 300.0}, SLIDING: rope(70.0)},
    ),
    "granite": hf.GraniteConfig(
        **LLAMA_LIKE,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        attention_multiplier=0.0625,
        tie_word_embeddings=True,
    ),
    "granite biases": hf.GraniteConfig(
        **LLAMA_LIKE,
        attention_bias=True,
        mlp_bias=True,
        logits_scaling=3.0,
        attention_multiplier=0.2,
        rms_norm_eps=1e-3,
    ),
    "phi3": hf.Phi3Config(**LLAMA_LIKE, **NO_TOKENS, sliding_window=7),
    "phi3 partial, multi-head, tied": hf.Phi3Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 4},
        **NO_TOKENS,
        tie_word_embeddings=True,
        rope_parameters=rope(900.0, partial_rotary_factor=0.5),
    ),
    "glm4": hf.Glm4Config(**LLAMA_LIKE, **NO_TOKENS, head_dim=12, rope_parameters=rope(1e4, partial_rotary_factor=0.5)),
    "glm4 whole heads, no biases": hf.Glm4Config(
        **LLAMA_LIKE,
        **NO_TOKENS,
        head_dim=8,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters=rope(300.0, partial_rotary_factor=1.0),
    ),
    "gemma2": hf.Gemma2Config(**GEMMA, query_pre_attn_scalar=12, sliding_window=5),
    "gemma2 without caps, untied, biases": hf.Gemma2Config(
        **GEMMA,
        attention_bias=True,
        tie_word_embeddings=False,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        query_pre_attn_scalar=7,
        layer_types=[FULL, FULL, SLIDING, FULL],
        sliding_window=3,
        rope_parameters=rope(300.0),
    ),
    "gemma3": hf.Gemma3TextConfig(
        **GEMMA,
        query_pre_attn_scalar=12,
        sliding_window=5,
        layer_types=[SLIDING, SLIDING, FULL, SLIDING],
        rope_parameters={FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, SLIDING: rope(500.0)},
    ),
    "gemma3 with a cap": hf.Gemma3TextConfig(
        **GEMMA, final_logit_softcapping=9.0, sliding_window=4, hidden_activation="gelu"
    ),
}

GEMMA4 = {
    **{
        **GEMMA,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    },
    **{"sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING, FULL]},
}
GEMMA4_INPUTS = {
    **{"layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL], "num_hidden_layers": 5},
    "hidden_size_per_layer_input": 6,
}
CASES |= {
    "gemma4": hf.Gemma4TextConfig(**GEMMA4, attention_k_eq_v=True, final_logit_softcapping=9.0),
    "gemma4 experts": hf.Gemma4TextConfig(
        **{**GEMMA4, "layer_types": [SLIDING, FULL], "num_hidden_layers": 2},
        **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 12},
        attention_k_eq_v=True,
    ),
    "gemma4 inputs of each layer, shared keys": hf.Gemma4TextConfig(
        **{**GEMMA4, **GEMMA4_INPUTS},
        **{"vocab_size_per_layer_input": 61, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    ),
    "gemma4 values of their own, biases, untied": hf.Gemma4TextConfig(
        **{**GEMMA4, "layer_types": [FULL, SLIDING, SLIDING, FULL]},
        attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters={
            FULL: {"rope_type": "proportional", "factor": 2.0, "rope_theta": 300.0, "partial_rotary_factor": 0.5},
            SLIDING: rope(500.0),
        },
    ),
}

LATENT = {
    **{**TINY, "num_hidden_layers": 3, "num_key_value_heads": 4, "intermediate_size": 40},
    **{"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
    **{"moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
}
MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}
CASES |= {
    "deepseek_v3": hf.DeepseekV3Config(**LATENT, q_lora_rank=14, n_group=4, topk_group=2, rope_parameters=MSCALE),
    "deepseek_v3 biases, weights as they are, two shared": hf.DeepseekV3Config(
        **{**LATENT, "first_k_dense_replace": 0, "num_experts_per_tok": 3},
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        n_shared_experts=2,
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "deepseek_v2 groups": hf.DeepseekV2Config(
        **LATENT,
        q_lora_rank=10,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_parameters={**MSCALE, "mscale": 1.2},
    ),
    "deepseek_v2 greedy": hf.DeepseekV2Config(**LATENT, q_lora_rank=None, n_shared_experts=1, rope_parameters=YARN),
}


OSS = {**EXPERTS, "num_local_experts": 5, "head_dim": 12, "max_position_embeddings": 64}
CASES |= {
    "gpt_oss": hf.GptOssConfig(
        **OSS, sliding_window=5, swiglu_limit=0.4, rope_parameters={**YARN, "rope_theta": 150.0, "truncate": False}
    ),
    "gpt_oss without biases, windows first": hf.GptOssConfig(
        **{**OSS, "num_hidden_layers": 3, "num_experts_per_tok": 3},
        attention_bias=False,
        sliding_window=3,
        tie_word_embeddings=True,
        layer_types=[FULL, SLIDING, SLIDING],
        rope_parameters=rope(300.0),
    ),
}

CASES |= RECURRENT


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str):
    torch.manual_seed(0)
    config = copy.deepcopy(CASES[name])  # transformers notes a model's type in it, for the next one
    with wider():
        theirs = hf.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager", dtype=DOUBLE
        )
    # shared blocks have norms without residuals, which amplify rounding (theirs as ours) with the size of matrices
    compare(theirs, seed=sum(name.encode()), std=0.075 if name.startswith("zamba") else 0.15)
