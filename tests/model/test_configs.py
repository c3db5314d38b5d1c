"""Every configuration under configs/ resolves, builds on the meta device, and has its published size."""

from __future__ import annotations

import re

import pytest
import torch
import transformers as hf

from megatron.checkpoint.hf.config import hf_config
from megatron.config import load
from megatron.model.costs.describe import totals
from megatron.model.stack import build_model
from tests.model.parity import named
from tests.paths import ROOT
from tests.selection import toured

CONFIGS = ROOT / "configs"
# Published numbers of parameters (Pythia: with the padded vocabulary of the released weights).
PUBLISHED = {
    "pythia/14m": 14_067_712,
    "pythia/31m": 30_494_720,
    "pythia/70m": 70_426_624,
    "pythia/160m": 162_322_944,
    "pythia/410m": 405_334_016,
    "pythia/1b": 1_011_781_632,
    "pythia/1.4b": 1_414_647_808,
    "pythia/2.8b": 2_775_208_960,
    "pythia/6.9b": 6_857_302_016,
    "pythia/12b": 11_846_072_320,
    "gpt_neox/20b": 20_554_567_680,
    "llama/llama2_7b": 6_738_415_616,
    "llama/llama2_13b": 13_015_864_320,
    "llama/llama2_70b": 68_976_648_192,
    "llama/llama3_8b": 8_030_261_248,
    "llama/llama3_70b": 70_553_706_496,
    "llama/llama3.2_1b": 1_235_814_400,
    "llama/llama3.2_3b": 3_212_749_824,
    "mistral/7b": 7_241_732_096,
    "qwen3/0.6b": 596_049_920,
    "qwen3/1.7b": 1_720_574_976,
    "qwen3/4b": 4_022_468_096,
    "qwen3/8b": 8_190_735_360,
    "qwen3/14b": 14_768_307_200,
    "qwen3/32b": 32_762_123_264,
    "qwen2/2.5_0.5b": 494_032_768,
    "qwen2/2.5_1.5b": 1_543_714_304,
    "qwen2/2.5_7b": 7_615_616_512,
    "smollm3/3b": 3_075_098_624,
    "olmo3/7b": 7_298_011_136,
    "granite/3.1_8b": 8_170_848_256,
    "phi3/mini_4k": 3_821_079_552,
    "glm4/9b": 9_400_279_040,
    "gemma2/2b": 2_614_341_888,
    "gemma3/1b": 999_885_952,
    "gemma4/31b": 30_697_345_280,
    "gemma4/e2b": 4_628_569_344,
    "gemma4/e4b": 7_463_013_376,
    "olmo2/7b": 7_298_617_344,
    "olmo2/13b": 13_716_198_400,
    "olmo_hybrid/7b": 7_430_870_688,
    "qwen3_5/9b": 8_953_803_264,
    "gpt2/small": 124_439_808,
    "gpt2/medium": 354_823_168,
    "gpt2/large": 774_030_080,
    "gpt2/xl": 1_557_611_200,
    "mamba/130m": 129_135_360,
    "mamba/370m": 371_516_416,
    "mamba/790m": 793_204_224,
    "mamba/1.4b": 1_372_178_432,
    "mamba/2.8b": 2_768_345_600,
    "mamba2/130m": 128_989_632,
    "mamba2/370m": 368_346_624,
    "mamba2/780m": 780_161_280,
    "mamba2/1.3b": 1_343_757_312,
    "mamba2/2.7b": 2_702_599_680,
    "zamba/7b": 7_232_490_496,
    "zamba2/1.2b": 1_215_064_704,
    "zamba2/2.7b": 2_662_214_560,
    "zamba2/7b": 7_356_749_648,
    "nemotron_h/8b": 8_100_852_736,
    "falcon_h1/0.5b": 521_411_104,
    "gemma/7b": 8_537_680_896,
    "gptj/6b": 6_050_882_784,
    "phi/1.5b": 1_418_270_720,
    "starcoder2/3b": 3_030_371_328,
    "stablelm/3b": 2_795_443_200,
    "cohere/command_r": 34_980_831_232,
    "ernie4_5/0.3b": 360_748_032,
    "olmo/7b": 6_888_095_744,
    "apertus/8b": 8_053_338_176,
    "seed_oss/36b": 36_151_104_512,
    "arcee/4.5b": 4_619_184_640,
    "cohere2/command_r7b": 8_028_033_024,
}
NON_EMBEDDING = {  # of the Pythia paper's table
    "pythia/70m": 18_915_328,
    "pythia/160m": 85_056_000,
    "pythia/410m": 302_311_424,
    "pythia/1b": 805_736_448,
    "pythia/1.4b": 1_208_602_624,
    "pythia/2.8b": 2_517_652_480,
    "pythia/6.9b": 6_444_163_072,
    "pythia/12b": 11_327_027_200,
}


