"""Published mixtures of experts: all parameters, and the parameters that a token uses."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from megatron.checkpoint.hf.config import hf_config
from megatron.config.variants import options_of
from megatron.model.costs.describe import layers, totals
from megatron.model.stack import build_model
from tests.model.test_configs import settings

# Parameters, and of them active ones: published numbers or, to the last digit, numbers of the released shapes.
SIZES = {
    "mixtral/8x7b": (46_702_792_704, 12_879_925_248),
    "olmoe/1b_7b": (6_919_161_856, 1_282_017_280),
    "qwen3_moe/30b_a3b": (30_532_122_624, 3_353_032_704),
    "qwen2_moe/1.5_a2.7b": (14_315_784_192, 2_689_173_504),
    "deepseek_moe/16b": (16_375_728_128, 2_828_650_496),
    "blackmamba/340m_1.5b": (1_458_462_072, 343_694_712),
    "blackmamba/630m_2.8b": (2_783_213_584, 628_770_832),
    "zaya1/8b": (8_840_488_784, 1_290_741_584),
    "jamba/52b": (51_570_323_328, 12_110_311_296),
    "deepseek_v2/lite": (15_706_484_224, 2_661_150_208),
    "deepseek_v3/671b": (671_026_404_352, 37_552_282_624),
    "gpt_oss/20b": (20_914_757_184, 4_187_440_704),
    "qwen3_next/80b_a3b": (79_674_391_296, 3_874_929_408),
    "kimi_linear/48b_a3b": (49_122_675_072, 3_484_453_248),
    "deepseek_v32/671b": (671_877_929_216, 38_403_807_488),
    "deepseek_v4/284b_a13b": (284_332_230_231, 13_799_622_231),
    "gemma4_moe/26b_a4b": (25_233_141_760, 3_822_530_560),
    "glm5/744b_a40b": (743_911_199_232, 41_784_709_632),
    "glm4_moe/4.7_flash": (29_943_390_976, 3_896_763_136),
    "minimax_m2/230b_a10b": (228_689_748_992, 11_030_537_216),
    "minimax/01_456b_a46b": (456_089_655_296, 48_403_306_496),
}
LARGE = {"num_key_value_heads": 8, "num_attention_heads": 32, "hidden_size": 4096, "intermediate_size": 14336}
THEIRS = {
    "mixtral/8x7b": hf.MixtralConfig(
        **LARGE, vocab_size=32000, num_hidden_layers=32, num_local_experts=8, num_experts_per_tok=2
    ),
    "olmoe/1b_7b": hf.OlmoeConfig(
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
    ),
    "qwen3_moe/30b_a3b": hf.Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    "qwen2_moe/1.5_a2.7b": hf.Qwen2MoeConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "zaya1/8b": hf.ZayaConfig(),
    "jamba/52b": hf.JambaConfig(),
    "deepseek_v2/lite": hf.DeepseekV2Config(
        hidden_size=2048,
        num_hidden_layers=27,
        num_attention_heads=16,
        q_lora_rank=None,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        num_experts_per_tok=6,
    ),
    "deepseek_v3/671b": hf.DeepseekV3Config(),
    "gpt_oss/20b": hf.GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "qwen3_next/80b_a3b": hf.Qwen3NextConfig(),
    "kimi_linear/48b_a3b": hf.KimiLinearConfig(
        linear_attn_config={
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        }
    ),
    "deepseek_v32/671b": hf.DeepseekV32Config(),
    "deepseek_v4/284b_a13b": hf.DeepseekV4Config(
        compress_ratios=[0, 0, *[4, 128] * 20, 4],
        rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    ),
    "gemma4_moe/26b_a4b": hf.Gemma4TextConfig(
        **{"hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"num_global_key_value_heads": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
        **{"intermediate_size": 2112, "sliding_window": 1024, "final_logit_softcapping": 30.0},
        **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    ),
    "glm5/744b_a40b": hf.GlmMoeDsaConfig(),
    "glm4_moe/4.7_flash": hf.Glm4MoeLiteConfig(),
    "minimax_m2/230b_a10b": hf.MiniMaxM2Config(),
    "minimax/01_456b_a46b": hf.MiniMaxConfig(
        hidden_size=6144,
        num_hidden_layers=80,
        num_attention_heads=64,
        head_dim=128,
        intermediate_size=9216,
        num_local_experts=32,
        vocab_size=200064,
        layer_types=[*["linear_attention"] * 7, "full_attention"] * 10,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str):
    resolved = settings(name)
    assert not resolved.warnings
    counts, model = totals(resolved.config), build_model(resolved.config, device="meta")
    assert (counts.parameters, counts.active_parameters) == SIZES[name]
    assert counts.parameters == sum(p.numel() for p in model.parameters())
    moe = resolved.config.model.moe
    experts = {p.logical.name: p.numel() for p in model.parameters() if ".experts." in p.logical.name}
    assert (
        counts.parameters - counts.active_parameters == sum(experts.values()) * (moe.experts - moe.top_k) // moe.experts
    )
    # a multiply-add per active parameter in a matrix, and attention's or the scan's own
    matrices = counts.active_parameters - counts.embedding_parameters
    own = sum(row.counts.flops for row in layers(resolved.config)) - 2 * resolved.config.model.vocab_size * (
        resolved.config.model.hidden_size
    )
    assert 0.98 < own / (2 * matrices + attention(resolved.config)) < 1.03


def attention(config) -> int:
    """FLOPs per token of attention's products with keys and values, and of the gated delta rule (docs/models.md)."""
    total = 0
    for block in config.model.blocks:
        if block.mixer and block.mixer.name in ("attention", "cca", "mla", "dsa"):
            own, latent = options_of(config.model, block.mixer), block.mixer.name in ("mla", "dsa")
            width = (own.nope_dim + own.rope_dim + own.value_dim) / 2 if latent else own.head_dim
            seen = min(getattr(own, "window", None) or 2**30, config.training.sequence_length)
            total += 4 * seen * own.heads * width
            total += 2 * seen * own.index_heads * (own.index_dim + 1) if block.mixer.name == "dsa" else 0
        if block.mixer and block.mixer.name == "csa":
            own, length = options_of(config.model, block.mixer), config.training.sequence_length
            entries = length // own.rate if own.rate else 0
            total += 4 * (own.window + entries) * own.heads * own.head_dim
            total += 2 * entries * own.index_heads * (own.index_dim + 1) if own.indexed else 0
        if block.mixer and block.mixer.name == "lightning":
            own = options_of(config.model, block.mixer)
            total += 4 * own.heads * own.head_dim * (own.chunk + own.head_dim)
        if block.mixer and block.mixer.name == "gated_delta":
            own = options_of(config.model, block.mixer)
            keys, values, state = (
                own.heads * own.key_dim,
                own.heads * own.value_dim,
                own.heads * own.key_dim * own.value_dim,
            )
            overlaps = 2 * own.key_heads * own.key_dim * own.chunk if own.decay == "head" else keys * (own.chunk - 16)
            total += 2 * (overlaps + own.chunk * (keys + 2 * values) + 3 * state)
    return total


