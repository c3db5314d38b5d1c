"""Adapters of classes of transformers: on layouts, merged, exported, and opened by peft."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.hf.export import export
from megatron.checkpoint.save.store import find_checkpoint
from megatron.config import ConfigError, resolve
from megatron.features.adapters.merging import base_of, merge, prove
from megatron.features.adapters.part import whole
from megatron.features.adapters.peft import to_peft
from megatron.kinds.transformers.build import hf_model
from megatron.kinds.transformers.options import TransformersOptions
from megatron.kinds.transformers.outline import linears_of
from megatron.model.stack import build_model
from megatron.testing import train_on_ranks
from megatron.training.start.fetch import fetched
from tests.features.adapters.test_adapter_runs import OPENS, PEFT, factors_make, losses
from tests.kinds.transformers.steps import values_of
from tests.kinds.transformers.tiny import tiny
from tests.selection import toured


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of HyperCLOVA X, which has no layers of deepy, with weights off their initial values."""
    place = tmp_path_factory.mktemp("models") / "base"
    theirs = build_model(resolve(values_of("hyperclovax", tiny("hyperclovax")))).as_saved(torch.float32)
    torch.manual_seed(7)
    with torch.no_grad():
        for each in theirs.parameters():
            each.add_(torch.randn_like(each) * 0.1)
    theirs.save_pretrained(place)
    return place


def adapted(base: Path, run: Path, **adapter: Any) -> dict[str, Any]:
    return {
        **values_of(str(base), {}),
        "checkpoint": {"initialize_from": str(base)},
        "optimizer": {"type": "adamw", "lr": 0.01, "weight_decay": 0.0},
        "adapter": {"type": "lora", "rank": 4, "alpha": 8.0, **adapter},
        "run": {"dir": str(run)},
        "logging": {"console": "quiet", "curve": False, "predictions": False},
        "evaluation": {"at_end": False},
    }


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    train_on_ranks(1, adapted(base, run, type="dora"))
    return run


def records(run: Path) -> list[float]:
    import json

    return losses([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])


LAYOUTS: list[dict[str, Any]] = [
    {"zero": {"stage": 3}},
    {"parallel": {"tensor": 2}},
    {"parallel": {"pipeline": 2}, "training": {"activation_checkpointing": {"mode": "full"}}},
]


@pytest.mark.parametrize("layout", toured(LAYOUTS, "layouts"))
def test_runs_on_layouts_are_that_of_one_process(
    layout: dict[str, Any], base: Path, trained: Path, tmp_path: Path
) -> None:
    values = adapted(base, tmp_path, type="dora")
    values |= {key: {**values.get(key, {}), **own} for key, own in layout.items()}
    found = losses(train_on_ranks(2, values))
    assert len(found) == 4 and found == pytest.approx(records(trained), rel=1e-5)
    one, other = (open_checkpoint(find_checkpoint(run)) for run in (tmp_path, trained))
    assert set(one.tensors) == set(other.tensors)


def test_adapters_of_a_whole_layer_have_the_gradients_of_all_slices(tmp_path: Path) -> None:
    """Latent attention: the last outputs of its first projection are keys of the heads of all slices."""
    base, found = tmp_path / "base", []
    build_model(resolve(values_of("deepseek_v2", tiny("deepseek_v2")))).as_saved(torch.float32).save_pretrained(base)
    for ranks in (1, 2):
        values = adapted(base, tmp_path / str(ranks), targets=["kv_a_proj_with_mqa"])
        train_on_ranks(ranks, {**values, "parallel": {"tensor": ranks}})
        adapters = open_checkpoint(find_checkpoint(tmp_path / str(ranks)))
        found.append({name: whole(adapters, each) for name, each in adapters.tensors.items()})
    for name, each in found[0].items():
        torch.testing.assert_close(found[1][name], each, rtol=1e-4, atol=1e-5, msg=name)


def test_layers_that_share_weights_have_no_adapters() -> None:
    """A sum of several adapters would have to be merged into one matrix."""
    with torch.device("meta"):
        model = hf_model(TransformersOptions(config="zamba", options=tiny("zamba")).model_dump())
    names = linears_of(model)
    assert names and not any("shared_transf." in name for name in names)


def test_a_folder_is_read_again_for_other_settings(base: Path, tmp_path: Path) -> None:
    """A folder's copy for a class of fewer blocks lacks the others."""
    short = resolve(values_of(str(base), {"num_hidden_layers": 1}))
    copies = {fetched(str(base), tmp_path, each) for each in (short, resolve(values_of(str(base), {})), short)}
    assert sorted(len(open_checkpoint(each).tensors) for each in copies)[0] < len(load_file(base / "model.safetensors"))
    assert len(copies) == 2


def test_the_merged_model_and_the_files_for_peft_are_the_adapted_class(
    base: Path, trained: Path, tmp_path: Path
) -> None:
    """By peft's equations, and by peft itself where it is installed."""
    adapters = open_checkpoint(find_checkpoint(trained))
    weights, config = base_of(adapters, None)
    out = merge(adapters, weights, config, tmp_path / "step_00000004")
    assert prove(adapters, weights, config, out).holds
    export(open_checkpoint(out), tmp_path / "hf")
    to_peft(adapters, weights, config, tmp_path / "peft")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    wanted = factors_make(tmp_path / "peft", load_file(base / "model.safetensors"))
    for name, each in found.items():
        torch.testing.assert_close(each.double(), wanted[name], rtol=1e-5, atol=1e-6, msg=name)
    if PEFT is None:
        return
    words = [PEFT, "-c", OPENS, base, tmp_path / "peft", tmp_path / "logits.pt"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64).eval()
    with torch.no_grad():
        logits = model(torch.arange(32).view(2, 16)).logits
    for each in torch.load(tmp_path / "logits.pt"):
        torch.testing.assert_close(each, logits, rtol=1e-5, atol=1e-5)


def test_targets_are_names_of_the_class(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"use some of .*self_attn\.q_proj"):
        resolve(adapted(base, tmp_path, targets=["self_attn.query"]))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layers"):
        resolve({**adapted(base, tmp_path), "model": values_of("gpt2", tiny("gpt2"))["model"]})
