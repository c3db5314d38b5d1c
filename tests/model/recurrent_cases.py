"""State spaces, RWKV and hybrids of transformers, tiny: cases of test_parity.py."""

from __future__ import annotations

import transformers as hf

from tests.model.parity import LLAMA_LIKE

STATE_SPACE = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
RECURRENT: dict[str, hf.PreTrainedConfig] = {
    "mamba": hf.MambaConfig(**STATE_SPACE, state_size=8),
    "mamba untied, biases": hf.MambaConfig(
        **STATE_SPACE,
        state_size=5,
        use_bias=True,
        use_conv_bias=False,
        conv_kernel=3,
        expand=3,
        time_step_rank=5,
        tie_word_embeddings=False,
        layer_norm_epsilon=1e-3,
    ),
    "mamba2 grouped": hf.Mamba2Config(**STATE_SPACE, state_size=8, n_groups=2, head_dim=8, num_heads=8, chunk_size=7),
    "mamba2 tied, biases, limits": hf.Mamba2Config(
        **STATE_SPACE,
        state_size=16,
        n_groups=4,
        head_dim=8,
        num_heads=12,
        expand=3,
        use_bias=True,
        use_conv_bias=False,
        tie_word_embeddings=True,
        time_step_limit=(0.5, 0.8),
        layer_norm_epsilon=1e-3,
    ),
    "mamba2 one group": hf.Mamba2Config(
        **STATE_SPACE, state_size=4, n_groups=1, head_dim=16, num_heads=4, conv_kernel=2
    ),
}

DELTA = {**LLAMA_LIKE, "num_hidden_layers": 4, "num_attention_heads": 4, "eos_token_id": 1, "pad_token_id": None}
RECURRENT |= {
    "olmo_hybrid": hf.OlmoHybridConfig(**DELTA, rope_parameters={"rope_type": "default", "rope_theta": None}),
    "olmo_hybrid grouped, rotary": hf.OlmoHybridConfig(
        **{**DELTA, "num_hidden_layers": 3},
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_conv_kernel_dim=3,
        linear_allow_neg_eigval=False,
        attention_bias=True,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        layer_types=["full_attention", "linear_attention", "linear_attention"],
    ),
}

QWEN_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
}
_QWEN_NEXT = {**LLAMA_LIKE, "num_hidden_layers": 4, "head_dim": 16, **QWEN_DELTA}
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_QWEN_EXPERTS["shared_expert_intermediate_size"] = 20
RECURRENT |= {
    "qwen3_next": hf.Qwen3NextConfig(**_QWEN_NEXT, **_QWEN_EXPERTS),
    "qwen3_next dense layers, biases": hf.Qwen3NextConfig(
        **{**_QWEN_NEXT, "num_hidden_layers": 3},
        **{**_QWEN_EXPERTS, "norm_topk_prob": False},
        linear_conv_kernel_dim=3,
        attention_bias=True,
        rms_norm_eps=1e-3,
        mlp_only_layers=[0],
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "qwen3_5_text": hf.Qwen3_5TextConfig(**_QWEN_NEXT, tie_word_embeddings=True),
    "qwen3_5_moe_text": hf.Qwen3_5MoeTextConfig(
        **{name: value for name, value in _QWEN_NEXT.items() if name != "intermediate_size"}, **_QWEN_EXPERTS
    ),
}

_KIMI = {
    **{**LLAMA_LIKE, "num_key_value_heads": 4, "num_hidden_layers": 4, "pad_token_id": None},
    **{"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"linear_head_dim": 8, "linear_num_heads": 4, "moe_intermediate_size": 12, "num_local_experts": 4},
    "num_experts_per_tok": 2,
}
_KIMI_LAYERS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
RECURRENT |= {
    "kimi_linear": hf.KimiLinearConfig(
        **_KIMI, layer_types=_KIMI_LAYERS, mlp_layer_types=["dense", "sparse", "sparse", "dense"]
    ),
    "kimi_linear compressed queries, groups": hf.KimiLinearConfig(
        **{**_KIMI, "num_local_experts": 8},
        q_lora_rank=12,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        linear_conv_kernel_dim=3,
        rms_norm_eps=1e-3,
        layer_types=_KIMI_LAYERS[::-1],
        mlp_layer_types=["sparse"] * 4,
    ),
}

HYBRID = {**STATE_SPACE, "num_attention_heads": 4, "pad_token_id": None, "mamba_d_state": 8}
PLAIN, SHARED = "linear_attention", "hybrid"
RECURRENT |= {
    "zamba2 one block": hf.Zamba2Config(
        **{**HYBRID, "num_hidden_layers": 3},
        layers_block_type=[PLAIN, SHARED, SHARED],
        n_mamba_heads=8,
        adapter_rank=3,
        use_mem_rope=True,
        use_shared_attention_adapter=True,
    ),
    "zamba2 two blocks in turn, biases": hf.Zamba2Config(
        **{**HYBRID, "num_hidden_layers": 4},
        layers_block_type=[SHARED, PLAIN, SHARED, SHARED],
        n_mamba_heads=4,
        mamba_ngroups=2,
        num_mem_blocks=2,
        adapter_rank=5,
        time_step_min=0.2,
        add_bias_linear=True,
        intermediate_size=48,
        hidden_act="silu",
        num_key_value_heads=2,
    ),
    "zamba": hf.ZambaConfig(
        **{**HYBRID, "num_hidden_layers": 3},
        layers_block_type=[PLAIN, SHARED, SHARED],
        num_key_value_heads=4,
        intermediate_size=48,
    ),
    "zamba four heads, biases": hf.ZambaConfig(
        **{**HYBRID, "num_hidden_layers": 4},
        layers_block_type=[SHARED, PLAIN, SHARED, PLAIN],
        n_mamba_heads=4,
        num_key_value_heads=2,
        attention_head_dim=12,
        mamba_dt_rank=3,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        intermediate_size=40,
        hidden_act="silu",
        rms_norm_eps=1e-3,
    ),
    "jamba": hf.JambaConfig(
        **{**HYBRID, "num_hidden_layers": 4},
        num_key_value_heads=2,
        intermediate_size=20,
        num_experts=4,
        attn_layer_period=3,
        attn_layer_offset=1,
    ),
    "jamba tied, biases": hf.JambaConfig(
        **{**HYBRID, "num_hidden_layers": 3},
        num_key_value_heads=4,
        intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=3,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=3,
        expert_layer_offset=0,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mamba_dt_rank=3,
        tie_word_embeddings=True,
        rms_norm_eps=1e-3,
    ),
    "bamba": hf.BambaConfig(
        **{**HYBRID, "num_hidden_layers": 3},
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_n_groups=2,
        num_key_value_heads=2,
        intermediate_size=40,
        time_step_limit=(0.3, 0.9),
    ),
    "bamba with biases": hf.BambaConfig(
        **HYBRID,
        attn_layer_indices=[0],
        mamba_n_heads=4,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=4,
        intermediate_size=40,
        tie_word_embeddings=True,
        rms_norm_eps=1e-3,
    ),
}

ZAYA = {
    **STATE_SPACE,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 3,
    "moe_intermediate_size": 12,
    "router_hidden_size": 8,
    "bos_token_id": None,
    "eos_token_id": 1,
}
RECURRENT |= {
    "zaya": hf.ZayaConfig(**ZAYA),
    "zaya untied, biases, some windows": hf.ZayaConfig(
        **{**ZAYA, "num_attention_heads": 6},
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
        sliding_window=6,
        cca_time0=3,
        attention_bias=True,
        lm_head_bias=True,
        tie_word_embeddings=False,
        hidden_act="gelu",
        rms_norm_eps=1e-3,
        rope_parameters={
            "hybrid": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 1.0},
            "hybrid_sliding": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
        },
    ),
}

RWKV = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "rescale_every": 0}
RECURRENT |= {
    "rwkv": hf.RwkvConfig(**RWKV),
    "rwkv narrow, tied": hf.RwkvConfig(**RWKV, intermediate_size=40, tie_word_embeddings=True),
}

