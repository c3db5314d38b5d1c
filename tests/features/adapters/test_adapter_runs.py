"""Runs with adapters: from a Hugging Face folder, on layouts, resumed, merged, exchanged with peft."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
import yaml
from safetensors.torch import load_file, save_file

from megatron.checkpoint import SOLO, CheckpointError, FragmentSpec, open_checkpoint
from megatron.checkpoint.hf.export import export
from megatron.checkpoint.read.reader import config_of
from megatron.checkpoint.save.store import find_checkpoint
from megatron.config import resolve
from megatron.features.adapters.merging import base_of, hash_of, merge, prove
from megatron.features.adapters.part import adapt
from megatron.features.adapters.peft import from_peft, to_peft
from megatron.model.stack import ModelPlan, build_model
from megatron.parallel.layout.mesh import Mesh
from megatron.testing.runs import train_on_ranks
from megatron.training.start.fetch import fetched
from tests.model.parity import randomise
from tests.selection import toured
from tools.adapter.from_peft import main as from_peft_tool
from tools.adapter.merge import main as merge_tool
from tools.adapter.to_peft import main as to_peft_tool

SHAPES = {
    "llama": hf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=32,
    ),
    "gpt_neox": hf.GPTNeoXConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=32,
    ),
    "gpt2": hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32),
    "mamba2": hf.Mamba2Config(
        hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=16, n_groups=1, vocab_size=64,
        chunk_size=8,
    ),
}  # fmt: skip

ADAPTERS: dict[str, dict[str, Any]] = {
    "llama": {"type": "dora", "dropout": 0.2},
    "gpt_neox": {"type": "dora", "rslora": True, "targets": ["attention.query", "mlp.*"]},
    "gpt2": {"rslora": True},
    "mamba2": {"targets": ["mamba2.zx", "mamba2.bc", "mamba2.dt"]},  # peft refuses the output of Mamba
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder of each Hugging Face model, with weights off their initial values."""
    place = tmp_path_factory.mktemp("models")
    for name, config in SHAPES.items():
        torch.manual_seed(1)
        model = hf.AutoModelForCausalLM.from_config(config)
        randomise(model, 3)
        model.save_pretrained(place / name)
    return place


def values_of(models: Path, run: Path, name: str = "llama", **adapter: Any) -> dict[str, Any]:
    """A run from a folder, in one file and one command."""
    base = open_checkpoint(fetched(str(models / name), models / "imported"))
    model = config_of(base).model.model_dump(exclude_defaults=True, mode="json")
    model.pop("fused_attention", None)  # derived of lengths, which are others here
    return {
        "model": model,
        "training": {"steps": 4, "sequence_length": 16, "global_batch_size": 4, "micro_batch_size": 2},
        "data": {"synthetic": "copy"},
        "optimizer": {"type": "adamw", "lr": 0.01, "weight_decay": 0.0},
        "checkpoint": {"initialize_from": str(models / name), "steps": [2]},
        "adapter": {"type": "lora", "rank": 4, "alpha": 8.0, **adapter},
        "run": {"dir": str(run)},
        "logging": {"console": "quiet", "curve": False, "predictions": False},
        "evaluation": {"at_end": False},
    }


def stored(run: Path, step: int = 4) -> dict[tuple[str, str], np.ndarray]:
    checkpoint = open_checkpoint(run / "checkpoints" / f"step_{step:08d}")
    return {
        (name, state): checkpoint.read(FragmentSpec.whole(checkpoint.tensors[name], state)).data.numpy()
        for name, state in checkpoint.stored
    }


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


@pytest.fixture(scope="module")
def trained(models: Path, tmp_path_factory) -> dict[str, Path]:
    """Runs of four steps in one process."""
    runs = {}
    for name, adapter in ADAPTERS.items():
        runs[name] = tmp_path_factory.mktemp("runs") / name
        train_on_ranks(1, values_of(models, runs[name], name, **adapter))
    return runs


# -- runs --------------------------------------------------------------------------------------------------------------