def neox(layers, hidden, heads, vocab):
    return hf.GPTNeoXConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
    )


def llama(kind, layers, hidden, heads, kv, width, vocab, tied=False, **more):
    return kind(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=width,
        tie_word_embeddings=tied,
        **more,
    )


def gpt2(layers, hidden, heads):
    return hf.GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads)


def mamba(layers, hidden):
    return hf.MambaConfig(num_hidden_layers=layers, hidden_size=hidden)


def mamba2(layers, hidden):
    return hf.Mamba2Config(
        vocab_size=50288,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_heads=hidden // 32,
        n_groups=1,
        tie_word_embeddings=True,
    )


def zamba2(layers, hidden, calls, blocks, **more):
    kinds = ["hybrid" if layer in calls else "linear_attention" for layer in range(layers)]
    return hf.Zamba2Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        layers_block_type=kinds,
        num_mem_blocks=blocks,
        n_mamba_heads=hidden // 32,
        **{"mamba_d_state": 64, **more},
    )


# The shapes, written down a second time for transformers.
THEIRS = {
    "pythia/14m": neox(6, 128, 4, 50304),
    "pythia/31m": neox(6, 256, 8, 50304),
    "pythia/70m": neox(6, 512, 8, 50304),
    "pythia/160m": neox(12, 768, 12, 50304),
    "pythia/410m": neox(24, 1024, 16, 50304),
    "pythia/1b": neox(16, 2048, 8, 50304),
    "pythia/1.4b": neox(24, 2048, 16, 50304),
    "pythia/2.8b": neox(32, 2560, 32, 50304),
    "pythia/6.9b": neox(32, 4096, 32, 50432),
    "pythia/12b": neox(36, 5120, 40, 50688),
    "gpt_neox/20b": neox(44, 6144, 64, 50432),
    "llama/llama2_7b": llama(hf.LlamaConfig, 32, 4096, 32, 32, 11008, 32000),
    "llama/llama2_13b": llama(hf.LlamaConfig, 40, 5120, 40, 40, 13824, 32000),
    "llama/llama2_70b": llama(hf.LlamaConfig, 80, 8192, 64, 8, 28672, 32000),
    "llama/llama3_8b": llama(hf.LlamaConfig, 32, 4096, 32, 8, 14336, 128256),
    "llama/llama3_70b": llama(hf.LlamaConfig, 80, 8192, 64, 8, 28672, 128256),
    "llama/llama3.2_1b": llama(hf.LlamaConfig, 16, 2048, 32, 8, 8192, 128256, True),
    "llama/llama3.2_3b": llama(hf.LlamaConfig, 28, 3072, 24, 8, 8192, 128256, True),
    "mistral/7b": llama(hf.MistralConfig, 32, 4096, 32, 8, 14336, 32000),
    "qwen3/0.6b": llama(hf.Qwen3Config, 28, 1024, 16, 8, 3072, 151936, True),
    "qwen3/1.7b": llama(hf.Qwen3Config, 28, 2048, 16, 8, 6144, 151936, True),
    "qwen3/4b": llama(hf.Qwen3Config, 36, 2560, 32, 8, 9728, 151936, True),
    "qwen3/8b": llama(hf.Qwen3Config, 36, 4096, 32, 8, 12288, 151936),
    "qwen3/14b": llama(hf.Qwen3Config, 40, 5120, 40, 8, 17408, 151936),
    "qwen3/32b": llama(hf.Qwen3Config, 64, 5120, 64, 8, 25600, 151936),
    "qwen2/2.5_0.5b": llama(hf.Qwen2Config, 24, 896, 14, 2, 4864, 151936, True),
    "qwen2/2.5_1.5b": llama(hf.Qwen2Config, 28, 1536, 12, 2, 8960, 151936, True),
    "qwen2/2.5_7b": llama(hf.Qwen2Config, 28, 3584, 28, 4, 18944, 152064),
    "smollm3/3b": llama(hf.SmolLM3Config, 36, 2048, 16, 4, 11008, 128256, True),
    "olmo3/7b": llama(hf.Olmo3Config, 32, 4096, 32, 32, 11008, 100278),
    "granite/3.1_8b": llama(hf.GraniteConfig, 40, 4096, 32, 8, 12800, 49155, True),
    "phi3/mini_4k": llama(hf.Phi3Config, 32, 3072, 32, 32, 8192, 32064, sliding_window=2047),
    "glm4/9b": llama(hf.Glm4Config, 40, 4096, 32, 2, 13696, 151552, head_dim=128),
    "gemma2/2b": llama(hf.Gemma2Config, 26, 2304, 8, 4, 9216, 256000, True, head_dim=256),
    "gemma3/1b": llama(hf.Gemma3TextConfig, 26, 1152, 4, 1, 6912, 262144, True, head_dim=256),
    "gemma4/31b": llama(
        hf.Gemma4TextConfig,
        *(60, 5376, 32, 16, 21504, 262144, True),
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
    ),
    "gemma4/e2b": llama(
        hf.Gemma4TextConfig,
        *(35, 1536, 8, 1, 6144, 262144, True),
        layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
    ),
    "gemma4/e4b": llama(hf.Gemma4TextConfig, 42, 2560, 8, 2, 10240, 262144, True, num_kv_shared_layers=18),
    "olmo2/7b": llama(hf.Olmo2Config, 32, 4096, 32, 32, 11008, 100352),
    "olmo2/13b": llama(hf.Olmo2Config, 40, 5120, 40, 40, 13824, 100352),
    "olmo_hybrid/7b": hf.OlmoHybridConfig(),
    "qwen3_5/9b": hf.Qwen3_5TextConfig(),
    "gpt2/small": gpt2(12, 768, 12),
    "gpt2/medium": gpt2(24, 1024, 16),
    "gpt2/large": gpt2(36, 1280, 20),
    "gpt2/xl": gpt2(48, 1600, 25),
    "mamba/130m": mamba(24, 768),
    "mamba/370m": mamba(48, 1024),
    "mamba/790m": mamba(48, 1536),
    "mamba/1.4b": mamba(48, 2048),
    "mamba/2.8b": mamba(64, 2560),
    "mamba2/130m": mamba2(24, 768),
    "mamba2/370m": mamba2(48, 1024),
    "mamba2/780m": mamba2(48, 1536),
    "mamba2/1.3b": mamba2(48, 2048),
    "mamba2/2.7b": mamba2(64, 2560),
    "zamba/7b": hf.ZambaConfig(),
    "zamba2/1.2b": zamba2(
        38, 2048, range(5, 38, 6), 1, use_mem_rope=True, use_shared_attention_adapter=True, mamba_d_state=128
    ),
    "zamba2/2.7b": zamba2(54, 2560, (*range(6, 43, 6), 47, 51), 2),
    "zamba2/7b": zamba2(81, 3584, (6, *range(11, 78, 6)), 2, use_mem_rope=True, mamba_ngroups=2),
}
THEIRS |= {  # the sizes that their classes have by default
    "gemma/7b": hf.GemmaConfig(),
    "gptj/6b": hf.GPTJConfig(),
    "phi/1.5b": hf.PhiConfig(),
    "starcoder2/3b": hf.Starcoder2Config(bos_token_id=0, eos_token_id=0),
    "stablelm/3b": hf.StableLmConfig(),
    "cohere/command_r": hf.CohereConfig(),
    "ernie4_5/0.3b": hf.Ernie4_5Config(),
    "olmo/7b": hf.OlmoConfig(),
    "apertus/8b": hf.ApertusConfig(num_key_value_heads=8, intermediate_size=21504),
    "seed_oss/36b": hf.SeedOssConfig(hidden_size=5120),
    "arcee/4.5b": hf.ArceeConfig(
        num_hidden_layers=36, num_attention_heads=20, num_key_value_heads=4, vocab_size=128004
    ),
    "cohere2/command_r7b": llama(hf.Cohere2Config, 32, 4096, 32, 8, 14336, 256000, True),
}
THEIRS["nemotron_h/8b"] = hf.NemotronHConfig(
    hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
)
THEIRS["falcon_h1/0.5b"] = hf.FalconH1Config(
    vocab_size=32784,
    hidden_size=1024,
    num_hidden_layers=36,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=2048,
    mamba_d_ssm=1536,
    mamba_n_heads=24,
    mamba_d_state=128,
)


