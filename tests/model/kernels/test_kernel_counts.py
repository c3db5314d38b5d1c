"""Kernels that torch.compile makes of blocks for a GPU, shown without one: whole graphs on the device, and how many
kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.config import load
from megatron.model.kernels.compile import choose_compilation
from tests.paths import ROOT

# Of one block of each kind of the model, forward and backward: kernels at most, matrix products included.
# The numbers here are torch 2.13's. More of them would be a block that is cut where it was not.
KERNELS = {
    "tiny_bamba": 46,
    "tiny_blackmamba": 16,
    "tiny_cca": 13,
    "tiny_deepseek_v2": 39,
    "tiny_deepseek_v3": 40,
    "tiny_deepseek_v32": 40,
    "tiny_deepseek_v4": 30,
    "tiny_falcon_h1": 18,
    "tiny_gated_delta": 51,
    "tiny_gemma4": 111,
    "tiny_gpt2": 38,
    "tiny_gpt_oss": 108,
    "tiny_jamba": 58,
    "tiny_lightning": 45,
    "tiny_llama": 31,
    "tiny_mamba2": 1,
    "tiny_mistral": 33,
    "tiny_mixtral": 70,
    "tiny_moe": 83,
    "tiny_nemotron_h": 49,
    "tiny_neox": 37,
    "tiny_olmo2": 35,
    "tiny_olmoe": 82,
    "tiny_qwen3": 36,
    "tiny_rwkv4": 1,
    "tiny_rwkv5": 1,
    "tiny_rwkv6": 1,
    "tiny_rwkv7": 25,
    "tiny_rwkv7_hybrid": 65,
    "tiny_zamba2": 5,
    "tiny_zaya": 16,
}

CHOICES = ("tiny_llama+graphs", "tiny_llama+varlen")
KERNELS |= {"tiny_llama+graphs": KERNELS["tiny_llama"], "tiny_llama+varlen": KERNELS["tiny_llama"]}

pytestmark = pytest.mark.skipif(
    torch.backends.cuda.is_built() or not torch.__version__.startswith("2.13."),
    reason="of torch 2.13 without CUDA: what it asks a GPU is answered in its place",
)


def compiled(*models: str) -> dict[str, dict]:
    names = [model.partition("+") for model in models]
    files = [str(ROOT / "configs" / "test" / f"{model}.yml") + plus + variant for model, plus, variant in names]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("pretended_compiler.py"), *files],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(models, json.loads(done.stdout).values(), strict=True))


FAST = ("tiny_llama", "tiny_rwkv7", "tiny_llama+graphs")


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    return compiled(*FAST)


def check(model: str, found: dict) -> None:
    assert not found["error"], found["error"]
    assert found["graphs"] and not found["breaks"] and not found["host"], found
    assert found["after"] <= KERNELS[model], found


@pytest.mark.parametrize("model", FAST)
def test_blocks_are_whole_and_few_kernels(model: str, found: dict[str, dict]):
    check(model, found[model])
    assert found[model]["after"] < found[model]["before"]  # loops are joined at all


@pytest.mark.slow  # minutes of compilation
def test_blocks_of_all_other_models():
    models = [model for model in KERNELS if model not in FAST]
    for model, result in compiled(*models).items():
        check(model, result)


def test_every_model_is_here_or_has_nothing_to_compile():
    options = ["training.steps=100", "training.compile=layer"]
    extents = {
        file.stem: choose_compilation(load([file], options, check_inputs=False).config, "cuda")[0]
        for file in (ROOT / "configs" / "test").glob("tiny_*.yml")
    }
    assert {model for model, extent in extents.items() if extent != "off"} == set(KERNELS) - set(CHOICES)


def test_blocks_may_be_replayed(found: dict[str, dict]):
    """As CUDA graphs, by inductor's conditions: no operation that waits or has a shape of its own. Weights (two norms
    and five matrices) have addresses of their own."""
    assert not found["tiny_llama"]["replayed"]
    replayed = found["tiny_llama+graphs"]["replayed"]
    assert len(replayed) == found["tiny_llama+graphs"]["graphs"] == 2
    assert all(fits for fits, _ in replayed) and replayed[0][1] == 7
