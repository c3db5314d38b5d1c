"""Exchange with Hugging Face: round trips are bitwise, what does not fit is named."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from megatron.checkpoint.format.errors import CheckpointError
from megatron.checkpoint.hf import convert
from megatron.checkpoint.hf.config import architecture_of, hf_config, model_values
from megatron.config import resolve
from megatron.model.stack import build_model
from tests.float64 import FP32
from tests.model.parity import LLAMA_LIKE, TINY, named, randomise, relative, settings_of, stored, twin
from tests.model.test_parity import CASES


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str, tmp_path):
    """Theirs -> ours -> a new configuration and model of theirs: the same weights, bit by bit, and the same logits."""
    torch.manual_seed(0)
    theirs = hf.AutoModelForCausalLM.from_config(CASES[name]).eval()
    randomise(theirs, 7)
    model, steps, _ = twin(theirs)
    ours = {key: parameter.detach() for key, parameter in stored(model).items()}

    architecture, config = hf_config(settings_of(theirs.config), theirs.config.model_type)
    assert architecture is architecture_of(theirs.config)
    theirs.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    # transformers saves the MLPs of Kimi Linear by the name of its experts
    disk = {architecture.canonical(key): each for key, each in saved.items() if not architecture.is_buffer(key)}
    disk = with_own_widths(disk)
    written = dict(convert.to_hf(steps, ours.__getitem__))
    assert set(written) == set(disk)
    assert all(written[key].equal(disk[key]) and written[key].is_contiguous() for key in disk)

    again = loaded(config, architecture, written, tmp_path)
    tokens = torch.randint(CASES[name].vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    assert relative(again(tokens).logits, theirs(tokens).logits) < FP32

    for source in (written, saved):
        back = dict(convert.from_hf(architecture, steps, source, source.__getitem__))
        assert set(back) == set(ours) and all(back[key].equal(ours[key]) for key in ours)


def test_keys_that_no_layer_reads_are_left_out():
    """Published files of Gemma 4 have keys and values of layers that read earlier ones."""
    theirs = hf.AutoModelForCausalLM.from_config(CASES["gemma4 inputs of each layer, shared keys"])
    model, steps, state = twin(theirs)
    architecture, attention = architecture_of(theirs.config), "model.layers.4.self_attn"
    idle = {f"{attention}.{name}.weight": torch.zeros(2) for name in ("k_proj", "v_proj", "k_norm")}

    def read(tensors: dict[str, torch.Tensor]) -> set[str]:
        return {name for name, _ in convert.from_hf(architecture, steps, tensors, tensors.__getitem__)}

    assert read({**state, **idle}) == set(stored(model))
    with pytest.raises(CheckpointError, match=f"left over: {attention}.v_norm.weight"):
        read({**state, f"{attention}.v_norm.weight": torch.zeros(2)})
    needed = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(CheckpointError, match=f"missing: {needed}"):
        read({name: each for name, each in state.items() if name != needed})


def with_own_widths(disk: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers saves the convolution of queries, keys and values in three equal parts, published files each in its
    width. Both are read. The latter is what we write."""
    for name in [name for name in disk if name.endswith("q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{each}_conv1d") for each in "qkv"]
        widths = [len(disk[each.replace("conv1d", "proj")]) for each in names]
        whole = torch.cat([disk[each] for each in names])
        theirs = dict(zip(names, [each.contiguous() for each in whole.split(widths)]))
        disk = {**disk, **theirs}
    return disk


def loaded(config, architecture, written: dict[str, torch.Tensor], folder) -> hf.PreTrainedModel:
    """A new model of theirs with these weights, and no others."""
    if (
        any("moe" in block for block in architecture.blocks) or architecture.renamed
    ):  # on disk experts are single, in memory they are not
        save_file(written, folder / "model.safetensors", {"format": "pt"})
        config.save_pretrained(folder)
        again, left = hf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        left["missing_keys"] = {key for key in left["missing_keys"] if not architecture.is_buffer(key)}  # it makes them
        assert not any(left.values())
        return again.eval()
    again = hf.AutoModelForCausalLM.from_config(config).eval()
    aliases = {disk: memory for memory, disk in architecture.aliases.items()}
    left = again.load_state_dict({aliases.get(key, key): tensor for key, tensor in written.items()}, strict=False)
    assert not left.unexpected_keys
    missing = {key for key in left.missing_keys if architecture.layers.source(key, written) is None}
    assert missing <= ({architecture.head, *architecture.aliases} if config.tie_word_embeddings else set())
    again.tie_weights()
    return again


def steps_of(config) -> list[convert.ConversionStep]:
    model = build_model(config, device="meta")
    architecture, _ = hf_config(config)
    return convert.plan(architecture, named(model), config.model)


