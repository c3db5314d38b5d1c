"""The Python API next to the tools and the launcher: the same configuration, run, batches, tensors and gradients."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch

import megatron.api as deepy
from megatron.config import ConfigError
from tests.paths import ROOT
from tests.scripts import script

WORDS = (
    "test/tiny_llama",
    "training.stop_at_step=4",
    "checkpoint.every=2",
    "optimizer.gradient_clipping=0.1",
    "launch.device=cpu",
)


def tool(name: str, *words: str) -> str:
    """Output of a script of tools/."""
    done = script(name, *words, folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> deepy.Run:
    """A run of four steps that was trained in this process."""
    before, switches = dict(os.environ), torch.are_deterministic_algorithms_enabled()
    trained = deepy.train(deepy.resolve(*WORDS, f"run.dir={tmp_path_factory.mktemp('run')}"))
    assert dict(os.environ) == before and torch.are_deterministic_algorithms_enabled() == switches
    assert not torch.distributed.is_initialized()
    return trained


def losses(lines: list[dict]) -> list[tuple]:
    return [(line["step"], line["loss"], line["grad_norm"], line["batch_hash"]) for line in lines if "loss" in line]


def test_importing_loads_neither_torch_nor_deepspeed():
    code = "import sys, megatron.api; print([name for name in ('torch', 'deepspeed', 'numpy') if name in sys.modules])"
    assert tool_output(code) == "[]"


def tool_output(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_example_names_a_tensor_of_its_own_configuration():
    from megatron.model.stack import build_model

    text = deepy.__doc__ or ""
    (name,) = re.findall(r'resolve\("([^"]+)"', text)
    (tensor,) = re.findall(r'tensors\(run\)\["([^"]+)"\]', text)
    model = build_model(deepy.resolve(name).config)
    assert tensor in {parameter.logical.name for parameter in model.parameters()}


def test_a_configuration_is_that_of_the_command_line():
    shown = json.loads(
        tool("config.py", "show", "--json", "--ranks", "1", "configs/test/tiny_llama.yml", "optimizer.lr=0.5")
    )
    for words in (["test/tiny_llama", "optimizer.lr=0.5"], ["test/tiny_llama", {"optimizer.lr": 0.5}]):
        resolved = deepy.resolve(*words)
        assert json.loads(resolved.config.model_dump_json()) == shown["config"]
    assert deepy.resolve("test/tiny_llama", {"data.synthetic": "copy", "run.name": "a: b"}).config.run.name == "a: b"
    with pytest.raises(ConfigError, match="did you mean optimizer.lr"):
        deepy.resolve("test/tiny_llama", "optimizer.lrr=1")


def test_training_here_is_training_by_the_launcher(run, tmp_path):
    files = map(str, (ROOT / "deepy.py", ROOT / "train.py", ROOT / "configs/test/tiny_llama.yml"))
    words, clean = [sys.executable, *files, *WORDS[1:], "run.dir=run"], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    theirs = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses(run.metrics()) == losses(theirs) and len(losses(theirs)) == 4
    assert [path.name for path in run.checkpoints()] == ["step_00000002", "step_00000004"]
    tool("checkpoint/diff.py", str(run.checkpoints()[-1]), str(tmp_path / "run/checkpoints/step_00000004"))


def test_a_run_goes_on(run):
    resolved = deepy.resolve(*WORDS, f"run.dir={run.directory}", "training.stop_at_step=5")
    again = deepy.train(resolved, quiet=False)
    assert again.outcome.step == 5 and losses(again.metrics())[-1][0] == 4


def test_several_ranks_are_refused():
    with pytest.raises(ValueError, match="give ranks=1"):
        deepy.train(deepy.resolve(*WORDS, ranks=2))


def test_batches_are_those_that_the_tool_shows(run):
    shown = json.loads(tool("data/batch.py", str(run.directory), "--step", "1", "--to", "2", "--tokens", "--json"))
    for batch, step in zip(deepy.batches(run, 1, 3), shown["steps"], strict=True):
        assert f"{batch.hash:016x}" == step["hash"]
        assert batch.tokens.flatten(0, 1).tolist() == [each["tokens"] for each in step["sequences"]]
    assert [f"{batch.hash:016x}" for batch in deepy.batches(run, 0, 4)] == [hash for *_, hash in losses(run.metrics())][
        :4
    ]


def test_tensors_are_those_that_the_tool_describes(run):
    last = run.checkpoints()[0]
    shown = json.loads(tool("checkpoint/inspect.py", str(last), "--norms", "--json"))
    rows = {
        (row["name"], state): {**row, **facts} for row in shown["tensors"] for state, facts in row["states"].items()
    }
    for state in {state for _, state in rows}:
        found = deepy.tensors(last, state=state)
        for name in found:
            if (name, state) in rows:
                assert found[name].double().norm().item() == pytest.approx(rows[name, state]["norm"], rel=1e-6)
                assert list(found[name].shape) == rows[name, state]["shape"]
    weights = deepy.tensors(last)
    assert set(weights) == {name for name, _ in rows} and len(weights.matching("layers.*.mlp.*")) > 2
    with pytest.raises(KeyError):
        weights["layers.9.mlp.up.weight"]


def test_a_pass_gives_the_loss_and_gradients_of_the_training_step(run):
    """The run's own numbers of step 2, from the checkpoint before it, and the logged norm of its gradient."""
    logged = {line["step"]: line for line in run.metrics() if "loss" in line}
    (batch,) = deepy.batches(run, 2, 3)
    model = deepy.open_model(run.checkpoints()[0])
    found = model.forward(batch, keep=["layers.*", "layers.*.attention", "embedding"], gradients=True)
    assert found.loss == pytest.approx(logged[2]["loss"], rel=1e-6)
    norm = torch.stack([each.double().norm() for each in found.gradients.values()]).norm().item()
    assert norm == pytest.approx(logged[2]["grad_norm"], rel=1e-5)
    assert set(found.gradients) == set(deepy.tensors(run))
    assert set(found.activations) == {"embedding", "layers.0", "layers.1", "layers.0.attention", "layers.1.attention"}
    assert all(each.shape == (16, 32, 32) for each in found.activations.values())


