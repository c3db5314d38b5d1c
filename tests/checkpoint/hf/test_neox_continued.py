"""A run that DeepSpeed began with GPT-NeoX's names continues here, with the losses that it has there."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.format.fragment import MASTER, FragmentSpec
from tests.checkpoint.neox_upstream import HEADS, HIDDEN, LAYERS, LENGTH, LR, SAVED, STEPS, train, write_data
from tests.paths import ROOT
from tests.workers import run as on_ranks

FLAT = """{
  "num_layers": %(layers)d, "hidden_size": %(hidden)d, "num_attention_heads": %(heads)d,
  "seq_length": %(length)d, "max_position_embeddings": %(length)d, "pos_emb": "rotary", "rotary_pct": 0.25,
  "norm": "layernorm", "gpt_j_residual": %(parallel)s, "no_weight_tying": %(untied)s,
  "hidden_dropout": 0, "attention_dropout": 0, "weight_decay": 0.1, "gradient_clipping": 0.0,
  "model_parallel_size": %(tensor)d, "pipe_parallel_size": %(stages)d, "train_iters": %(steps)d,
  "lr_decay_iters": %(steps)d, "lr_decay_style": "linear", "warmup": 0.0, "min_lr": 0.0, "precision": "%(precision)s",
  "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": %(accumulation)d,
  "make_vocab_size_divisible_by": 128, "zero_optimization": {"stage": %(zero)d},
  "optimizer": {"type": "Adam", "params": {"lr": %(lr)g, "betas": [0.9, 0.95], "eps": 1.0e-8}},
  "data_path": "%(data)s", "data_impl": "mmap", "split": "1,0,0", "tokenizer_type": "CharLevelTokenizer",
  "eval_iters": 0, "checkpoint_factor": 100
}"""
# Four samples a step in each. Ranks: how many processes the run began with.
CASES: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0},
    "zero 0, data 2, parallel residual": {"zero": 0, "ranks": 2, "parallel": True},
    "zero 1": {"zero": 1},
    "zero 1, data 2": {"zero": 1, "ranks": 2},
    "zero 0, pipeline 1": {"zero": 0, "stages": 1},
    "zero 1, pipeline 1, data 2, tied": {"zero": 1, "stages": 1, "ranks": 2, "tied": True},
    "zero 0, pipeline 2, tied": {"zero": 0, "stages": 2, "ranks": 2, "tied": True},
    "zero 1, pipeline 2": {"zero": 1, "stages": 2, "ranks": 2},
    "zero 0, tensor 2": {"zero": 0, "tensor": 2, "ranks": 2},
    "zero 1, tensor 2": {"zero": 1, "tensor": 2, "ranks": 2},
    "zero 1, tensor 2, pipeline 1": {"zero": 1, "tensor": 2, "stages": 1, "ranks": 2},
}
HERE = ["parallel.tensor=1", "parallel.pipeline=1", "training.global_batch_size=4", "training.accumulation=null"]


def tool():
    spec = spec_from_file_location("from_neox", ROOT / "tools" / "checkpoint" / "from_neox.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configured(folder: Path, case: dict[str, Any]) -> Path:
    tensor, stages, ranks = case.get("tensor", 1), case.get("stages", 0), case.get("ranks", 1)
    data = ranks // tensor // max(stages, 1)
    write_data(folder / "data" / "text")
    values = {
        "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "length": LENGTH, "steps": STEPS, "lr": LR,
        "parallel": str(case.get("parallel", False)).lower(), "untied": str(not case.get("tied", False)).lower(),
        "tensor": tensor, "stages": stages, "accumulation": 2 // data, "zero": case["zero"],
        "precision": "bfloat16" if case.get("bf16") else "fp32", "data": folder / "data" / "text",
    }  # fmt: skip
    path = folder / "neox.yml"
    path.write_text(FLAT % values)
    return path


def begun(folder: Path, case: dict[str, Any]) -> tuple[Path, list[float]]:
    """The YAML of a run that was begun upstream, and the losses of all its steps."""
    config = configured(folder, case)
    found = on_ranks(case.get("ranks", 1), train, str(folder / "neox"), str(config), case)
    return config, found[0][0]


def here(folder: str, config_file: str, *overrides: str) -> list[float]:
    """A run of ours on this worker. Its losses."""
    from megatron.checkpoint import SOLO
    from megatron.config import load, to_yaml
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh
    from megatron.training.run import run_training
    from megatron.training.world import World
    from megatron.worker.place import WorkerEnvironment

    words = [f"run.dir={folder}", "logging.console=quiet", "logging.curve=false", "logging.every=1", *overrides]
    resolved = load([config_file], words, ranks=1)
    prepare_deepspeed(torch.device("cpu"))
    mesh = Mesh.build(Layout.of(resolved.config, 1))
    place = WorkerEnvironment(rank=0, world_size=1, config_text=to_yaml(resolved), attempt=0)
    run_training(resolved.config, place, World(torch.device("cpu"), mesh, SOLO, SOLO))
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_run_that_stayed(tmp_path: Path, name: str, capsys) -> None:
    case = CASES[name]
    config, expected = begun(tmp_path, case)
    words = [str(tmp_path / "neox" / f"global_step{SAVED}"), str(tmp_path / "ours"), "--config", str(config)]
    assert tool().main(words) == 0, capsys.readouterr().err
    assert f"checkpoint.resume={tmp_path / 'ours'}" in capsys.readouterr().out
    meta = open_checkpoint(tmp_path / "ours", verify="checksums").meta
    assert (meta.step, meta.optimizer, meta.resumable) == (SAVED, {"step": float(SAVED)}, True)
    assert meta.data == {"samples": 4 * SAVED, "tokens": 4 * SAVED * LENGTH}
    found = on_ranks(1, here, str(tmp_path / "run"), str(config), *HERE, f"checkpoint.resume={tmp_path / 'ours'}")[0]
    assert found == pytest.approx(expected[SAVED:], rel=2e-6)


def read(path: Path, name: str, state: str) -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    tensor = checkpoint.tensors[name]
    return checkpoint.read(FragmentSpec.whole(tensor, state)).data.view(tensor.shape)


def test_bf16_keeps_each_value_of_the_masters_and_moments(tmp_path: Path, capsys) -> None:
    config, _ = begun(tmp_path, {"zero": 1, "ranks": 2, "bf16": True})
    source = tmp_path / "neox" / f"global_step{SAVED}"
    assert tool().main([str(source), str(tmp_path / "ours"), "--config", str(config), "--verify"]) == 0
    assert "verified" in capsys.readouterr().out
    files = sorted(source.glob("bf16_zero_pp_rank_*"))
    theirs = [torch.load(path, weights_only=False)["optimizer_state_dict"] for path in files]
    for state in (MASTER, "exp_avg", "exp_avg_sq"):
        flat = [
            part["single_partition_of_fp32_groups"][group]
            if state == MASTER
            else part["base_optimizer_state"]["state"][group][state]
            for part in theirs
            for group in range(2)
        ]
        ours = [read(tmp_path / "ours", name, state).flatten() for name in open_checkpoint(tmp_path / "ours").tensors]
        found, wanted = (torch.cat(each).detach() for each in (ours, flat))
        assert found[found != 0].sort().values.equal(wanted[wanted != 0].sort().values), state


def test_output_biases_of_the_parallel_residual_are_summed_and_their_moments_are_not(tmp_path: Path, capsys) -> None:
    config, _ = begun(tmp_path, {"zero": 0, "tensor": 2, "ranks": 2, "parallel": True})
    source = tmp_path / "neox" / f"global_step{SAVED}"
    assert tool().main([str(source), str(tmp_path / "ours"), "--config", str(config)]) == 0, capsys.readouterr().err
    parts = [torch.load(source / f"mp_rank_0{rank}_model_states.pt", weights_only=False) for rank in range(2)]
    biases = [part["module"]["sequential.2.attention.dense.bias"] for part in parts]
    assert read(tmp_path / "ours", "layers.0.attention.output.bias", MASTER).equal(biases[0] + biases[1])
    # Parameters without weight decay come after the ten with it. Modules with their own parameters come in the order
    # of registration: a norm's two, query_key_value's, this one.
    theirs, others = (part["optimizer"]["state"][13]["exp_avg"] for part in parts)
    assert theirs.equal(others)
    assert read(tmp_path / "ours", "layers.0.attention.output.bias", "exp_avg").equal(theirs)


def test_what_does_not_belong_together_is_refused(tmp_path: Path, capsys) -> None:
    config, _ = begun(tmp_path, {"zero": 1, "ranks": 2})
    source = tmp_path / "neox" / f"global_step{SAVED}"
    states = sorted(source.glob("zero_pp_rank_*"))
    whole = [path.read_bytes() for path in (*states, source / "mp_rank_00_model_states.pt")]

    def complaint(*more: str) -> str:
        assert tool().main([str(source), str(tmp_path / "ours"), "--config", str(config), *more]) == 2
        assert not (tmp_path / "ours").exists()
        return capsys.readouterr().err

    states[1].unlink()
    assert "it has optimizer states of 1 of 2 data parallel ranks" in complaint()
    states[1].write_bytes(whole[1])
    states[0].unlink()
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt is lost" in complaint()
    states[0].write_bytes(whole[0][: len(whole[0]) // 2])
    assert states[0].name in complaint()
    other = torch.load(states[1], weights_only=False)
    other["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[5] += 1
    states[0].write_bytes(whole[0])
    torch.save(other, states[1])
    assert "its master does not round to the weight" in complaint()
    states[1].write_bytes(whole[1])
    text = config.read_text()
    config.write_text(text.replace('"num_attention_heads": 4', '"num_attention_heads": 2'))
    assert "num_attention_heads is 4 in the checkpoint, and 2 in the configuration" in complaint()
    config.write_text(text)
    model = torch.load(source / "mp_rank_00_model_states.pt", weights_only=False)
    torch.save({**model, "more": Path("x")}, source / "mp_rank_00_model_states.pt")
    assert "objects that are not tensors (pathlib" in complaint()
    (source / "mp_rank_00_model_states.pt").write_bytes(whole[2])
    words = [str(source), str(tmp_path / "ours"), "--config", str(config), "--weights", "--verify"]
    assert tool().main(words) == 0, capsys.readouterr().err
    assert not open_checkpoint(tmp_path / "ours").meta.resumable
