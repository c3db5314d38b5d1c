"""to_hf and from_hf: folders that transformers opens, checkpoints that are bitwise the same after a round trip."""

from __future__ import annotations

import json
import weakref
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron.checkpoint import MASTER, WEIGHT, Fragment, FragmentSpec, Meta, open_checkpoint, save
from megatron.checkpoint.hf import export as exporting
from megatron.checkpoint.hf.export import export, prove
from megatron.checkpoint.hf.importer import import_model
from megatron.checkpoint.reshape import parse_layout, reshape
from megatron.config.resolution import combine
from megatron.config.source.layers import ConfigSource
from megatron.config.source.resolved_file import to_yaml
from megatron.decoding.one_text import complete
from megatron.decoding.sampling import Sampling
from megatron.model.stack import build_model
from megatron.training.text import load_model
from tests.float64 import FP32
from tests.model.parity import randomise, relative, stored
from tests.model.test_parity import CASES
from tests.paths import ROOT
from tests.selection import covering, toured

V, S = 61, 24
MODELS = {
    "gpt_neox": {
        "residual": {"form": "parallel"},
        "attention": {"heads": 4, "rotary": {"fraction": 0.5}, "qkv_bias": True, "output_bias": True},
        "mlp": {"bias": True},
    },
    "qwen3": {
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "kv_heads": 2, "qk_norm": "head"},
        "embedding": {"tied": True},
        "mlp": {"gated": True, "activation": "silu", "hidden_size": 40},
    },
    "rwkv": {"layers": "(rwkv4/rwkv4_ffn) x2", "embedding": {"norm": True}, "rwkv4": {"init": "model"}},
    "mixtral": {
        "layers": "(attention/moe) x2",
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "kv_heads": 2},
        "moe": {"experts": 4, "hidden_size": 24, "router": {"normalize": True}},
    },
    "olmoe": {
        "layers": "(attention/moe) x2",
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "qk_norm": "full"},
        "moe": {"experts": 6, "top_k": 3, "hidden_size": 16, "losses": {"balance": 0.01}},
    },
    "olmo_hybrid": {
        "layers": "gated_delta/mlp attention/mlp gated_delta/mlp",
        "norm": {"type": "rmsnorm"},
        "residual": {"norm": "hybrid"},
        "attention": {"heads": 4, "position": "none", "qk_norm": "full"},
        "gated_delta": {"heads": 4, "key_heads": 2, "key_dim": 6, "value_dim": 8, "norm_epsilon": 1e-5},
        "mlp": {"gated": True, "activation": "silu", "hidden_size": 40},
    },
    "zaya": {
        "layers": "cca/moe@first (cca/moe) x2",
        "norm": {"type": "rmsnorm"},
        "residual": {"channel_scales": True},
        "embedding": {"tied": True},
        "cca": {"heads": 4, "kv_heads": 2, "head_dim": 4, "temperature": "linear", "rotary": {"fraction": 0.5}},
        "moe": {
            "experts": 4,
            "top_k": 1,
            "hidden_size": 24,
            "router": {"network": "mlp", "width": 8, "skip": True, "correction": "sign"},
        },
        "variants": {"first": {"router": {"average": False}}},
    },
    "gpt2": {
        "embedding": {"position": "learned", "tied": True},
        "mlp": {"activation": "gelu_tanh", "bias": True},
        "attention": {"heads": 4, "position": "none", "qkv_bias": True, "output_bias": True},
    },
    "zamba2": {
        "layers": "mamba2 (mamba2+shared_attention) x3",
        "norm": {"type": "rmsnorm"},
        "embedding": {"tied": True},
        "mamba2": {"head_dim": 8, "state_size": 8, "groups": 2},
        "shared_attention": {"heads": 4, "blocks": 2, "adapter_rank": 4, "attention_adapters": True},
    },
    "zamba": {
        "layers": "mamba (mamba+shared_attention) x2",
        "norm": {"type": "rmsnorm"},
        "embedding": {"tied": True},
        "mamba": {"state_size": 8, "heads": 2},
        "shared_attention": {"heads": 4, "position": "none"},
    },
    "jamba": {
        "layers": "mamba/mlp attention/moe mamba/mlp mamba/moe",
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "kv_heads": 2, "position": "none"},
        "mamba": {"state_size": 8, "inner_norms": True},
        "mlp": {"gated": True, "activation": "silu", "hidden_size": 24},
        "moe": {"experts": 4, "hidden_size": 24},
    },
    "bamba": {
        "layers": "(mamba2/mlp attention/mlp) x2",
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "kv_heads": 2, "rotary": {"fraction": 0.5}},
        "mamba2": {"head_dim": 8, "state_size": 8, "groups": 2},
        "mlp": {"gated": True, "activation": "silu", "hidden_size": 40},
    },
    "falcon_h1": {
        "layers": "(attention&mamba2/mlp) x2",
        "norm": {"type": "rmsnorm"},
        "embedding": {"multiplier": 2.0},
        "head": {"multiplier": 0.5},
        "attention": {"heads": 4, "kv_heads": 2, "scale": 0.2, "output_multiplier": 0.9, "rotary": {"base": 300.0}},
        "mlp": {
            "gated": True,
            "activation": "silu",
            "hidden_size": 40,
            "gate_multiplier": 0.9,
            "output_multiplier": 0.6,
        },
        "mamba2": {
            **{"inner_size": 48, "head_dim": 8, "state_size": 8, "norm": "none", "input_multiplier": 1.2},
            **{"output_multiplier": 0.5, "multipliers": {"z": 0.7, "x": 0.8, "B": 0.9, "C": 1.1, "dt": 0.6}},
        },
    },
}
_LLAMA = {
    "norm": {"type": "rmsnorm"},
    "attention": {"heads": 4, "kv_heads": 2},
    "mlp": {"gated": True, "activation": "silu", "hidden_size": 40},
}
_GEMMA = {
    **_LLAMA,
    "layers": "(attention@sliding/mlp attention/mlp) x2",
    "norm": {"type": "rmsnorm", "unit_offset": True},
    "residual": {"norm": "both"},
    "embedding": {"tied": True, "multiplier": 32**0.5},
}
MODELS |= {
    "qwen2_moe": {
        **_LLAMA,
        "layers": "attention/mlp (attention/moe) x2",
        "attention": {"heads": 4, "qkv_bias": True},
        "moe": {"experts": 4, "hidden_size": 24, "shared_size": 16, "shared_gate": True},
    },
    "qwen3_next": {
        **_LLAMA,
        "layers": "gated_delta/mlp attention/moe gated_delta/moe",
        "norm": {"type": "rmsnorm", "unit_offset": True},
        "attention": {"heads": 4, "kv_heads": 2, "qk_norm": "head", "gate": "channel"},
        "gated_delta": {"heads": 4, "key_heads": 2, "key_dim": 6, "value_dim": 8, "convolution_bias": False},
        "moe": {"experts": 4, "hidden_size": 24, "shared_size": 16, "shared_gate": True},
    },
    "deepseek_v32": {
        **{key: value for key, value in _LLAMA.items() if key != "attention"},
        "layers": "dsa/mlp (dsa/moe) x2",
        "dsa": {
            **{"heads": 4, "query_rank": 12, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 8},
            # scores of a key that no head takes are 0: of 4 heads one key in 16. Among equal ones theirs takes any
            **{"index_heads": 16, "index_dim": 8, "index_top_k": 5},
        },
        "moe": {
            **{"experts": 4, "hidden_size": 24, "shared_size": 24},
            "router": {"score": "sigmoid", "normalize": True, "correction": "sign"},
        },
    },
    "deepseek_v4": {
        **{key: value for key, value in _LLAMA.items() if key not in ("attention", "mlp")},
        "layers": "csa@sliding/moe@hash csa/moe csa@heavy/moe",
        "residual": {"streams": 2},
        "csa": {
            **{"heads": 4, "head_dim": 12, "query_rank": 12, "rope_dim": 4, "window": 5, "rate": 4, "groups": 2},
            **{"output_rank": 6, "index_heads": 16, "index_dim": 8, "index_top_k": 3},
        },
        "variants": {
            "sliding": {"rate": None},
            "heavy": {"rate": 8, "overlap": False, "index_top_k": None},
            "hash": {"router": {"select": "hash", "correction": "none"}},
        },
        "moe": {
            **{"experts": 4, "hidden_size": 24, "shared_size": 24, "limit": 3.0, "shared_limit": 3.0},
            "router": {"score": "sqrt_softplus", "normalize": True, "correction": "sign"},
        },
    },
    "qwen3_moe": {
        **_LLAMA,
        "layers": "attention/mlp (attention/moe) x2",
        "attention": {"heads": 4, "qk_norm": "head"},
        "moe": {"experts": 4, "hidden_size": 24, "router": {"normalize": True}},
    },
    "qwen2": {**_LLAMA, "attention": {"heads": 4, "kv_heads": 2, "qkv_bias": True}},
    "smollm3": {
        **_LLAMA,
        "layers": "attention/mlp attention@nope/mlp attention/mlp attention@nope/mlp",
        "variants": {"nope": {"position": "none"}},
    },
    "olmo3": {
        **_LLAMA,
        "layers": "attention@near/mlp attention/mlp attention@near/mlp",
        "residual": {"norm": "post"},
        "attention": {"heads": 4, "qk_norm": "full", "rotary": {"base": 700.0}},
        "variants": {"near": {"window": 5}},
    },
    "granite": {
        **_LLAMA,
        "attention": {"heads": 4, "scale": 0.2},
        "embedding": {"multiplier": 6.0},
        "residual": {"multiplier": 0.3},
        "head": {"multiplier": 1 / 3},
    },
    "phi3": {**_LLAMA, "attention": {"heads": 4, "rotary": {"fraction": 0.5}}},
    "glm4": {
        **_LLAMA,
        "residual": {"norm": "both"},
        "attention": {"heads": 4, "kv_heads": 2, "head_dim": 12, "qkv_bias": True, "rotary": {"fraction": 0.5}},
    },
    "gemma2": {
        **_GEMMA,
        "attention": {"heads": 4, "kv_heads": 2, "scale": 12**-0.5, "softcap": 20.0},
        "head": {"softcap": 9.0},
        "variants": {"sliding": {"window": 5}},
    },
    "gemma3_text": {
        **_GEMMA,
        "attention": {"heads": 4, "kv_heads": 2, "qk_norm": "head", "rotary": {"base": 5000.0}},
        "variants": {"sliding": {"window": 5, "rotary": {"base": 70.0}}},
    },
    "gemma4_text": {
        **_GEMMA,
        "norm": {"type": "rmsnorm"},
        "residual": {"norm": "both", "block_scale": True},
        "attention": {
            **{"heads": 4, "kv_heads": 1, "head_dim": 16, "qk_norm": "head", "value_norm": True, "values": "keys"},
            **{"scale": 1.0, "rotary": {"base": 5000.0, "fraction": 0.25, "scaling": {"type": "proportional"}}},
        },
        "variants": {
            "sliding": {
                **{"window": 5, "kv_heads": 2, "head_dim": 12, "values": "projected"},
                "rotary": {"base": 70.0, "fraction": 1.0, "scaling": {"type": "none"}},
            }
        },
    },
}