def files(folder: str = "*") -> list[str]:
    """Names of the configurations that are whole models: no other file extends them."""
    bases = set()
    paths = sorted(path for path in CONFIGS.glob(f"{folder}/*.yml"))
    for path in CONFIGS.glob("*/*.yml"):
        for base in re.findall(r"^extends: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            bases.add((path.parent / base).resolve())
    return [str(path.relative_to(CONFIGS).with_suffix("")) for path in paths if path.resolve() not in bases]


OURS_ALONE = {  # no class of transformers computes them
    "test/tiny_lightning",
    "test/tiny_moe",
    "test/tiny_blackmamba",
    "test/tiny_cca",
    "test/tiny_rwkv5",
    "test/tiny_rwkv6",
    "test/tiny_rwkv7",
    "test/tiny_rwkv7_hybrid",
}
TINY, LAYOUTS = files("test"), [path.stem for path in sorted((CONFIGS / "layouts").glob("*.yml"))]


def settings(name: str, *more: str, ranks: int = 1, overrides: tuple[str, ...] = (), inputs: bool = False):
    paths = [CONFIGS / f"{each}.yml" for each in (name, *more)]
    return load(paths, overrides, ranks=ranks, check_inputs=inputs)


def test_every_published_file_is_tested():
    published = {name for name in files() if name.split("/")[0] in {each.split("/")[0] for each in PUBLISHED}}
    assert published == set(PUBLISHED) == set(THEIRS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str):
    """The number of the paper, of our model, of our counts, and of transformers' model. No warning of any rule."""
    resolved = settings(name)
    assert not resolved.warnings
    counts = totals(resolved.config)
    model = build_model(resolved.config, device="meta")
    with torch.device("meta"):
        theirs = hf.AutoModelForCausalLM.from_config(THEIRS[name])
    assert (
        PUBLISHED[name]
        == counts.parameters
        == sum(p.numel() for p in model.parameters())
        == sum(p.numel() for p in theirs.parameters())
    )
    if name in NON_EMBEDDING:
        assert counts.non_embedding_parameters == NON_EMBEDDING[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_open_in_transformers(name: str):
    """The configuration that export would write is of the right class, with the right options and shapes."""
    architecture, config = hf_config(settings(name).config, THEIRS[name].model_type)
    for each in (config, THEIRS[name]):
        each.allow_global_per_layer_attribute_access = True  # heads that differ by layer have a second set of values
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings"):
        assert getattr(config, key) == getattr(THEIRS[name], key), key
    for key in (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        *("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp"),
        "use_parallel_residual",
        "layers_block_type",
        "num_mem_blocks",
        "adapter_rank",
        "use_shared_attention_adapter",
        "use_mem_rope",
        "mamba_d_state",
        "mamba_headdim",
        "mamba_ngroups",
        "n_mamba_heads",
        "mamba_dt_rank",
        "attention_head_dim",
        "state_size",
        "conv_kernel",
        "time_step_rank",
        "num_heads",
        "n_groups",
        "expand",
    ):
        if getattr(THEIRS[name], key, None) is not None:
            assert getattr(config, key) == getattr(THEIRS[name], key), key


def test_pythia_recipe():
    config = settings("pythia/70m").config
    assert (
        config.training.steps * config.training.global_batch_size * config.training.sequence_length == 299_892_736_000
    )
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.weight_decay) == (1e-3, (0.9, 0.95), 0.1)
    assert config.checkpoint.log_spaced and config.checkpoint.every == 1000
    rates = {name.split("/")[1]: settings(name).config.optimizer.lr for name in PUBLISHED if name.startswith("pythia")}
    assert rates == {
        "14m": 1e-3,
        "31m": 1e-3,
        "70m": 1e-3,
        "160m": 6e-4,
        "410m": 3e-4,
        "1b": 2.5e-4,
        "1.4b": 2e-4,
        "2.8b": 1.6e-4,
        "6.9b": 1.2e-4,
        "12b": 1.2e-4,
    }
    schemes = {name: settings(f"pythia/{name}").config.model.init.output for name in rates}
    assert {name for name, scheme in schemes.items() if scheme != "wang_init"} == {"6.9b", "12b"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_only_data_are_missing(name: str):
    """With something to read, a start on one CPU is refused for nothing."""
    settings(
        name,
        "layouts/cpu",
        overrides=("data.synthetic=copy", "tokenizer.type=none", "tokenizer.path=null"),
        inputs=True,
    )


def test_the_hybrid_is_a_bamba():
    resolved = settings("hybrid/7b")
    architecture, config = hf_config(resolved.config)
    with torch.device("meta"):
        theirs = hf.AutoModelForCausalLM.from_config(config)
    assert architecture.name == "bamba" and config.attn_layer_indices == [4, 12, 20, 28]
    assert totals(resolved.config).parameters == sum(p.numel() for p in theirs.parameters()) == 6_721_214_976


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str):
    for name in ("pythia/6.9b", "llama/llama3_8b"):
        config = settings(
            name, f"layouts/{layout}", ranks=32, overrides=("launch.device=cuda",) if layout != "cpu" else ()
        ).config
        assert 32 % (config.parallel.tensor * config.parallel.pipeline) == 0


@pytest.mark.parametrize("name", toured(TINY))
def test_tiny_models_learn_in_seconds(name: str):
    """A few thousand parameters, nothing to read. Plain gradient descent on one batch brings the loss down."""
    config = settings(name, inputs=True).config
    model = build_model(config)
    assert sum(p.numel() for p in model.parameters()) == totals(config).parameters < 40_000
    if name not in OURS_ALONE:
        own = name.split("tiny_")[1]
        assert hf_config(config)[0].name == {
            "neox": "gpt_neox",
            "rwkv4": "rwkv",
            "gated_delta": "olmo_hybrid",
            "gemma4": "gemma4_text",
        }.get(own, own)
    tokens = torch.randint(
        config.model.vocab_size, (4, config.training.sequence_length + 1), generator=torch.Generator().manual_seed(0)
    )
    optimizer = torch.optim.Adam(named(model).values(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss, _ = model(tokens[:, :-1], tokens[:, 1:], torch.full(tokens[:, 1:].shape, 1 / tokens[:, 1:].numel()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
