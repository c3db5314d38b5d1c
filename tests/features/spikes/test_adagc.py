"""AdaGC: its rule against the paper's. Whole runs against that rule, one process, and themselves after a restart."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from megatron.checkpoint import open_checkpoint
from megatron.config import resolve
from megatron.engine.state import Owned
from megatron.features.spikes.options import AdaGCSection
from megatron.features.spikes.rule import AdaGC
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.shard import LogicalTensor, Role
from megatron.rehearsal.command import in_own_process
from tests.rehearsal.counted import counted
from tests.training.test_run import job, losses, tensors
from tests.workers import run as on_ranks

SIZES = {"a": 12, "b": 7, "c": 1}


def paper(
    gradients: list[dict[str, np.ndarray]], limit: float, threshold: float, decay: float, warmup: int
) -> list[dict[str, np.ndarray]]:
    """Algorithm 1 of arXiv 2502.11034, line by line in float64."""
    norms = dict.fromkeys(SIZES, np.inf)
    clipped = []
    for step, each in enumerate(gradients):
        out = {}
        whole = np.sqrt(sum((values**2).sum() for values in each.values()))
        for name, values in each.items():
            norm = np.sqrt((values**2).sum())
            if step < warmup:
                factor = min(limit / whole, 1.0)
                norms[name] = min(norms[name], factor * norm)
            else:
                factor = min(threshold * norms[name] / norm, 1.0)
                norms[name] = decay * norms[name] + (1 - decay) * factor * norm
            out[name] = factor * values
        clipped.append(out)
    return clipped


def state_of(owned: list[Owned]) -> SimpleNamespace:
    return SimpleNamespace(
        owned=lambda: iter(owned), parameters=[SimpleNamespace(logical=each.tensor) for each in owned]
    )


def test_the_rule_is_that_of_the_paper() -> None:
    draw, steps, warmup = np.random.default_rng(0), 60, 10
    gradients = [{name: draw.normal(0, 1, size) for name, size in SIZES.items()} for _ in range(steps)]
    for step, name in ((4, "a"), (20, "b"), (21, "b"), (40, "a"), (41, "c")):
        gradients[step][name] *= 50
    expected = paper(gradients, 2.0, 1.05, 0.98, warmup)
    parameters = {name: torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)) for name, size in SIZES.items()}
    owned = [
        Owned(LogicalTensor(name, (size,), Role.NORM), (0, 1), 0, size, parameters[name], 0)
        for name, size in SIZES.items()
    ]
    state = state_of(owned)
    options = AdaGCSection(warmup=warmup)
    rule = AdaGC(options, 2.0, state, Mesh.single(), torch.device("cpu"))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    for step, each in enumerate(gradients):
        if step == 30:  # a resume: what is kept is all there is
            kept, rule = rule.state(), AdaGC(options, 2.0, state, Mesh.single(), torch.device("cpu"))  # type: ignore
            rule.restore(kept)
        for name, values in each.items():
            parameters[name].grad = torch.from_numpy(values.copy())
        rule.begin()
        rule(optimizer, float(np.sqrt(sum((values**2).sum() for values in each.values()))))
        rule.finish(True)
        for name in SIZES:
            np.testing.assert_allclose(parameters[name].grad.numpy(), expected[step][name], rtol=1e-12)
    assert rule.updates == steps


def test_a_tensor_without_a_gradient_keeps_its_norm() -> None:
    """The least norm of the first steps would be 0, and the tensor would never move again."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    owned = [Owned(LogicalTensor("a", (3,), Role.NORM), (0, 1), 0, 3, parameter, 0)]
    state = state_of(owned)
    rule = AdaGC(AdaGCSection(warmup=2), 1.0, state, Mesh.single(), torch.device("cpu"))  # type: ignore[arg-type]
    optimizer, seen = torch.optim.SGD([parameter], lr=1.0), []
    for values in ([3.0, 0.0, 4.0], [0.0] * 3, [0.0] * 3, [30.0, 0.0, 40.0]):
        parameter.grad = torch.tensor(values)
        rule.begin()
        rule(optimizer, float(torch.tensor(values).norm()))
        rule.finish(True)
        seen.append(float(parameter.grad.norm()))
    assert seen == pytest.approx([1.0, 0.0, 0.0, 1.05])


