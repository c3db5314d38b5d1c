"""GPT-NeoX's layer files, cut here from a transformers model, become checkpoints whose logits are that model's."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import transformers as hf

from megatron.training.text import load_model
from tests.float64 import FP32
from tests.model.parity import randomise, relative
from tests.paths import ROOT

LAYERS, HIDDEN, HEADS, VOCABULARY = 3, 32, 4, 512  # the number of the tokenizer
FLAT = """{
  "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 24, "max_position_embeddings": 24,
  "pos_emb": "rotary", "rotary_pct": 0.25, "norm": "layernorm", "gpt_j_residual": %s, "no_weight_tying": true,
  "model_parallel_size": %d, "pipe_parallel_size": 1, "train_iters": 10, "lr_decay_iters": 10,
  "train_micro_batch_size_per_gpu": 2, "make_vocab_size_divisible_by": 1,
  "optimizer": {"type": "Adam", "params": {"lr": 0.001}}, "data_path": "data/x", "tokenizer_type": "CharLevelTokenizer"
}"""
NEW = {"mlp.dense_h_to_4h": "mlp.linear1", "mlp.dense_4h_to_h": "mlp.linear2"}
CUT = {"query_key_value": 0, "dense_h_to_4h": 0, "attention.dense.weight": 1, "dense_4h_to_h.weight": 1}


def tool():
    spec = spec_from_file_location("from_neox", ROOT / "tools" / "checkpoint" / "from_neox.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def theirs(parallel: bool) -> hf.GPTNeoXForCausalLM:
    config = hf.GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=24,
        use_parallel_residual=parallel,
        hidden_act="gelu",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=False,
    )
    model = hf.GPTNeoXForCausalLM(config).eval()
    randomise(model, 3)
    return model


def write(folder: Path, model: hf.GPTNeoXForCausalLM, ranks: int, *, new: bool) -> Path:
    """The files of a run: number 0 the embedding, 2 ... the blocks, then the last norm and the head."""
    folder.mkdir(parents=True)
    state = model.state_dict()
    parallel = model.config.use_parallel_residual

    def put(number: int, tensors: dict[str, torch.Tensor]) -> None:
        for rank in range(ranks):
            shard = {name: cut(name, tensor, rank) for name, tensor in tensors.items()}
            torch.save(shard, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")

    def cut(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        dim = (
            0
            if name in ("word_embeddings.weight", "final_linear.weight")
            else next((dim for part, dim in CUT.items() if part in name), None)
        )
        if dim is not None:
            tensor = tensor.chunk(ranks, dim)[rank]
        elif parallel and name in ("attention.dense.bias", "mlp.dense_4h_to_h.bias"):
            tensor = tensor / ranks  # each rank adds its own before the sum
        return tensor.clone()

    put(0, {"word_embeddings.weight": state["gpt_neox.embed_in.weight"]})
    for layer in range(LAYERS):
        prefix = f"gpt_neox.layers.{layer}."
        block = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        put(2 + layer, {**block, "attention.rotary_emb.inv_freq": torch.ones(4)})
    put(LAYERS + 3, {f"norm.{part}": state[f"gpt_neox.final_layer_norm.{part}"] for part in ("weight", "bias")})
    put(LAYERS + 4, {"final_linear.weight": state["lm_head.weight"]})
    if new:
        rename(folder)
    return folder


def rename(folder: Path) -> None:
    """The names of later versions."""
    for path in folder.iterdir():
        tensors = torch.load(path, weights_only=True)
        for old, after in NEW.items():
            tensors = {name.replace(old, after): tensor for name, tensor in tensors.items()}
        torch.save(tensors, path)


def configured(folder: Path, parallel: bool, ranks: int) -> Path:
    path = folder / "neox.yml"
    path.write_text(FLAT % (str(parallel).lower(), ranks))
    return path


@pytest.mark.parametrize(("parallel", "ranks", "new"), [(True, 1, False), (True, 4, True), (False, 2, False)])
def test_logits_are_those_of_the_model_before_it_was_cut(tmp_path: Path, parallel, ranks, new, capsys) -> None:
    model = theirs(parallel)
    source = write(tmp_path / "global_step10", model, ranks, new=new)
    words = [str(source), str(tmp_path / "ours"), "--config", str(configured(tmp_path, parallel, ranks)), "--verify"]
    assert tool().main(words) == 0, capsys.readouterr().err
    assert "verified" in capsys.readouterr().out
    ours, _ = load_model(tmp_path / "ours", torch.device("cpu"))
    tokens = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert relative(ours.logits(tokens), model(tokens).logits) < FP32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step10", "neox.yml", "ours"]


def test_what_is_lost_or_unknown_is_named(tmp_path: Path, capsys) -> None:
    model = theirs(True)
    config = configured(tmp_path, True, 2)
    source = write(tmp_path / "step", model, 2, new=False)

    def complaint() -> str:
        assert tool().main([str(source), str(tmp_path / "ours"), "--config", str(config)]) == 2
        assert not (tmp_path / "ours").exists()
        return capsys.readouterr().err

    lost = source / "layer_03-model_01-model_states.pt"
    content = lost.read_bytes()
    lost.unlink()
    assert "layer_03-model_01-model_states.pt is lost" in complaint()
    lost.write_bytes(content[:100])
    assert "layer_03-model_01-model_states.pt" in complaint()
    tensors = torch.load(source / "layer_03-model_00-model_states.pt", weights_only=True)
    for rank in range(2):
        torch.save({**tensors, "attention.gate": torch.ones(2)}, source / f"layer_03-model_{rank:02d}-model_states.pt")
    assert "attention.gate has no counterpart" in complaint()


def test_norms_that_drifted_apart_become_their_mean_and_it_is_said(tmp_path: Path, capsys) -> None:
    source = write(tmp_path / "step", theirs(True), 2, new=False)
    file = source / "layer_02-model_01-model_states.pt"
    tensors = torch.load(file, weights_only=True)
    before = tensors["input_layernorm.weight"].clone()
    torch.save({**tensors, "input_layernorm.weight": before + 0.5}, file)
    folder = tmp_path / "hf"
    words = [str(source), str(tmp_path / "ours"), "--config", str(configured(tmp_path, True, 2)), "--hf", str(folder)]
    assert tool().main(words) == 0
    assert "input_layernorm.weight differs between ranks by up to 0.5" in capsys.readouterr().err
    found = hf.AutoModelForCausalLM.from_pretrained(folder).state_dict()["gpt_neox.layers.0.input_layernorm.weight"]
    torch.testing.assert_close(found, before + 0.25)


def test_files_that_would_run_code_are_refused(tmp_path: Path, capsys) -> None:
    source = write(tmp_path / "step", theirs(True), 1, new=False)
    torch.save({"norm.weight": Path("x")}, source / "layer_06-model_00-model_states.pt")
    words = [str(source), str(tmp_path / "ours"), "--config", str(configured(tmp_path, True, 1))]
    assert tool().main(words) == 2
    assert (
        "layer_06-model_00-model_states.pt: it was not read: it contains objects that are not tensors"
        in capsys.readouterr().err
    )