def test_checkpoints_have_the_adapters_alone_and_the_hash_of_the_base(trained: dict[str, Path], models: Path) -> None:
    found = stored(trained["llama"])
    assert {name.rpartition(".adapter.")[2] for name, _ in found} == {"a", "b", "magnitude"}
    meta = open_checkpoint(trained["llama"] / "checkpoints" / "step_00000004").meta
    base = open_checkpoint(fetched(str(models / "llama"), models / "imported"))
    assert meta.extra["adapters"] == {"base": hash_of(base, SOLO)}


@pytest.mark.parametrize(
    "layout", toured([{"parallel": {"tensor": 2}}, {"zero": {"stage": 3}}, {"parallel": {"pipeline": 2}}], "layouts")
)
def test_runs_on_layouts_are_that_of_one_process(
    layout: dict[str, Any], trained: dict[str, Path], models: Path, tmp_path: Path
) -> None:
    """With dropout, whose draws are keyed, and magnitudes that are lengths of the base's rows."""
    values = {**values_of(models, tmp_path, type="dora", dropout=0.2), **layout}
    records = train_on_ranks(2, values)
    one = [json.loads(line) for line in (trained["llama"] / "metrics.jsonl").read_text().splitlines()]
    assert losses(records) == pytest.approx(losses(one), rel=1e-5)
    alone, found = stored(trained["llama"]), stored(tmp_path)
    assert found.keys() == alone.keys()
    for key, wanted in alone.items():
        if key[1] == "master":  # AdamW makes whole steps of 0.01 of gradients that are nearly nothing
            np.testing.assert_allclose(found[key], wanted, rtol=1e-3, atol=2e-4, err_msg=key[0])


def test_a_stage_of_a_table_may_train_nothing(tmp_path: Path) -> None:
    """Adapters of the last two layers only: the first stage of two on each rank has none, and no gradient."""
    torch.manual_seed(1)
    shape = SHAPES["llama"].to_dict() | {"num_hidden_layers": 4}
    hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**shape)).save_pretrained(tmp_path / "llama")
    given = {"targets": ["layers.2.mlp.*", "layers.3.mlp.*"]}
    one = train_on_ranks(1, values_of(tmp_path, tmp_path / "one", **given))
    table = {"parallel": {"pipeline": 2, "stages_per_rank": 2, "schedule": "interleaved"}}
    both = train_on_ranks(2, {**values_of(tmp_path, tmp_path / "two", **given), **table})
    assert losses(both) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_runs_in_bf16_train_like_those_in_fp32(
    stage: int, trained: dict[str, Path], models: Path, tmp_path: Path
) -> None:
    """Frozen weights are in bf16 there, and masters of adapters in fp32."""
    values = {**values_of(models, tmp_path, type="dora", dropout=0.2), "zero": {"stage": stage}}
    records = train_on_ranks(2, {**values, "precision": {"compute": "bf16"}})
    one = [json.loads(line) for line in (trained["llama"] / "metrics.jsonl").read_text().splitlines()]
    assert losses(records) == pytest.approx(losses(one), rel=2e-2)  # bf16 has 8 bits
    assert {state for _, state in stored(tmp_path)} == {"master", "exp_avg", "exp_avg_sq"}


def test_a_resumed_run_has_the_same_bits(trained: dict[str, Path], models: Path, tmp_path: Path) -> None:
    values = values_of(models, tmp_path, type="dora", dropout=0.2)
    train_on_ranks(1, values, ["training.stop_at_step=2"])
    train_on_ranks(1, values)
    alone, found = stored(trained["llama"]), stored(tmp_path)
    assert found.keys() == alone.keys() and all((found[key] == alone[key]).all() for key in alone)


def test_initial_values_are_peft_s_and_do_not_change_the_model(models: Path, tmp_path: Path) -> None:
    values = values_of(models, tmp_path, type="dora")
    config = resolve(values, ranks=1)
    plain, other = (build_model(config) for _ in range(2))
    layers = adapt(other, ModelPlan(config, Mesh.single()))
    ids = torch.arange(32).view(2, 16)
    for layer in layers.values():
        adapter: Any = layer.adapter
        assert 0.5 < float(adapter.a.detach().abs().max()) * layer.weight.shape[1] ** 0.5 <= 1.0 and not adapter.b.any()
        with torch.no_grad():
            adapter.magnitude.copy_(layer.weight.norm(dim=1))
    torch.testing.assert_close(other.logits(ids), plain.logits(ids), rtol=1e-5, atol=1e-5)
    config = resolve({**values, "adapter": {"type": "lora"}}, ranks=1)
    other = build_model(config)
    adapt(other, ModelPlan(config, Mesh.single()))
    assert other.logits(ids).equal(plain.logits(ids))  # to the last bit