STACK = {
    **{"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
    **{"intermediate_size": 40, "mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2},
}
RECURRENT |= {
    "nemotron_h": hf.NemotronHConfig(**STACK, hybrid_override_pattern="M-*-M", chunk_size=7, time_step_min=0.4),
    "nemotron_h with experts, biases": hf.NemotronHConfig(
        **{**STACK, "mamba_num_heads": 8},
        hybrid_override_pattern="M*E-E",
        use_bias=True,
        use_conv_bias=False,
        mlp_bias=False,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=20,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "nemotron_h with latent experts": hf.NemotronHConfig(
        **STACK,
        hybrid_override_pattern="ME*E",
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=20,
        moe_latent_size=16,
    ),
}

SIDE_BY_SIDE = {
    **LLAMA_LIKE,
    "pad_token_id": None,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_d_state": 8,
    "mamba_chunk_size": 7,
}
MULTIPLIERS = {
    **{"embedding_multiplier": 5.7, "lm_head_multiplier": 0.4, "key_multiplier": 0.39, "mlp_multipliers": [0.88, 0.59]},
    **{"attention_in_multiplier": 0.7, "attention_out_multiplier": 0.94, "ssm_in_multiplier": 1.25},
    **{"ssm_out_multiplier": 0.24, "ssm_multipliers": [0.35, 0.25, 0.3, 0.5, 0.8]},
}
RECURRENT |= {
    "falcon_h1": hf.FalconH1Config(**SIDE_BY_SIDE, **MULTIPLIERS, head_dim=12, mamba_rms_norm=False),
    "falcon_h1 norm after its gate, tied, biases": hf.FalconH1Config(
        **{**SIDE_BY_SIDE, "mamba_d_ssm": None, "mamba_n_heads": 8},
        **MULTIPLIERS,
        mamba_expand=3,
        mamba_n_groups=2,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_conv_bias=False,
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
        projectors_bias=True,
        tie_word_embeddings=True,
    ),
    "falcon_h1 norm before its gate, limits": hf.FalconH1Config(
        **SIDE_BY_SIDE,
        mamba_n_groups=3,
        mamba_d_conv=3,
        mamba_rms_norm=True,
        rms_norm_eps=1e-3,
        time_step_limit=(0.5, 0.8),
        rope_parameters={"rope_type": "default", "rope_theta": 1e11},
    ),
}

MINIMAX = {**LLAMA_LIKE, "num_hidden_layers": 4, "num_experts_per_tok": 2, "num_local_experts": 4}
RECURRENT |= {
    "minimax": hf.MiniMaxConfig(
        **{**MINIMAX, "intermediate_size": 20},
        block_size=7,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        **{f"{each}_alpha_factor": 3.5 for each in ("full_attn", "linear_attn", "mlp")},
    ),
    "minimax wide heads, branches multiplied": hf.MiniMaxConfig(
        **{**MINIMAX, "intermediate_size": 12, "head_dim": 12, "num_hidden_layers": 2},
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        layer_types=["full_attention", "linear_attention"],
        **{f"{each}_beta_factor": 0.7 for each in ("full_attn", "linear_attn", "mlp")},
    ),
}
