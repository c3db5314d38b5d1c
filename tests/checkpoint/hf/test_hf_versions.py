"""Exports are read alike by versions 4 and 5 of transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint import CheckpointError, FragmentSpec, open_checkpoint
from megatron.checkpoint.format.fragment import WEIGHT
from megatron.checkpoint.hf.companions import for_both
from megatron.checkpoint.hf.export import export
from megatron.checkpoint.hf.importer import import_model, settings
from tests.checkpoint.hf.test_hf_tools import MODELS, S, V, byte_tokenizer, checkpoint_of
from tests.model.parity import relative
from tests.paths import ROOT

PYTHON = "DEEPY_TRANSFORMERS_4"  # names a Python with transformers 4.57 and torch
LLAMA = {
    "norm": {"type": "rmsnorm"},
    "attention": {"heads": 4, "kv_heads": 2, "rotary": {"base": 500.0}},
    "mlp": {"gated": True, "activation": "silu", "hidden_size": 40},
}


def rotary(model: dict, **values) -> dict:
    return {**model, "attention": {**model["attention"], "rotary": values}}


YARN = {"type": "yarn", "factor": 4.0, "original_length": 8, "beta_fast": 8.0}
NEAR = {"near": {"window": 5, "rotary": {"scaling": {"type": "none", "factor": 1.0}}}}
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_length": 64}
LATENT = {
    "layers": "mla/mlp mla/moe",
    "norm": {"type": "rmsnorm"},
    "mla": {"heads": 4, "kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "value_dim": 8, "rotary": {"base": 300.0}},
    "mlp": {"gated": True, "activation": "silu", "hidden_size": 40},
    "moe": {"experts": 8, "hidden_size": 16, "shared_size": 16},
}
SIGMOID = {"score": "sigmoid", "normalize": True, "groups": 4, "top_groups": 2, "scale": 2.5, "correction": "sign"}
BESIDE = MODELS["falcon_h1"]
# Models for which both versions must give the same logits. Every base differs from every class's own.
BOTH = {
    "llama": LLAMA,
    "llama linear": rotary(LLAMA, base=700.0, scaling={"type": "linear", "factor": 3.0}),
    "llama llama3": rotary(LLAMA, base=900.0, scaling=LLAMA3),
    "llama yarn": rotary(LLAMA, base=900.0, scaling=YARN),
    "qwen3": rotary(MODELS["qwen3"], base=300.0),
    "olmo2": {**LLAMA, "residual": {"norm": "post"}, "attention": {**LLAMA["attention"], "qk_norm": "full"}},
    "mistral": {**LLAMA, "attention": {**LLAMA["attention"], "window": 5}},
    "mixtral": rotary(MODELS["mixtral"], base=300.0),
    "olmoe": rotary(MODELS["olmoe"], base=300.0),
    "gpt_neox": rotary(MODELS["gpt_neox"], base=300.0, fraction=0.75),
    **{
        name: MODELS[name]
        for name in ("qwen2", "qwen2_moe", "qwen3_moe", "smollm3", "granite", "glm4", "gemma2", "gpt2")
    },
    "olmo3": rotary(MODELS["olmo3"], base=700.0, scaling=YARN) | {"variants": NEAR},
    "phi3": rotary(MODELS["phi3"], base=700.0, fraction=0.5),
    "gemma3_text": rotary(MODELS["gemma3_text"], base=5000.0, scaling={"type": "linear", "factor": 8.0})
    | {"variants": {"sliding": {"window": 5, "rotary": {"base": 70.0, "scaling": {"type": "none", "factor": 1.0}}}}},
    "rwkv": MODELS["rwkv"],
    "mamba": {"layers": "mamba x2", "norm": {"type": "rmsnorm"}, "mamba": {"state_size": 8}},
    "mamba2": {
        "layers": "mamba2 x2",
        "norm": {"type": "rmsnorm"},
        "mamba2": {"head_dim": 8, "state_size": 8, "least_step": 0.1, "most_step": 0.7},
    },
    "bamba": {**rotary(MODELS["bamba"], base=300.0, fraction=0.25), "mamba2": {"head_dim": 8, "state_size": 8}},
    "falcon_h1": BESIDE,
    "falcon_h1 norm": {**BESIDE, "mamba2": {**BESIDE["mamba2"], "norm": "before_gate"}},
    "falcon_h1 groups": {**BESIDE, "mamba2": {**BESIDE["mamba2"], "norm": "after_gate", "groups": 2}},
    "jamba": MODELS["jamba"],
    "zamba": MODELS["zamba"],
    "zamba2": MODELS["zamba2"],
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "mla": {**LATENT["mla"], "query_rank": 12}, "moe": {**LATENT["moe"], "router": SIGMOID}},
    "gpt_oss": {
        "layers": "attention@near/moe attention/moe",
        "norm": {"type": "rmsnorm"},
        "attention": {
            **{"heads": 4, "kv_heads": 2, "sinks": True, "qkv_bias": True, "output_bias": True},
            "rotary": {"base": 300.0, "scaling": {**YARN, "truncate": False}},
        },
        "variants": {"near": {"window": 5}},
        "moe": {
            **{"experts": 4, "hidden_size": 24, "activation": "quick_gelu", "bias": True, "limit": 7.0},
            **{"up_offset": 1.0, "router": {"bias": True, "normalize": True}},
        },
    },
}


_SHARED = {"norm": {"type": "layernorm"}, "residual": {"form": "parallel", "shared_norm": True}}
_GATED = {"gated": True, "activation": "silu", "hidden_size": 40, "bias": False}
_HEADS = {"heads": 4, "kv_heads": 2}
_BIASES = {**_HEADS, "qkv_bias": True, "output_bias": True}
_PLAIN = {"activation": "gelu_tanh", "hidden_size": 48, "bias": True}
BOTH |= {
    "seed_oss": rotary({**LLAMA, "attention": {**_HEADS, "qkv_bias": True}}, base=300.0),
    "arcee": rotary({**LLAMA, "mlp": {"gated": False, "activation": "relu2", "hidden_size": 40}}, base=300.0),
    "apertus": {
        **rotary({**LLAMA, "attention": {**_HEADS, "qk_norm": "head"}}, base=300.0),
        "mlp": {"activation": "xielu", "hidden_size": 40},
    },
    "olmo": rotary({**LLAMA, "norm": {"type": "nonparametric"}}, base=300.0),
    "ernie4_5": rotary(LLAMA, base=300.0),
    "helium": rotary(LLAMA, base=300.0),
    "glm": rotary(LLAMA, base=300.0, fraction=0.5),
    "gemma": {
        **rotary(LLAMA, base=300.0),
        "norm": {"type": "rmsnorm", "unit_offset": True},
        "embedding": {"multiplier": 32**0.5, "tied": True},
    },
    "cohere": {
        **rotary({**_SHARED, "attention": _HEADS, "mlp": _GATED}, base=300.0),
        "norm": {"type": "layernorm", "bias": False},
        "head": {"multiplier": 0.25},
    },
    "cohere2": {
        "layers": "attention/mlp attention@far/mlp",
        **_SHARED,
        "norm": {"type": "layernorm", "bias": False},
        "attention": {**_HEADS, "window": 5, "rotary": {"base": 300.0}},
        "variants": {"far": {"window": None, "position": "none"}},
        "mlp": _GATED,
    },
    "starcoder2": rotary(
        {"norm": {"type": "layernorm"}, "attention": {**_BIASES, "window": 5}, "mlp": _PLAIN}, base=300.0
    ),
    "nemotron": {
        **rotary({"attention": _HEADS}, base=300.0, fraction=0.5),
        "norm": {"type": "layernorm", "unit_offset": True},
        "mlp": {"activation": "relu2", "hidden_size": 48, "bias": False},
    },
    "stablelm": rotary({"norm": {"type": "layernorm"}, "attention": _HEADS, "mlp": _GATED}, base=300.0, fraction=0.5),
    "phi": {
        **rotary({**_SHARED, "attention": _BIASES, "mlp": _PLAIN}, base=300.0, fraction=0.5),
        "head": {"bias": True},
    },
    "gptj": {**rotary({**_SHARED, "attention": {"heads": 4}, "mlp": _PLAIN}, fraction=0.5), "head": {"bias": True}},
    "glm4_moe": {
        "layers": "attention/mlp attention/moe",
        "norm": {"type": "rmsnorm"},
        "attention": {**_HEADS, "qk_norm": "head", "rotary": {"base": 300.0, "fraction": 0.5}},
        "mlp": _GATED,
        "moe": {"experts": 8, "hidden_size": 16, "shared_size": 16, "router": SIGMOID},
    },
}


def tiny(folder: Path, name: str) -> torch.Tensor:
    """A randomised model, exported to `<folder>/<name>/model`, with tokens next to it. Its own logits."""
    own = None
    if name == "llama":
        byte_tokenizer(folder / "tokenizer.json")
        own = {"type": "huggingface", "path": str(folder / "tokenizer.json")}
    source, model = checkpoint_of(folder / f"{name}.checkpoint", BOTH[name], tokenizer=own)
    place = folder / "exports" / name
    place.mkdir(parents=True)
    done = export(source, place / "model", name=name.partition(" ")[0])
    assert not [note for note in done.notes if "needs transformers" in note]
    assert "| transformers | 4.57 or later |" in (place / "model" / "README.md").read_text()
    tokens = torch.randint(V, (2, S), generator=torch.Generator().manual_seed(0))
    torch.save(tokens, place / "tokens.pt")
    with torch.no_grad():
        return model.eval().logits(tokens)


@pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no Python with transformers 4")
def test_version_4_gives_the_same_logits(tmp_path: Path) -> None:
    wanted = {name: tiny(tmp_path, name) for name in BOTH}
    words = [os.environ[PYTHON], str(ROOT / "tests/checkpoint/hf/version4.py"), str(tmp_path / "exports")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, logits in wanted.items():
        found = torch.load(tmp_path / "exports" / name / "logits.pt")
        assert found["version"].startswith("4.")
        assert relative(found["logits"], logits) < 1e-5, name  # fp32 on both sides. Defaults of theirs give over 1e-2
    assert torch.load(tmp_path / "exports/llama/tokenized.pt") == [[1, 2, 3], 0]


def strictly(text: str) -> dict:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", BOTH)
def test_settings_stand_where_version_4_looks(name: str, tmp_path: Path) -> None:
    tiny(tmp_path, name)
    folder = tmp_path / "exports" / name / "model"
    found = strictly((folder / "config.json").read_text())
    assert "__float__" not in (folder / "config.json").read_text()
    rope = found.get("rope_parameters")
    own = BOTH[name].get("attention", {}).get("rotary")
    rope = rope.get("full_attention", rope) if rope else rope
    if name == "gptj":  # has only the number of rotated channels
        assert found["rotary_dim"] == 4
        return
    assert rope or not own
    if own:
        scaling = own.get("scaling")
        assert found["rope_theta"] == own.get("base", 10000.0) == rope["rope_theta"]
        assert (found["rope_scaling"] or {}).get("rope_type") == (scaling and scaling["type"])
        assert (found["rope_scaling"] or {}).get("factor") == (scaling and scaling["factor"])
        assert found.get("partial_rotary_factor", 1.0) == own.get("fraction", 1.0)
    if name == "gpt_neox":
        assert (found["rotary_pct"], found["rotary_emb_base"]) == (0.75, 300.0)
    if name.startswith("zamba"):
        assert set(found["layers_block_type"]) == {"mamba", "hybrid"}
    if name in ("mamba2", "bamba"):
        assert all(isinstance(each, float) for each in found["time_step_limit"])
    if name == "llama":
        assert strictly((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    back = settings(folder).config.model  # version 5, and us
    limits = BOTH[name].get("mamba2", {})
    assert back.mamba2.most_step == limits.get("most_step")
    if own:
        assert back.attention.rotary.base == own.get("base", 10000.0)


@pytest.mark.parametrize(
    "name, change, why",
    [
        ("zaya", {}, "does not have the class"),
        ("bamba", {}, "groups"),
        ("bamba", {"mamba2": {"head_dim": 8, "state_size": 8, "most_step": 0.5}}, "time steps"),
        ("falcon_h1", {"mamba2": {**BESIDE["mamba2"], "least_step": 0.1}}, "time steps"),
    ],
)
def test_what_version_4_computes_otherwise_is_said(name: str, change: dict, why: str, tmp_path: Path) -> None:
    source, _ = checkpoint_of(tmp_path, {**MODELS[name], **change})
    done = export(source, tmp_path / "out")
    assert any("needs transformers 5.23" in note and why in note for note in done.notes)
    assert "5.23 or later" in (tmp_path / "out" / "README.md").read_text()


def test_an_infinite_number_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        for_both({"model_type": "llama", "limit": {"__float__": "NaN"}})


@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_the_last_name_of_shared_weights_is_enough(name: str, tmp_path: Path) -> None:
    """transformers 4 saves a block that layers share under the name of its last layer, version 5 of its first."""
    layers = {"zamba": "mamba mamba+shared_attention mamba mamba+shared_attention mamba+shared_attention"}
    model = {**MODELS[name], "layers": layers.get(name, layers["zamba"].replace("mamba", "mamba2"))}
    source, _ = checkpoint_of(tmp_path / "source", {**model, "variants": {}})
    export(source, tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    module = "shared_trans"
    blocks = sorted({int(each.split(".")[2]) for each in tensors if f".{module}" in each})
    calls = sorted(int(each.split(".")[2]) for each in tensors if each.endswith(".linear.weight"))
    last = {first: max(calls[at :: len(blocks)]) for at, first in enumerate(blocks)}
    renamed = {}
    for each, values in tensors.items():
        parts = each.split(".")
        if f".{module}" in each:
            parts[2] = str(last[int(parts[2])])
        renamed[".".join(parts)] = values
    assert renamed.keys() != tensors.keys()
    save_file(renamed, file, metadata={"format": "pt"})
    import_model(tmp_path / "theirs", tmp_path / "back")
    back = open_checkpoint(tmp_path / "back")
    for tensor in source.tensors.values():
        spec = FragmentSpec.whole(tensor, WEIGHT)
        assert back.read(spec, torch.float32).data.equal(source.read(spec, torch.float32).data), tensor.name
    other = next(each for each in renamed if f".{module}" in each)
    save_file({**renamed, other.replace(f".{other.split('.')[2]}.", f".{calls[0]}."): renamed[other] + 1}, file)
    with pytest.raises(CheckpointError, match="but differ"):
        import_model(tmp_path / "theirs", tmp_path / "other")