def test_another_base_is_refused(models: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    values = values_of(models, tmp_path)
    train_on_ranks(1, values, ["training.stop_at_step=2"])
    model = hf.AutoModelForCausalLM.from_pretrained(models / "llama")
    randomise(model, 4)
    model.save_pretrained(tmp_path / "other")
    values["checkpoint"]["initialize_from"] = str(tmp_path / "other")
    with pytest.raises(RuntimeError, match="the adapters are of other weights"):
        train_on_ranks(1, values)


# -- merged ------------------------------------------------------------------------------------------------------------


def closed_formula(run: Path, theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W + alpha/r B A, with DoRA's lengths, of the Llama model's matrices, in float64."""
    found = {name: torch.from_numpy(values) for (name, state), values in stored(run).items() if state == "master"}
    places = {
        "attention.query": ["self_attn.q_proj"],
        "attention.key_value": ["self_attn.k_proj", "self_attn.v_proj"],
        "attention.output": ["self_attn.o_proj"],
        "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down": ["mlp.down_proj"],
    }
    made = {name: tensor.double() for name, tensor in theirs.items()}
    for layer in range(2):
        for ours, modules in places.items():
            first = 0
            for number, module in enumerate(modules):
                name, ending = f"model.layers.{layer}.{module}.weight", f"layers.{layer}.{ours}.adapter."
                N, K = made[name].shape
                a = found[f"{ending}a"].double().view(-1, K)[4 * number : 4 * number + 4]
                b = found[f"{ending}b"].double().view(-1, 4)[first : first + N]
                total = made[name] + 8 / 4 * b @ a
                m = found[f"{ending}magnitude"].double()[first : first + N]
                made[name] = total * (m / total.norm(dim=1)).unsqueeze(1)
                first += N
    return made


def test_the_merged_model_is_the_closed_formula(models: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    adapters = open_checkpoint(find_checkpoint(trained["llama"]))
    base, config = base_of(adapters, None)
    out = merge(adapters, base, config, tmp_path / "step_00000004")
    assert prove(adapters, base, config, out).holds
    export(open_checkpoint(out), tmp_path / "hf", name="llama")
    theirs = load_file(models / "llama" / "model.safetensors")
    wanted, found = closed_formula(trained["llama"], theirs), load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name].double(), wanted[name], rtol=1e-6, atol=1e-7, msg=name)
    with pytest.raises(CheckpointError, match="deepy adapter merge"):
        export(adapters, tmp_path / "half")


# -- peft --------------------------------------------------------------------------------------------------------------


def factors_make(folder: Path, theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a model with the adapters of peft's files, by peft's equations."""
    tensors, config = (
        load_file(folder / "adapter_model.safetensors"),
        json.loads((folder / "adapter_config.json").read_text()),
    )
    made = {name: tensor.double() for name, tensor in theirs.items()}
    for module in config["target_modules"]:
        a, b = (tensors[f"base_model.model.{module}.lora_{each}.weight"].double() for each in "AB")
        match = next((key for key in config["rank_pattern"] if re.fullmatch(rf"(.*\.)?{key}", module)), None)
        assert (config["rank_pattern"][match] if match else config["r"]) == len(a)
        alpha = config["alpha_pattern"][match] if match else config["lora_alpha"]
        scale = alpha / (len(a) ** 0.5 if config["use_rslora"] else len(a))
        delta, name = scale * b @ a, next(key for key in made if key == f"{module}.weight")
        total = made[name] + (delta.T if ".c_" in module else delta)  # GPT-2's Conv1D are turned
        if config["use_dora"]:
            total *= (tensors[f"base_model.model.{module}.lora_magnitude_vector"] / total.norm(dim=1)).unsqueeze(1)
        made[name] = total
    return made


@pytest.mark.parametrize("name", SHAPES)
def test_files_for_peft_make_the_merged_model(
    name: str, models: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    """In GPT-NeoX and GPT-2 one matrix has queries, keys and values, by head there, and each has an adapter here."""
    adapters = open_checkpoint(find_checkpoint(trained[name]))
    base, config = base_of(adapters, None)
    export(open_checkpoint(merge(adapters, base, config, tmp_path / "step_00000004")), tmp_path / "hf", name=name)
    to_peft(adapters, base, config, tmp_path / "peft")
    theirs = load_file(models / name / "model.safetensors")
    found, wanted = factors_make(tmp_path / "peft", theirs), load_file(tmp_path / "hf" / "model.safetensors")
    for each in wanted:
        torch.testing.assert_close(found[each], wanted[each].double(), rtol=1e-5, atol=1e-6, msg=each)
    again = from_peft(
        tmp_path / "peft", base, config, adapters.meta.extra["adapters"]["base"], tmp_path / "step_00000000"
    )
    returned = open_checkpoint(tmp_path / "step_00000000")
    own = resolve({**values_of(models, tmp_path / "run", name), "adapter": again}, ranks=1)
    export(
        open_checkpoint(merge(returned, base, own, tmp_path / "again" / "step_00000000")), tmp_path / "twice", name=name
    )
    for each, tensor in load_file(tmp_path / "twice" / "model.safetensors").items():
        torch.testing.assert_close(tensor, wanted[each], rtol=1e-5, atol=1e-6, msg=each)


def test_a_run_begins_with_adapters_of_peft(models: Path, tmp_path: Path) -> None:
    """It begins at the loss with which the run that has trained them continues."""
    values = values_of(models, tmp_path / "first", "gpt_neox", **ADAPTERS["gpt_neox"])
    values = {**values, "training": {**values["training"], "steps": 5}}
    values["checkpoint"]["steps"] = [4]
    expected = losses(train_on_ranks(1, values))[4]
    adapters = open_checkpoint(tmp_path / "first" / "checkpoints" / "step_00000004")
    base, config = base_of(adapters, None)
    to_peft(adapters, base, config, tmp_path / "peft")
    known = adapters.meta.extra["adapters"]["base"]
    section = from_peft(tmp_path / "peft", base, config, known, tmp_path / "step_00000000")
    # A rate of next to nothing keeps them until the batch on which the other run had the loss.
    other = {"run": {"dir": str(tmp_path / "other")}, "optimizer": {"type": "sgd", "lr": 1e-12}, "adapter": section}
    assert losses(train_on_ranks(1, {**values, **other}))[4] == pytest.approx(expected, rel=1e-5)


PEFT = os.environ.get("PEFT_PYTHON") or (sys.executable if importlib.util.find_spec("peft") else None)
OPENS = """
import sys, torch, transformers, peft
base, adapter, out = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
model = peft.PeftModel.from_pretrained(model, adapter).double().eval()
ids = torch.arange(32).view(2, 16)
with torch.no_grad():
    torch.save([model(ids).logits, model.merge_and_unload()(ids).logits], out)
"""


@pytest.mark.skipif(PEFT is None, reason="peft is not installed (PEFT_PYTHON names a Python that has it)")
@pytest.mark.parametrize("name", SHAPES)
def test_peft_opens_the_files(name: str, models: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    adapters = open_checkpoint(find_checkpoint(trained[name]))
    base, config = base_of(adapters, None)
    to_peft(adapters, base, config, tmp_path / "peft")
    export(open_checkpoint(merge(adapters, base, config, tmp_path / "step_00000004")), tmp_path / "hf", name=name)
    words = [PEFT, "-c", OPENS, models / name, tmp_path / "peft", tmp_path / "logits.pt"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64).eval()
    with torch.no_grad():
        wanted = model(torch.arange(32).view(2, 16)).logits
    for found in torch.load(tmp_path / "logits.pt"):  # our merged weights are fp32
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"bias": "all"}, "bias must be none"),
        ({"r": "x"}, "r and lora_alpha must be numbers"),
        ({"lora_alpha": 0}, "r and lora_alpha must be numbers above 0"),
        ({"lora_alpha": float("nan")}, "must be numbers above 0"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save must be None"),
        ({"alpha_pattern": {"(a+)+": 1}}, "alpha_pattern must have names"),
        ({"alpha_pattern": 3}, "alpha_pattern must have names"),
    ],
)
def test_files_that_are_no_plain_adapters_are_refused(
    change: dict[str, Any], message: str, models: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    adapters = open_checkpoint(find_checkpoint(trained["gpt2"]))
    base, config = base_of(adapters, None)
    to_peft(adapters, base, config, tmp_path / "peft")
    place = tmp_path / "peft" / "adapter_config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        from_peft(tmp_path / "peft", base, config, "", tmp_path / "step_00000000")


def test_tensors_that_fit_no_layer_are_refused(models: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    adapters = open_checkpoint(find_checkpoint(trained["gpt_neox"]))
    base, config = base_of(adapters, None)
    to_peft(adapters, base, config, tmp_path / "peft")
    file = tmp_path / "peft" / "adapter_model.safetensors"
    whole = load_file(file)
    name = next(each for each in whole if each.endswith("4h_to_h.lora_B.weight"))
    for change, message in (
        ({name: whole[name][:-1].clone()}, "of one rank"),
        ({name: whole[name][:, :0].clone(), name.replace("_B", "_A"): torch.ones(0, 128)}, "of one rank"),
        ({name: torch.full_like(whole[name], float("inf"))}, "finite"),
        ({"base_model.model.gpt_neox.nothing.lora_A.weight": torch.ones(4, 32)}, "must have A and B"),
        ({"strange": torch.ones(1)}, "must be lora_A or lora_B"),
    ):
        save_file({**whole, **change}, file)
        with pytest.raises(CheckpointError, match=message):
            from_peft(tmp_path / "peft", base, config, "", tmp_path / "step_00000000")


def test_the_three_commands(models: Path, trained: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    run, base = trained["llama"], next((trained["llama"] / "checkpoints" / "fetched").glob("*/*"))
    assert merge_tool([str(run), str(tmp_path / "step_00000004"), "--verify"]) == 0
    assert "verified" in capsys.readouterr().out
    assert to_peft_tool([str(run), str(tmp_path / "peft"), "--base-model", "someone/model"]) == 0
    assert json.loads((tmp_path / "peft/adapter_config.json").read_text())["base_model_name_or_path"] == "someone/model"
    words = [str(tmp_path / "peft"), str(tmp_path / "step_00000000"), "--base", str(base)]
    assert from_peft_tool([*words, "--yaml", str(tmp_path / "adapter.yml")]) == 0
    section = yaml.safe_load((tmp_path / "adapter.yml").read_text())["adapter"]
    assert section["type"] == "dora" and section["rank"] == 4 and section["alpha"] == 8.0
    assert merge_tool([str(base), str(tmp_path / "step_00000001")]) == 2
    assert "it has no adapters" in capsys.readouterr().err
    assert from_peft_tool([str(base), str(tmp_path / "step_00000002"), "--base", str(base)]) == 2


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_full_run_does_not_go_on_with_adapters(models: Path, tmp_path: Path) -> None:
    values = values_of(models, tmp_path)
    train_on_ranks(1, {**values, "adapter": {}}, ["training.stop_at_step=2"])
    with pytest.raises(RuntimeError, match="adapter.type"):
        train_on_ranks(1, values)


def test_a_checkpoint_of_another_sort_is_refused_with_the_fix(models: Path, tmp_path: Path) -> None:
    values, own, base = values_of(models, tmp_path / "own"), str(tmp_path / "own"), str(models / "llama")
    train_on_ranks(1, values, ["training.steps=1", "checkpoint.steps=[]"])
    for checkpoint, adapter, reason in (
        *((own, changes, "deepy adapter merge") for changes in ({}, {"type": "none"})),
        (base, {"initialize_from": str(fetched(base, models / "imported"))}, "it has no adapters"),
        (base, {"initialize_from": own, "alpha": 4.0}, "adapter.alpha must be 8.0"),
        (base, {"initialize_from": str(tmp_path / "none")}, "adapter.initialize_from asks for it"),
    ):
        changed = {"checkpoint": {"initialize_from": checkpoint}, "adapter": {**values["adapter"], **adapter}}
        with pytest.raises(RuntimeError, match=reason):
            train_on_ranks(1, {**values, **changed, "run": {"dir": str(tmp_path / "other")}})