def test_leftover_and_missing_tensors_are_named():
    theirs = hf.GPTNeoXConfig(**TINY, intermediate_size=64)
    steps, architecture = steps_of(settings_of(theirs)), architecture_of(theirs)
    names = [name for step in steps for name in step.theirs]
    present = {*names, "gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.rotary_emb.inv_freq"}
    assert set(convert.match(architecture, steps, present, {}.get)) == set(names)
    present = present - {"embed_out.weight"} | {"gpt_neox.layers.2.mlp.dense_4h_to_h.weight", "value_head.weight"}
    with pytest.raises(CheckpointError) as error:
        convert.match(architecture, steps, present, {}.get)
    assert error.value.problems == [
        "missing: embed_out.weight",
        "left over: gpt_neox.layers.2.mlp.dense_4h_to_h.weight",
        "left over: value_head.weight",
    ]


def test_a_tied_head_must_be_the_embedding():
    theirs = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=True))
    _, steps, state = twin(theirs)
    state = {name: tensor.clone() for name, tensor in state.items()}
    state["lm_head.weight"] += 1
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        dict(convert.from_hf(architecture_of(theirs.config), steps, state, state.__getitem__))


def test_names_without_the_prefix_and_with_masks():
    """The published GPT-2 files have neither the prefix nor a head, and carry masks."""
    theirs = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=61, n_positions=24, n_embd=16, n_layer=2, n_head=2))
    _, steps, state = twin(theirs)
    old = {name.removeprefix("transformer."): tensor for name, tensor in state.items() if name != "lm_head.weight"}
    old |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)}
    found = dict(convert.from_hf(architecture_of(theirs.config), steps, old, old.__getitem__))
    assert found["embedding.tokens.weight"].equal(state["transformer.wte.weight"])
    assert found["layers.1.mlp.up.weight"].equal(state["transformer.h.1.mlp.c_fc.weight"].T)


BASE = {
    "layers": "(attention/mlp) x2",
    "hidden_size": 32,
    "vocab_size": 61,
    "attention": {"heads": 4, "qkv_bias": True, "output_bias": True},
    "mlp": {"bias": True},
    "residual": {"form": "parallel"},
}
LLAMA = {
    "layers": "(attention/mlp) x2",
    "hidden_size": 32,
    "vocab_size": 61,
    "norm": {"type": "rmsnorm"},
    "attention": {"heads": 4},
    "mlp": {"gated": True, "activation": "silu"},
}


def merged(base: dict, over: dict) -> dict:
    return {
        **base,
        **{
            key: merged(base[key], value) if isinstance(value, dict) and key in base else value
            for key, value in over.items()
        },
    }


def run(model: dict):
    return resolve({"model": model, "training": {"steps": 1, "sequence_length": 16}})


@pytest.mark.parametrize(
    "model, name",
    [
        (BASE, "gpt_neox"),
        (merged(BASE, {"residual": {"form": "sequential"}}), "gpt_neox"),
        (LLAMA, "llama"),
        (merged(LLAMA, {"attention": {"window": 8}}), "mistral"),
        (merged(LLAMA, {"attention": {"qk_norm": "head"}}), "qwen3"),
        (merged(LLAMA, {"attention": {"qk_norm": "full"}, "residual": {"norm": "post"}}), "olmo2"),
        (
            merged(
                LLAMA,
                {
                    "layers": "attention/mlp attention@w/mlp",
                    "variants": {"w": {"window": 4}},
                    "attention": {"qk_norm": "head"},
                },
            ),
            "qwen3",
        ),
        (
            merged(
                BASE,
                {
                    "residual": {"form": "sequential"},
                    "attention": {"position": "none"},
                    "embedding": {"position": "learned", "tied": True},
                    "dropout": 0.1,
                },
            ),
            "gpt2",
        ),
    ],
)
def test_the_architecture_is_found(model: dict, name: str):
    assert hf_config(run(model))[0].name == name