def test_activations_add_up_to_the_residual_stream(run):
    """In a sequential block the stream after it is the stream before it plus both branches. So are their gradients."""
    (batch,) = deepy.batches(run, 0, 1)
    model = deepy.open_model(run)
    found = model.forward(batch, keep=["embedding", "layers.*", "layers.0.attention", "layers.0.mlp"], gradients=True)
    kept, slopes = found.activations, found.activation_gradients
    torch.testing.assert_close(kept["layers.0"], kept["embedding"] + kept["layers.0.attention"] + kept["layers.0.mlp"])
    torch.testing.assert_close(slopes["layers.0.mlp"], slopes["layers.0"])
    plain = model.forward(batch)
    assert plain.loss == found.loss and not plain.gradients and not plain.activations


def test_gradients_are_those_of_finite_differences(run):
    """Moving an activation along a direction changes the loss by the gradient's product with it."""
    (batch,) = deepy.batches(run, 0, 1)
    model = deepy.open_model(run, dtype="fp64")
    slope = model.forward(batch, keep=["layers.0"], gradients=True).activation_gradients["layers.0"]
    direction = torch.randn(slope.shape[1:], generator=torch.Generator().manual_seed(0), dtype=slope.dtype)

    def quotient(step: float) -> float:
        ahead, behind = (
            model.forward(batch, edit={"layers.0": lambda x, s=s: x + s * direction}).loss for s in (step, -step)
        )
        return (ahead - behind) / (2 * step)

    narrow, wide = quotient(1e-2), quotient(2e-2)  # their difference is three times the error of the narrow one ...
    rounding = 4 * 2**-23 * 4 / 2e-2  # ... but for the rounding of losses of about 4, which are fp32
    assert abs(narrow - (slope.sum(0) * direction).sum().item()) < abs(narrow - wide) + rounding


@pytest.mark.parametrize("name", ["tiny_moe", "tiny_rwkv7", "tiny_mamba2", "tiny_zamba2", "tiny_gpt2"])
def test_every_kind_of_model_opens_with_its_initial_values(name):
    resolved = deepy.resolve(f"test/{name}", "training.activation_checkpointing.mode=full")
    model = deepy.open_model(resolved)
    (batch,) = deepy.batches(resolved, 0, 1)
    found = model.forward(batch, keep=["layers.*"], gradients=True)
    assert len(found.activations) == len(model.model.blocks) == len(found.activation_gradients)
    described = json.loads(tool("config.py", "layers", "--json", f"configs/test/{name}.yml"))
    assert sum(each.numel() for each in found.gradients.values()) <= described["parameters"]
    assert sum(each.numel() for each in model.model.parameters()) == described["parameters"]
    with pytest.raises(KeyError, match="no layer 'layers.77'"):
        model.forward(batch, keep=["layers.77"])