YAML = """
model: {layers: "(attention/mlp) x2", hidden_size: 16, vocab_size: 64, attention: {heads: 2}}
training: {steps: 10, sequence_length: 16, micro_batch_size: 1, global_batch_size: 4}
optimizer: {type: sgd, lr: 0.5, momentum: 0.0, weight_decay: 0.0, gradient_clipping: 1.5}
schedule: {type: constant, warmup_steps: 0}
data: {synthetic: copy}
tokenizer: {type: none}
evaluation: {at_end: false}
checkpoint: {every: 1, steps: [0]}
logging: {console: quiet, curve: false}
spikes: {action: adagc, adagc: {warmup: 3, decay: 0.9}}
"""
LIMIT, WARMUP, DECAY, THRESHOLD, LR, STEPS = 1.5, 3, 0.9, 1.05, 0.5, 10
LAYOUTS = {
    "tensor, zero 0": ("parallel.tensor=2", "zero.stage=0"),
    "pipeline, zero 1": ("parallel.pipeline=2", "zero.stage=1"),
    "zero 1": ("zero.stage=1",),
    "zero 2": ("zero.stage=2",),
    "zero 3": ("zero.stage=3",),
}


def norms(folder: Path, name: str, step: int) -> dict[str, float]:
    path = folder / name / "checkpoints" / f"step_{step:08d}"
    return open_checkpoint(path).meta.extra["spikes"]["adagc"]["norms"]


def moved(folder: Path, name: str, step: int) -> dict[str, tuple[float, float]]:
    """By what each tensor's clipped gradient moved it, and the bound of that: with plain descent the change is it times
    the rate. Each weight is rounded to half its last digit."""
    before, after = (tensors(folder, each, name) for each in (step, step + 1))
    eps = torch.finfo(torch.float32).eps
    return {
        key[0]: (
            float((after[key] - before[key]).double().norm()) / LR,
            float(torch.maximum(before[key].abs(), after[key].abs()).double().norm()) * eps / LR + 1e-9,
        )
        for key in before
        if key[1] == "master"
    }


def every_layout(folder: str) -> dict[str, list[dict]]:
    found = {name: job(folder, 2, *words, f"run.dir={folder}/{name}") for name, words in LAYOUTS.items()}
    words = LAYOUTS["zero 2"]
    job(folder, 2, *words, f"run.dir={folder}/parts", "training.stop_at_step=6")
    return {**found, "parts": job(folder, 2, *words, f"run.dir={folder}/parts")}


@pytest.mark.tour
def test_runs_clip_each_tensor_on_every_layout(tmp_path: Path) -> None:
    (tmp_path / "tiny.yml").write_text(YAML)
    alone = on_ranks(1, partial(job), str(tmp_path), 1, f"run.dir={tmp_path}/alone")[0]
    clipped = 0
    for step in range(STEPS):
        change, after = moved(tmp_path, "alone", step), norms(tmp_path, "alone", step + 1)
        assert change.keys() == after.keys() and len(after) > 10
        before = norms(tmp_path, "alone", step) if step else dict.fromkeys(after, np.inf)
        if step < WARMUP:
            whole = np.sqrt(sum(size**2 for size, _ in change.values()))
            assert whole == pytest.approx(min(LIMIT, alone[step]["grad_norm"]), rel=1e-4)
        for name, (size, off) in change.items():
            if step < WARMUP:
                want = min(before[name], size)
            else:
                assert size <= THRESHOLD * before[name] + off, (step, name)
                clipped += size > THRESHOLD * before[name] - off
                want = DECAY * before[name] + (1 - DECAY) * size
            assert after[name] == pytest.approx(want, rel=1e-6, abs=off), (step, name)
    assert clipped > 10
    found = on_ranks(2, every_layout, str(tmp_path))[0]
    for name in LAYOUTS:
        assert losses(found[name]) == pytest.approx(losses(alone), rel=1e-5), name
        ours, theirs = norms(tmp_path, name, STEPS), norms(tmp_path, "alone", STEPS)
        assert ours == pytest.approx(theirs, rel=1e-4), name
    assert losses(found["parts"]) == losses(found["zero 2"]), "decided as if it had never stopped"
    assert norms(tmp_path, "parts", STEPS) == norms(tmp_path, "zero 2", STEPS)


def test_a_rehearsal_has_the_bytes_of_a_run():
    values = {**yaml.safe_load(YAML), "zero": {"stage": 1, "bucket_size": 2000}}
    real = on_ranks(2, counted, values, 2)
    for rank in range(2):
        found = in_own_process(resolve(values, ranks=2), 2, rank)
        assert (found.peak, found.kept) == pytest.approx((real[rank].peak, real[rank].kept), rel=0.05)
        assert sorted(found.messages) == sorted(real[rank].messages)
