"""Learning from a teacher: against torch's kl_div in float64, against one process on layouts, and as whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import Config, ConfigError, load, resolve
from megatron.model.costs.describe import teacher_flops, totals
from megatron.model.stack import build_model
from megatron.parallel.layers.cross_entropy import LossOptions, linear_cross_entropy
from megatron.parallel.layers.objective_logits import SoftLabels
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.plan.candidate import Candidate
from megatron.plan.memory import rank_memory
from megatron.plan.shapes import Shapes
from megatron.rehearsal.command import in_own_process
from megatron.rehearsal.report import memory
from megatron.testing.layouts import check_layouts
from megatron.testing.runs import train_on_ranks
from tests.objectives.teachers import write_teacher

WORDS, LENGTH = 48, 16
STUDENT = {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": WORDS, "attention": {"heads": 4}}
TEACHER = {
    "layers": "attention/mlp mamba2 attention/mlp",
    "hidden_size": 48,
    "vocab_size": WORDS,
    "attention": {"heads": 4, "kv_heads": 2},
    "mamba2": {"head_dim": 16, "groups": 2, "state_size": 8},
    "head": {"softcap": 5.0},
}
TRAINING = {"steps": 4, "sequence_length": LENGTH, "micro_batch_size": 1, "global_batch_size": 4, "loss_chunk": 7}
OWN = {"data": {"synthetic": "copy"}, "tokenizer": {"type": "none"}, "optimizer": {"lr": 1e-2}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    values = {"model": TEACHER, "training": {**TRAINING, "seed": 7, "sequence_length": 8}, **OWN}
    return write_teacher(tmp_path_factory.mktemp("teacher"), values)


def student(teacher: str, **objective: Any) -> dict[str, Any]:
    return {
        "model": STUDENT,
        "training": TRAINING,
        "objective": {"type": "distillation", "teacher": teacher, **objective},
        **OWN,
    }


# -- the loss ----------------------------------------------------------------------------------------------------------


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CASES = {  # share, temperature, chunk, multiplier, softcap, z-loss, bias
    "half, T 1": (0.5, 1.0, 4, 1.0, None, 0.0, False),
    "all, T 2": (1.0, 2.0, 0, 1.0, None, 0.0, True),
    "capped, T 0.7": (0.3, 0.7, 3, 0.8, 2.0, 0.0, True),
    "z-loss, T 4": (0.9, 4.0, 11, 1.3, None, 0.01, False),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_torch_on_whole_logits(case):
    share, temperature, chunk, multiplier, softcap, z_loss, bias = CASES[case]
    N, V = 11, 19
    x, weight, labels = drawn((N, 6), 0), drawn((V, 6), 1), torch.arange(N) * 5 % V
    taught, matrix = drawn((N, 4), 2), drawn((V, 4), 3)
    own, theirs = (drawn((V,), 4), drawn((V,), 5)) if bias else (None, None)
    weights = drawn((N,), 6).abs() * (torch.arange(N) % 4 > 0)
    leaves = [each for each in (x, weight, own) if each is not None]

    logits = F.linear(x.requires_grad_(), weight.requires_grad_(), None) * multiplier
    logits = logits if own is None else logits + own.requires_grad_()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    soft = F.linear(taught, matrix, theirs)
    ce = F.cross_entropy(logits, labels, reduction="none")
    kl = F.kl_div(
        F.log_softmax(logits / temperature, 1), F.softmax(soft / temperature, 1), reduction="none", log_target=False
    ).sum(1)
    costs = (1 - share) * ce + share * temperature**2 * kl + z_loss * logits.logsumexp(1).square()
    wanted = (weights * costs).sum()
    gradients = torch.autograd.grad(wanted, leaves)

    labels_of = SoftLabels(taught, matrix, theirs, LossOptions(), share, temperature)
    options = LossOptions(multiplier=multiplier, softcap=softcap, z_loss=z_loss, chunk=chunk)
    loss, found_ce, found_kl = linear_cross_entropy(x, weight, own, labels, weights, labels_of, options=options)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_ce, ce.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_kl, kl.detach(), rtol=1e-11, atol=1e-12)
    for found, expected in zip(torch.autograd.grad(3 * loss, leaves), gradients, strict=True):
        torch.testing.assert_close(found, 3 * expected, rtol=1e-11, atol=1e-12)


def test_of_itself_a_model_learns_only_what_the_labels_say():
    x, weight, labels = drawn((5, 6), 0).requires_grad_(), drawn((9, 6), 1), torch.arange(5)
    soft = SoftLabels(x.detach(), weight, None, LossOptions(), 1.0, 2.0)
    loss, _, kl = linear_cross_entropy(x, weight, None, labels, torch.ones(5), soft)
    assert loss.item() == pytest.approx(0, abs=1e-12) and kl.abs().max() < 1e-12
    assert torch.autograd.grad(loss, x)[0].abs().max() < 1e-12


# -- layouts -----------------------------------------------------------------------------------------------------------


def test_layouts_of_two_ranks_are_one_process(teacher):
    layouts = [
        {"parallel": {"tensor": 2}},
        {"parallel": {"tensor": 2, "sequence": True}, "zero": {"stage": 0}},
        {"zero": {"stage": 3}},
        {"zero": {"stage": 1}},
        {"parallel": {"context": 2}},
    ]
    check_layouts(student(teacher, alpha=0.7, temperature=2.0), layouts)


@pytest.mark.slow
def test_layouts_of_four_ranks_are_one_process(teacher):
    layouts = [
        {"parallel": {"tensor": 2}, "zero": {"stage": 3}, "ranks": 4},
        {"parallel": {"tensor": 2, "context": 2}, "ranks": 4},
        {"parallel": {"context": 2}, "zero": {"stage": 2}, "ranks": 4},
    ]
    values = student(teacher, alpha=0.5, temperature=1.5)
    values["data"] = {**values["data"], "reset_attention_at_eod": True}
    check_layouts(values, layouts)


@pytest.mark.slow
def test_experts_of_both_models_are_spread_over_the_same_ranks(tmp_path):
    moe = {"moe": {"experts": 4, "top_k": 2, "hidden_size": 24, "losses": {"balance": 0.0}}}
    layers = {"layers": "(attention/moe) x2"}
    large = {"model": {**TEACHER, **layers, **moe}, "training": TRAINING, **OWN}
    values = student(write_teacher(tmp_path, large)) | {"model": {**STUDENT, **layers, **moe}}
    check_layouts(
        values, [{"parallel": {"expert": 2}, "ranks": 2}, {"parallel": {"expert": 2, "tensor": 2}, "ranks": 4}]
    )


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_reports_cross_entropy_and_divergence_and_goes_on_from_its_checkpoint(teacher, tmp_path):
    values = student(teacher, alpha=1.0)
    values |= {
        "run": {"dir": str(tmp_path / "run")},
        "checkpoint": {"every": 2},
        "evaluation": {"every": 2},
        "logging": {"every": 1, "predictions": False},
    }
    whole = train_on_ranks(1, values)
    steps = [each for each in whole if "loss" in each]
    assert [each["step"] for each in steps] == [0, 1, 2, 3]
    assert steps[0]["loss"] == pytest.approx(torch.tensor(float(WORDS)).log().item(), rel=0.2)  # of the labels
    assert steps[3]["teacher_divergence"] < steps[0]["teacher_divergence"]

    other = {**values, "run": {"dir": str(tmp_path / "other")}}
    train_on_ranks(1, other, ["training.stop_at_step=2"])
    again = train_on_ranks(1, other)
    for first, second in zip(steps[2:], [each for each in again if "loss" in each][-2:], strict=True):
        for name in ("loss", "grad_norm", "teacher_divergence"):
            assert first[name] == second[name]


def test_work_of_the_teacher_counts_its_forward_pass_alone(teacher):
    config = resolve(student(teacher))
    own = resolve({"model": TEACHER, "training": TRAINING, **OWN})
    assert teacher_flops(config) == totals(own).forward_flops > 0
    assert teacher_flops(resolve({"model": STUDENT, "training": TRAINING, **OWN})) == 0


# -- refusals ----------------------------------------------------------------------------------------------------------


def refusal(values: dict[str, Any], tmp_path: Path, ranks: int = 1) -> str:
    words = [f"{section}={json.dumps(value)}" for section, value in values.items()]
    with pytest.raises(ConfigError) as found:
        load([], [*words, f"run.dir={tmp_path}/run"], ranks=ranks)
    return str(found.value)


def test_another_vocabulary_is_refused(teacher, tmp_path):
    values = student(teacher)
    values["model"] = {**STUDENT, "vocab_size": 64}
    said = refusal(values, tmp_path)
    assert "model.vocab_size = 64" in said and "must be the teacher's, whose embedding has 48 rows" in said


def test_a_layout_that_the_teacher_does_not_fit_is_refused(teacher, tmp_path):
    values = student(teacher) | {"parallel": {"tensor": 4}}
    said = refusal(values, tmp_path, ranks=4)
    assert "objective.teacher" in said and "must fit the run's layout" in said and "mamba2" in said


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        ((), "there is no folder"),
        (("checkpoints/step_00000002/x", "checkpoints/step_00000004/x"), "checkpoints/step_00000004"),
        (("config.json",), "from-hf"),
        (("global_step3/mp_rank_00_model_states.pt",), "from-neox"),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_the_way_to_one(files, advice, tmp_path):
    folder = tmp_path / "model"
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("{}")
    assert advice in refusal(student(str(folder)), tmp_path)


def test_a_checkpoint_whose_configuration_was_changed_is_refused(teacher, tmp_path):
    folder = tmp_path / "step_00000003"
    folder.mkdir()
    text = (Path(teacher) / "meta.json").read_text()
    (folder / "meta.json").write_text(text.replace("softcap: 5.0", "softcap: 6.0"))
    assert text.count("softcap: 5.0") == 1 and "does not have its checksum" in refusal(student(str(folder)), tmp_path)


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_plan_and_rehearsal_know_the_teachers_memory(teacher):
    values = student(teacher) | {"precision": {"compute": "bf16"}, "parallel": {"tensor": 2}}
    config = resolve(values, ranks=4)
    weights = sum(each.numel() * each.element_size() for each in _teachers_weights(config))
    choice = Candidate(tensor=2)
    shapes = Shapes(config, 4)
    assert rank_memory(config, shapes, choice, 0).parts["teacher"] == weights
    seen = in_own_process(config, 4, 0)
    assert memory(seen.allocations)["teacher"] == weights


def _teachers_weights(config: Config) -> list[Tensor]:
    """The names of rank 0, on the meta device."""
    mesh = Mesh.describe(Layout.of(config, 4), 0)
    own = resolve({"model": TEACHER, "training": TRAINING, "precision": {"compute": "bf16"}, **OWN})
    return list(build_model(own, mesh, "meta").parameters())