@pytest.mark.parametrize("name", THEIRS)
def test_transformers_agrees(name: str):
    with torch.device("meta"):
        theirs = hf.AutoModelForCausalLM.from_config(THEIRS[name])
    assert sum(p.numel() for p in theirs.parameters()) == SIZES[name][0]
    # by name, where two architectures compute the same (GLM's and DeepSeek's)
    _, written = hf_config(settings(name).config, THEIRS[name].model_type)
    for each in (written, THEIRS[name]):
        each.allow_global_per_layer_attribute_access = True  # heads that differ by layer have a second set of values
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "moe_intermediate_size",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "top_k_experts",
        "norm_topk_prob",
        "head_dim",
        "router_hidden_size",
        "cca_time0",
        "cca_time1",
        "tie_word_embeddings",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "n_group",
        "topk_group",
        "n_shared_experts",
        "first_k_dense_replace",
        "routed_scaling_factor",
        "layer_types",
        "sliding_window",
        "swiglu_limit",
        "attn_layer_period",
        "attn_layer_offset",
        "expert_layer_period",
        "expert_layer_offset",
        "mamba_dt_rank",
    ):
        if getattr(THEIRS[name], key, None) is not None and (key, name.split("_")[0][:4]) != (
            "intermediate_size",
            "qwen",
        ):
            assert getattr(written, key) == getattr(THEIRS[name], key), key


@pytest.mark.parametrize("name", SIZES)
def test_only_data_are_missing(name: str):
    """With something to read, a start on one CPU is refused for nothing."""
    settings(
        name,
        "layouts/cpu",
        overrides=("data.synthetic=copy", "tokenizer.type=none", "tokenizer.path=null"),
        inputs=True,
    )