def tool(name: str) -> ModuleType:
    spec = spec_from_file_location(f"hf_tool_{name}", ROOT / "tools" / "checkpoint" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checkpoint_of(folder, change: dict, *, bf16: bool = False, tokenizer: dict | None = None):
    """(the checkpoint of a randomised model, the model)."""
    values = {
        "model": {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": V, **change},
        "training": {"steps": 10, "sequence_length": S},
        "tokenizer": tokenizer or {"type": "none"},
    }
    resolved = combine([ConfigSource(values)], ranks=1, check_inputs=False, name="small")
    model = build_model(resolved.config)
    # norms without residuals amplify rounding with the size of matrices
    randomise(model, 5, std=0.075 if "shared_attention" in change else 0.15)
    fragments = []
    for parameter in stored(model).values():
        flat = parameter.detach().flatten()
        if bf16:
            fragments.append(Fragment(parameter.logical, WEIGHT, 0, 1, 0, flat.bfloat16()))
        fragments.append(Fragment(parameter.logical, MASTER, 0, 1, 0, flat))
    path = save(folder, 7, fragments, Meta(step=7, config=to_yaml(resolved), data={"tokens": 12345}))
    return open_checkpoint(path), model


@pytest.mark.parametrize(
    ("name", "layout"), toured(covering(MODELS, ["tensor=1", "tensor=2,pipeline=2", "tensor=2,data=3,zero=3"]))
)
def test_any_layout_opens_in_transformers(name: str, layout: str, tmp_path):
    source, model = checkpoint_of(tmp_path, MODELS[name])
    reshape(source, tmp_path / "cut" / "step_00000007", parse_layout(layout))
    cut = open_checkpoint(tmp_path / "cut" / "step_00000007")
    done = export(cut, tmp_path / "out", limit=20_000)
    assert done.model_type == name and len(done.files) > 1
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(V, (2, S), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert relative(model.eval().logits(tokens), theirs(tokens).logits) < FP32
    proof = prove(cut, tmp_path / "out", done.dtype)
    assert proof.holds and proof.same_choice


@pytest.mark.parametrize("name", toured(MODELS))
def test_round_trip_is_bitwise(name: str, tmp_path):
    source, model = checkpoint_of(tmp_path, MODELS[name])
    export(source, tmp_path / "out")
    resolved = import_model(tmp_path / "out", tmp_path / "again")
    again = open_checkpoint(tmp_path / "again", verify="checksums")
    for key, parameter in stored(model).items():
        spec = FragmentSpec.whole(again.tensors[key], WEIGHT)
        assert again.read(spec).data.equal(parameter.detach().flatten()), key
    assert set(again.tensors) == set(stored(model)) and not again.meta.resumable
    assert resolved.config.training.sequence_length == S


def test_types(tmp_path):
    """By default the weights as they were used, or the masters on request."""
    source, model = checkpoint_of(tmp_path, MODELS["gpt_neox"], bf16=True)
    for wanted, dtype in ((None, torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)):
        folder = tmp_path / f"out_{wanted}"
        assert export(source, folder, dtype=wanted).dtype == dtype
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            found = file.get_tensor("gpt_neox.layers.1.attention.dense.weight")
        assert found.equal(model.blocks[1].mixer.output.weight.detach().to(dtype))
        assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def byte_tokenizer(path):
    vocabulary = {"<|endoftext|>": 0, **{chr(97 + index): index + 1 for index in range(26)}, "?": 27}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(path))


def test_tokenizer_card_and_greedy_text(tmp_path):
    byte_tokenizer(tmp_path / "tokenizer.json")
    source, model = checkpoint_of(
        tmp_path, MODELS["gpt_neox"], tokenizer={"type": "huggingface", "path": str(tmp_path / "tokenizer.json")}
    )
    done = export(source, tmp_path / "out")
    assert done.notes == []
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("abc")["input_ids"] == [1, 2, 3] and tokenizer.eos_token_id == 0
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "12,345" in card and "GPTNeoXForCausalLM" in card and "| step | 7 of 10 |" in card

    prompt = [1, 2, 3, 4]
    ours = list(complete(model.eval(), prompt, 12, Sampling(0.0, 0, 1.0, 0), end=None, device=torch.device("cpu")))
    wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)[
        0, 4:
    ].tolist()
    assert ours == wanted


@pytest.mark.parametrize("case", toured(CASES))
def test_published_forms_are_imported(case: str, tmp_path):
    """A folder as transformers writes it, into a checkpoint whose model gives the same logits."""
    theirs = hf.AutoModelForCausalLM.from_config(CASES[case]).eval()
    randomise(theirs, 3)
    theirs.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    status = tool("from_hf").main([
        str(tmp_path / "model"),
        str(tmp_path / "ckpt"),
        "--sequence-length",
        str(S),
        "--verify",
        "--json",
    ])
    assert status == 0
    model, _ = load_model(tmp_path / "ckpt", torch.device("cpu"))
    tokens = torch.randint(V, (2, S), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert relative(model.logits(tokens), theirs(tokens).logits) < FP32


def test_the_tools_say_what_is_wrong(tmp_path, capsys):
    source, _ = checkpoint_of(tmp_path, {"attention": {"heads": 4, "softcap": 3.0}})
    assert tool("to_hf").main([str(source.path), str(tmp_path / "out")]) == 2
    assert "model.attention.softcap = 3.0 cannot be expressed" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
    assert tool("to_hf").main([str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert "there is no such checkpoint" in capsys.readouterr().err

    theirs = hf.AutoModelForCausalLM.from_config(CASES["neox parallel"])
    theirs.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    assert tool("from_hf").main([str(tmp_path / "model"), str(tmp_path / "ckpt")]) == 2
    error = capsys.readouterr().err
    assert "gpt_neox.layers.1.mlp.dense_h_to_4h.weight has the shape (96, 32), and must have (80, 32)" in error
    assert not list(tmp_path.glob("ckpt*"))


def test_an_index_that_is_not_true_is_an_error(tmp_path, capsys):
    hf.AutoModelForCausalLM.from_config(CASES["neox parallel"]).save_pretrained(
        tmp_path / "model", max_shard_size="20KB"
    )
    index = tmp_path / "model" / "model.safetensors.index.json"
    true = index.read_text()
    places = json.loads(true)["weight_map"]
    first, *_, last = sorted(places, key=places.get)
    cases = (
        (
            json.dumps({"weight_map": {**places, "ghost": places[first]}}),
            f"says that ghost is in {places[first]}, and it is not",
        ),
        (
            json.dumps({"weight_map": {**places, first: places[last]}}),
            f"says that {first} is in {places[last]}, and it is not",
        ),
        (json.dumps({"weight_map": {**places, first: "none.safetensors"}}), "none.safetensors is lost"),
        (true[:100], "index.json: damaged: this is not JSON"),
        ("{}", "index.json: damaged: the entry 'weight_map' is missing"),
        (true, ""),
    )
    for text, words in cases:
        index.write_text(text)
        status = tool("from_hf").main([str(tmp_path / "model"), str(tmp_path / "ckpt"), "--sequence-length", str(S)])
        assert (status, words in capsys.readouterr().err) == (2 if words else 0, True)


def test_to_hf_of_a_run_verifies(tmp_path, capsys):
    checkpoint_of(tmp_path / "run" / "checkpoints", MODELS["qwen3"], bf16=True)
    assert tool("to_hf").main([str(tmp_path / "run"), str(tmp_path / "out"), "--verify", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["architecture"] == "Qwen3ForCausalLM" and told["dtype"] == "bfloat16" and told["relative"] < FP32


def test_one_module_is_in_memory_at_a_time(tmp_path, monkeypatch):
    """While a folder is written, no tensor of the step before is alive, however many layers there are."""
    source, _ = checkpoint_of(tmp_path, {**MODELS["gpt_neox"], "layers": "(attention/mlp) x8"})
    plain, alive, largest = exporting.tensor_reader, {}, []

    def counted(checkpoint, dtype):
        read = plain(checkpoint, dtype)

        def one(name):
            tensor = read(name)
            alive[name] = weakref.ref(tensor.untyped_storage())
            largest.append(sum(source.tensors[key].shape[0] for key, each in alive.items() if each() is not None))
            return tensor

        return one

    monkeypatch.setattr(exporting, "tensor_reader", counted)
    export(source, tmp_path / "out")
    assert len(largest) == len(source.tensors) and max(largest) <= 2 * 128, (
        "rows alive: of the widest module and the one before"
    )