@pytest.mark.parametrize(
    "base, change, key",
    [
        (BASE, {"attention": {"softcap": 30.0}}, "model.attention.softcap"),
        (BASE, {"attention": {"scale": 0.5}}, "model.attention.scale"),
        (BASE, {"attention": {"kv_heads": 2}}, "model.attention.kv_heads"),
        (BASE, {"attention": {"head_dim": 16}}, "model.attention.head_dim"),
        (BASE, {"attention": {"output_bias": False}}, "model.attention.qkv_bias"),
        (BASE, {"attention": {"window": 8}}, "model.attention.window"),
        (BASE, {"attention": {"position": "alibi"}}, "model.attention.position"),
        (BASE, {"mlp": {"bias": False}}, "model.mlp.bias"),
        (BASE, {"residual": {"shared_norm": True}}, "model.residual.shared_norm"),
        (BASE, {"residual": {"multiplier": 0.5}}, "model.residual.multiplier"),
        (BASE, {"embedding": {"multiplier": 5.0}}, "model.embedding.multiplier"),
        (BASE, {"embedding": {"norm": True}}, "model.embedding.norm"),
        (BASE, {"head": {"multiplier": 0.5}}, "model.head.multiplier"),
        (BASE, {"head": {"softcap": 20.0}}, "model.head.softcap"),
        (BASE, {"head": {"bias": True}}, "model.head.bias"),
        (BASE, {"norm": {"bias": False}}, "model.norm.bias"),
        (BASE, {"norm": {"type": "nonparametric"}}, "model.mlp.bias"),  # OLMo is the nearest
        (LLAMA, {"layers": "attention/mlp mlp"}, "model.layers"),
        (
            LLAMA,
            {"layers": "attention/mlp attention/mlp@wide", "variants": {"wide": {"hidden_size": 300}}},
            "model.mlp.hidden_size",
        ),
    ],
)
def test_what_is_in_the_way_is_named(base: dict, change: dict, key: str):
    with pytest.raises(CheckpointError) as error:
        hf_config(run(merged(base, change)))
    assert any(problem.startswith(key) for problem in error.value.problems), error.value


HYBRID = {
    "hidden_size": 32,
    "vocab_size": 61,
    "norm": {"type": "rmsnorm"},
    "mlp": {"gated": True, "activation": "silu"},
}


def test_a_hybrid_without_attention(tmp_path):
    """Sizes of attention that is not there are theirs to choose."""
    config = run({**HYBRID, "layers": "(mamba2/mlp) x2", "mamba2": {"head_dim": 8, "state_size": 8, "groups": 2}})
    architecture, theirs = hf_config(config)
    assert architecture.name == "bamba"
    model = build_model(config).eval()
    randomise(model, 3)
    steps = convert.plan(architecture, stored(model), config.model)
    written = dict(convert.to_hf(steps, {name: p.detach() for name, p in stored(model).items()}.__getitem__))
    again = loaded(theirs, architecture, written, tmp_path)
    tokens = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(0))
    assert relative(model.logits(tokens), again(tokens, use_cache=False).logits) < FP32


def test_their_own_refusal_is_passed_on():
    """OLMo Hybrid has attention in some layer."""
    model = {
        **HYBRID,
        "layers": "(gated_delta/mlp) x2",
        "gated_delta": {"heads": 4, "norm_epsilon": 1e-5},
        "residual": {"norm": "hybrid"},
    }
    with pytest.raises(CheckpointError, match="at least one attention layer"):
        hf_config(run(model), "olmo_hybrid")


@pytest.mark.parametrize(
    "config, word",
    [
        (
            hf.LlamaConfig(
                **LLAMA_LIKE,
                rope_parameters={
                    **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0},
                    **{"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64},
                },
            ),
            "longrope",
        ),
        (hf.Gemma4TextConfig(vocab_size_per_layer_input=5), "vocab_size_per_layer_input"),
        (hf.Gemma4TextConfig(hidden_activation="silu"), "hidden_activation"),
        (hf.Gemma4TextConfig(num_kv_shared_layers=31), "num_kv_shared_layers must be at least 0 and below"),
        (hf.Gemma4TextConfig(num_kv_shared_layers=-1), "num_kv_shared_layers must be at least 0 and below"),
        (hf.Gemma4TextConfig(per_layer_config={4: {"sliding_window": 9}}), "sliding_window of single layers"),
        (hf.LlamaConfig(**LLAMA_LIKE, per_layer_config={1: {"skip": ["mlp"]}}), "skip of single layers"),
        (
            hf.Gemma2Config(num_hidden_layers=2, layer_types=["chunked_attention", "full_attention"]),
            "layer_types: chunked_attention is not computed here",
        ),
        (hf.DeepseekV3Config(rope_interleave=False), "rope_interleave"),
        (hf.DeepseekV2Config(norm_topk_prob=True), "norm_topk_prob"),
        (hf.GptOssConfig(swiglu_alpha=1.0), "swiglu_alpha"),
        (hf.LlamaConfig(**LLAMA_LIKE, hidden_act="mish"), "mish"),
        (hf.GPT2Config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
        (hf.BloomConfig(), "bloom"),
    ],
)
def test_what_we_do_not_compute_is_refused(config, word: str):
    with pytest.raises(CheckpointError, match=word):
        model_values(config)
