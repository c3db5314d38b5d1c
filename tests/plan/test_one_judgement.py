"""A plan, `config check` and a rehearsal agree on each layout: legality, warnings, bytes, and what stands first."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache

import pytest
import yaml

from megatron.config import load, resolve
from megatron.plan.advice import document, remarks, text, warned
from megatron.plan.candidate import Candidate
from megatron.plan.devices import cluster, known_devices
from megatron.plan.memory import TIGHT
from megatron.plan.prediction import choice_of, planned_memory
from megatron.plan.score import _question, runs
from megatron.plan.search import WORTH, Answers, Plan, Question
from megatron.rehearsal.command import in_own_process, main
from tests.paths import ROOT
from tests.plan.test_search import LLAMA
from tests.plan.test_search import question as asked
from tests.selection import covering
from tests.training.matrix import merged

READY = ("pythia/70m", "llama/llama3_8b", "mixtral/8x7b", "mamba2/130m", "zamba2/1.2b", "qwen3/0.6b")
VOCABULARY = "model.vocab_size=50304"


@cache
def _ready(name: str, devices: int) -> Question:
    return Question.of([str(ROOT / "configs" / f"{name}.yml")], [VOCABULARY], cluster(devices, "h100"))


@cache
def _answered(name: str, devices: int) -> Answers:
    return _ready(name, devices).answers()


def _checked(tmp_path, name: str, question: Question, plan: Plan):
    """Judgement of the launcher on the run's own file with the plan's lines over it, as a user would write them."""
    own = tmp_path / "layout.yml"
    own.write_text(question.lines(plan.choice))
    files = [str(ROOT / "configs" / f"{name}.yml"), str(own)]
    overrides = [VOCABULARY, "data.synthetic=copy", "data.train=[]"]
    return load(files, overrides, ranks=question.at.devices, check_inputs=False, here=False)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        *covering(READY, (8, 64)),
        *(pytest.param(name, 256, marks=pytest.mark.slow) for name in ("llama/llama3_8b", "pythia/70m")),
    ],
)
def test_each_proposed_layout_is_the_one_that_check_sees(tmp_path, name, devices):
    """Its lines of YAML make that layout, and each warning of `config check` stands in the plan."""
    question = _ready(name, devices)
    answers = _answered(name, devices)
    shown = answers.distinct[:8]
    if not shown:
        assert name == "mixtral/8x7b" and devices == 8 and answers.closest is not None
        return
    said, rows = " ".join(warned(answers, shown)), document(replace(answers, plans=shown))["plans"]
    by_layout = {json.dumps(row["layout"]): row for row in rows}
    for plan in shown:
        found = _checked(tmp_path, name, question, plan)
        assert choice_of(found.config) == plan.choice
        assert found.config.zero.overlap is plan.choice.overlaps
        warnings = [f"{each.key}: {each.rule}" for each in found.warnings if each.key.split(".")[0] != "data"]
        assert by_layout[json.dumps(vars(plan.choice))]["warnings"] == warnings
        for each in found.warnings:
            assert re.sub("[0-9]+", "", each.rule) in re.sub("[0-9]+", "", said), each.rule


def test_lines_undo_what_a_file_says_of_its_layout(tmp_path):
    """A file with a layout of its own gets the one that was planned."""
    own = {"parallel": {"tensor": 4, "sequence": True, "pipeline_split": "uniform"}, "zero": {"stage": 2},
           "training": {"accumulation": 2, "activation_checkpointing": {"mode": "full", "every": 2}}}  # fmt: skip
    values = merged(LLAMA, own)
    question = asked(values)
    choice = Candidate(micro_batch=2)
    lines = yaml.safe_load(question.lines(choice))
    config = resolve(merged(values, lines), ranks=8)
    assert choice_of(config) == choice and config.parallel.pipeline_split == "parameters"


def test_a_layout_near_the_limit_is_first_only_where_it_is_much_faster():
    for name, devices in (("llama/llama3_8b", 64), ("mixtral/8x7b", 64), ("llama/llama3.2_1b", 8)):
        plans = _answered(name, devices).plans
        roomy = [plan for plan in plans if plan.share <= TIGHT]
        assert plans[0].share <= TIGHT or not roomy or plans[0].step.seconds * WORTH <= roomy[0].step.seconds


@pytest.mark.parametrize("name", ["pythia/70m", "smollm3/3b", "mamba2/130m"])
def test_what_waits_for_python_does_not_come_first_without_that_wait(name):
    """ZeRO 3 with many small micro-batches: the wait is in its step, so nothing faster stands behind it."""
    question = _ready(name, 8)
    plans = question.answers({"micro_batch": 1}).plans
    seconds = [plan.step.seconds for plan in plans if plan.share <= TIGHT]
    assert seconds == sorted(seconds)
    for plan in plans[:1]:
        assert not any("Python" in each for each in remarks(question, plan)) or len(plans) == 1


def test_a_precision_that_the_files_do_not_say_is_named_by_both(capsys):
    values = {key: value for key, value in LLAMA.items() if key != "precision"}
    assert "without it a run takes fp32" in text(asked(values).answers())
    assert "without it" not in text(asked(LLAMA).answers())
    file = str(ROOT / "configs" / "test" / "tiny_llama.yml")
    assert main(["--ranks=1", "--device=h100", file, "data.synthetic=copy"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any(", fp32 (not in the files, where `deepy plan` proposes bf16)" in line for line in shown)
    assert "deepy plan" in shown[-2] and re.search("rank 0 fits into", shown[-1])


# RMSNorm, gated networks and grouped heads, as ready configurations of today have them.
RMS = {
    "model": {
        "layers": "(attention/mlp) x4", "hidden_size": 256, "vocab_size": 512, "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "kv_heads": 2, "position": "rotary"}, "mlp": {"hidden_size": 704, "gated": True},
    },
    "training": {"steps": 1, "sequence_length": 512, "micro_batch_size": 2, "global_batch_size": 16},
    "precision": {"compute": "bf16"}, "zero": {"bucket_size": 2000}, "data": {"synthetic": "copy"},
}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"zero": {"stage": 2, "overlap": True}},
        {"zero": {"stage": 3, "overlap": True}},
        {"parallel": {"tensor": 2, "sequence": True}},
        {"training": {"activation_checkpointing": {"mode": "selective"}}},
    ],
    ids=["ZeRO 1", "ZeRO 2", "ZeRO 3", "tensor", "selective"],
)
def test_plan_and_rehearsal_count_the_same_bytes(more):
    """Of tensors, within 20 %: temporary copies of one layer, which formulas do not count, are so much of four."""
    config = resolve(merged(RMS, more), ranks=4)
    planned = planned_memory(config, 4, known_devices()[0]["h100"])
    tensors = sum(size for part, size in planned.parts.items() if part not in ("runtime", "fragments"))
    assert in_own_process(config, 4, 0, gpu=True).peak == pytest.approx(tensors, rel=0.2)


def test_every_published_run_has_a_layout_that_the_launcher_starts():
    for run in runs():
        assert _question(run.number).refusal(run.choice) is None, run.values
