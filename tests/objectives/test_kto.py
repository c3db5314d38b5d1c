"""KTO: golden values of another implementation, layouts, files and whole runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron import api
from megatron.config import ConfigError, resolve
from megatron.config.problems import UserError
from megatron.data.errors import DataError
from megatron.data.loader import build_loader
from megatron.data.plan import SyntheticPlan
from megatron.data.plan_builder import build_plan
from megatron.data.preferences.answers import Answers
from megatron.data.preferences.pairs import mismatches, read_rewards
from megatron.objectives.kto.objective import KTO
from megatron.parallel.layers.label_costs import Labels, LabelsLoss
from megatron.parallel.layout.mesh import ALONE
from megatron.rehearsal.rank import rehearse_rank
from megatron.testing.layouts import check_layouts
from megatron.testing.runs import train_on_ranks
from tests.data.make import write_documents
from tests.scripts import script

LENGTHS = (5, 3, 4, 2, 5, 4)
ROOT = Path(__file__).parents[2]

# TRL 1.16 in float64: loss, and its derivatives by the first log-probability of answers 0 and 3.
GOLDEN: list[tuple[dict[str, Any], float, tuple[float, float] | None]] = [
    ({}, 0.504604867257, (-0.004165732164, 0.004151904802)),
    ({"desirable_weight": 1.33}, 0.586372655853, None),
    ({"kl": False}, 0.504709063904, None),
]


@pytest.mark.parametrize("options, loss, slopes", GOLDEN)
def test_golden_values(options, loss, slopes):
    i, t = torch.arange(6, dtype=torch.float64)[:, None], torch.arange(5, dtype=torch.float64)
    counts = t < torch.tensor(LENGTHS)[:, None]
    weights = counts.double() / counts.sum(1, keepdim=True) / 6
    policy, reference = -1.5 + torch.sin(1.3 * i + 0.7 * t), -1.5 + 0.8 * torch.cos(0.9 * i - 0.4 * t)
    sequence = torch.where(counts, 0.0, -1.0)
    rewards = torch.tensor([1.0, -1, 1, 0, -2.5, 3])[:, None].expand(6, 5)
    objective = KTO(**options)
    of_labels = LabelsLoss(objective.cost_of_labels, 1, KTO.reports)
    wave = torch.sin(0.5 * i + 0.3 * t)
    of_probes = Labels(-1.4 + wave, weights, {"sequence": sequence, "reference": -1.6 + wave}, 1)
    of_labels.known = {name: each.mean() for name, each in objective.of_probes(of_probes).items()}
    assert float(of_labels.known["kl"]) == pytest.approx(0.766666666667, rel=1e-11)
    columns = {"sequence": sequence, "reference": reference, "reward": rewards}
    signed, found = of_labels.weights(-policy, weights, columns, ALONE)
    assert float(found) == pytest.approx(loss, rel=1e-10, abs=1e-11)
    if slopes:
        assert [-float(signed[0, 0]), -float(signed[3, 0])] == pytest.approx(slopes, rel=1e-9, abs=1e-11)
    assert not signed[~counts].any()


def test_a_divergence_below_0_counts_as_0():
    ones = torch.ones(1, 2, dtype=torch.float64)
    columns = {"sequence": 0 * ones, "reference": -ones, "reward": ones}
    both = [
        KTO().cost_of_labels(Labels(-2 * ones, ones, columns, 1, known={"kl": kl}))[0, 0].item() for kl in (-3.0, 0.0)
    ]
    assert both[0] == both[1] == pytest.approx(1 - 1 / (1 + np.exp(0.2)))


SHAPE = {
    "model": {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": 48, "attention": {"heads": 4}},
    "training": {"steps": 3, "sequence_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "loss_chunk": 7},
    "tokenizer": {"type": "none", "eod_id": 0},
    "optimizer": {"type": "sgd", "lr": 0.5, "weight_decay": 0.0},
    "logging": {"console": "quiet", "curve": False},
}


def test_layouts_are_one_process():
    """Two passes with sums over ranks, against autograd through one pass of whole logits."""
    options = {"kl": False, "beta": 0.5, "undesirable_weight": 1.5}
    layouts: list[dict[str, Any]] = [{"parallel": {each: 2}} for each in ("tensor", "pipeline", "context")]
    layouts += [{"parallel": {"tensor": 2, "sequence": True}}, {"zero": {"stage": 1}}, {"zero": {"stage": 3}}]
    check_layouts({**SHAPE, "objective": {"type": "kto", "options": options}}, layouts)


# -- files and runs ----------------------------------------------------------------------------------------------------

ANSWERS = [[5, 6, 7, 8, 0], [9, 9, 3, 0], [9, 9, 2, 1, 8, 0], [5, 12, 4, 0], [7, 7, 30, 0]]
REWARDS = [1.0, -1.0, 0.5, 1.0, -2.0]


def rated(folder: Path, **more: Any) -> dict[str, Any]:
    """Files of answers whose first two tokens are the prompt, as a user makes them."""
    write_documents(folder / "answers", ANSWERS)
    write_documents(folder / "answers_labels", [[-100, -100, *each[2:]] for each in ANSWERS], np.int32)
    np.save(folder / "rewards.npy", np.array(REWARDS, np.float32))
    prefixes = ["--answers", folder / "answers", "--labels", folder / "answers_labels"]
    made = script("data/mismatch.py", *prefixes, "--output", folder / "mismatched", "--overwrite")
    assert made.returncode == 0, made.stderr
    options = {f"{side}{end}": str(folder / f"{side}{end}") for side in ("answers", "mismatched")
               for end in ("", "_labels")}  # fmt: skip
    options |= {f"{side}_reference": str(folder / f"{side}_reference.npy") for side in ("answers", "mismatched")}
    for side in ("answers", "mismatched"):
        tokens = Answers(str(folder / side)).tokens.tokens
        np.save(options[f"{side}_reference"], -4.2 - np.arange(tokens, dtype=np.float32) / 64)
    options |= {"rewards": str(folder / "rewards.npy")}
    return {
        "synthetic": "rated",
        "reset_attention_at_eod": True,
        "options": options | {"validation": {"answers": options["answers"]}} | more,
    }


def test_mismatched_answers_follow_the_prompts_of_others(tmp_path):
    """Document 1 skips document 2, which has the same prompt. The last document's next one is the first."""
    rated(tmp_path)
    made = Answers(str(tmp_path / "mismatched"), str(tmp_path / "mismatched_labels"))
    found = [made.tokens[n].tolist() for n in range(5)]
    assert found == [[5, 6, 3, 0], [9, 9, 4, 0], [9, 9, 4, 0], [5, 12, 30, 0], [7, 7, 7, 8, 0]]
    assert [made.counts(n).tolist() for n in range(5)] == [[False, False, *[True] * (len(each) - 2)] for each in found]
    given = Answers(str(tmp_path / "answers"), str(tmp_path / "answers_labels"))
    assert [partner for _, _, partner in mismatches(given)] == [1, 3, 3, 4, 0]
    for documents, labels, rule in (
        ([[5, 6, 7], [5, 6, 8]], [[-100, -100, 7], [-100, -100, 8]], "must have different prompts"),
        ([[5, 6, 7], [4, 6, 8]], [[5, -100, -100], [-100, -100, 8]], "document 0 has no label"),
    ):
        write_documents(tmp_path / "bad", documents)
        write_documents(tmp_path / "bad_labels", labels, np.int32)
        with pytest.raises(DataError, match=rule):
            mismatches(Answers(str(tmp_path / "bad"), str(tmp_path / "bad_labels")))


def test_the_first_step_is_the_formula_and_other_layouts_are_one_run(tmp_path):
    """The formula from log-probabilities that the programming interface computes, over the whole batch. Then SGD, whose
    step is the gradient, on layouts whose ranks have other answers, mismatched answers and micro-batches."""
    start = {**SHAPE, "data": {"synthetic": "copy", "reset_attention_at_eod": True}}
    train_on_ranks(1, {**start, "run": {"dir": str(tmp_path / "sft")}})
    data = rated(tmp_path)
    names = ("objective_loss", "preference_margin", "preference_accuracy", "reference_kl", "loss", "grad_norm")
    values = {**SHAPE, "objective": {"type": "kto", "options": {"beta": 0.7, "desirable_weight": 1.2}}, "data": data}
    values["checkpoint"] = {"initialize_from": str(tmp_path / "sft")}

    def steps(name: str, ranks: int, *overrides: str) -> list[list[float]]:
        run = {**values, "run": {"dir": str(tmp_path / name)}}
        return [[each[key] for key in names] for each in train_on_ranks(ranks, run, overrides) if "loss" in each]

    one = steps("one", 1)
    start = json.loads((tmp_path / "one/ledger.jsonl").read_text().splitlines()[0])
    for key in ("answers_reference", "mismatched", "mismatched_labels", "validation.answers"):
        path = data["options"].get(key, data["options"]["answers"])
        content = Path(path if key.endswith("reference") else f"{path}.bin").read_bytes()
        assert start["files"][key] == hashlib.sha256(content).hexdigest()
    model = api.open_model(str(tmp_path / "sft"))
    gained = {side: _gained(model, data["options"], side) for side in ("answers", "mismatched")}
    batch = build_loader(resolve(values), data_rank=0, data_ranks=1).step(0)
    rows = batch.tokens.flatten(0, 1).tolist()
    documents = [next(n for n, each in enumerate(ANSWERS) if row[: len(each)] == each) for row in rows]
    kl = max(0.0, float(np.mean([gained["mismatched"][n] for n in documents])))
    z = [0.7 * (gained["answers"][n] - kl) * (1 if REWARDS[n] > 0 else -1) for n in documents]
    costs = [(1.2 if REWARDS[n] > 0 else 1.0) * (1 - 1 / (1 + np.exp(-each))) for n, each in zip(documents, z)]
    assert kl > 0.01 and one[0][3] == pytest.approx(kl, rel=1e-4)
    assert one[0][0] == pytest.approx(float(np.mean(costs)), rel=1e-5)
    assert one[0][2] == np.mean([each > 0 for each in z])
    layouts = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2", "zero.stage=1", "zero.stage=3"]
    for number, layout in enumerate(layouts):
        found = steps(f"other{number}", 2, layout, "training.micro_batch_size=1")
        assert found == [pytest.approx(each, rel=3e-5, abs=1e-6) for each in one], layout


def _gained(model, options: dict[str, Any], side: str) -> list[float]:
    """Sum of log(policy / reference) over the labels of each document, by a loop."""
    file = Answers(*(options[f"{side}{end}"] for end in ("", "_labels", "_reference")))
    differences = model.log_probabilities(options[side]).astype(np.float64) - np.load(options[f"{side}_reference"])
    firsts = np.cumsum([0, *file.sizes])
    return [float(differences[firsts[n] : firsts[n + 1]][file.counts(n)].sum()) for n in range(len(file))]


def test_a_command_records_the_reference(tmp_path):
    start = {**SHAPE, "data": {"synthetic": "copy"}, "run": {"dir": str(tmp_path / "sft")}}
    train_on_ranks(1, start)
    write_documents(tmp_path / "answers", ANSWERS)
    words = ("data/reference.py", "--model", tmp_path / "sft", "--input", tmp_path / "answers")
    made = script(*words)
    assert made.returncode == 0, made.stderr
    wanted = api.open_model(str(tmp_path / "sft")).log_probabilities(tmp_path / "answers")
    assert np.array_equal(np.load(tmp_path / "answers_reference.npy"), wanted)
    again = script(*words)
    assert again.returncode == 2 and "it must not exist yet" in again.stderr


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"objective": {"type": "kto", "options": {"beta": 0}}}, "beta must be a number from 1e-06"),
        ({"data": {"train": ["a"]}}, "must be a source of rated answers"),
        (
            {"data": {"synthetic": "rated", "options": {"answers": "a"}}},
            "must have rewards, answers_reference, mismatched",
        ),
        (
            {"data": {"synthetic": "rated", "options": {"answers": "a"}}},
            "must have the key validation, with the answers that are evaluated",
        ),
        ({"optimizer": {"type": "schedule_free_adamw", "lr": 1e-3}}, "must have one set of weights with kl: true"),
        ({"training": {**SHAPE["training"], "z_loss": 0.1}}, "must be 0 with an objective that computes costs"),
    ],
)
def test_mistakes_are_found_before_a_start(change, rule):
    values = {**SHAPE, "objective": {"type": "kto"}, "data": {"synthetic": "copy"}}
    with pytest.raises(ConfigError, match=rule):
        resolve({**values, **change})


def test_files_that_do_not_fit_are_refused(tmp_path):
    def refused(**more: Any) -> str:
        config = resolve({**SHAPE, "objective": {"type": "kto"}, "data": rated(tmp_path, **more)})
        with pytest.raises((DataError, UserError)) as found:
            build_loader(config, data_rank=0, data_ranks=1)
        return str(found.value)

    write_documents(tmp_path / "few", ANSWERS[:2])
    write_documents(tmp_path / "pairs", [[1], [1, 2], [1], [1], [1]], np.int32)
    write_documents(tmp_path / "ones", [[1], [-1], [1], [1], [-1]], np.int32)
    np.save(tmp_path / "short.npy", np.zeros(3, np.float32))
    np.save(tmp_path / "nan.npy", np.full(5, np.nan, np.float32))
    assert "it has 2 documents, answers has 5" in refused(
        mismatched=str(tmp_path / "few"), mismatched_labels=None, mismatched_reference=str(_zeros(tmp_path, 9))
    )
    long = [[*each, *[7] * 12, 0] for each in ANSWERS]
    write_documents(tmp_path / "long", long)
    more = {"mismatched": str(tmp_path / "long"), "mismatched_labels": None}
    said = refused(**more, mismatched_reference=str(_zeros(tmp_path, sum(map(len, long)))))
    assert "have more than the 17 tokens of a sample" in said and "deepy data mismatch --longest 17" in said
    assert "both files of answers must have labels" in refused(mismatched_labels=None)
    assert "must have one number for each of 5 documents" in refused(rewards=str(tmp_path / "short.npy"))
    assert "must be finite" in refused(rewards=str(tmp_path / "nan.npy"))
    assert "must have 5 documents of one number" in refused(rewards=str(tmp_path / "pairs"))
    assert "must not have answer_labels" in refused(answer_labels="a")
    assert read_rewards(str(tmp_path / "ones"), 5).tolist() == [1, -1, 1, 1, -1]


def _zeros(folder: Path, tokens: int) -> Path:
    np.save(folder / "zeros.npy", np.zeros(tokens, np.float32))
    return folder / "zeros.npy"


def test_probes_are_checked_as_samples_are(tmp_path):
    """An id beyond the vocabulary would have no row in any rank's part of the embedding."""
    plan = build_plan(resolve({**SHAPE, "objective": {"type": "kto"}, "data": rated(tmp_path)}))
    assert isinstance(plan, SyntheticPlan)
    columns = KTO.columns_of_probes
    assert set(plan.probe(0, columns).columns or {}) == set(columns)
    plan.vocabulary = 4
    with pytest.raises(DataError, match="probe 0 of rated must have ids below model.vocab_size = 4"):
        plan.probe(0, columns)
    plan = build_plan(resolve({**SHAPE, "data": {"synthetic": "copy"}}))
    assert isinstance(plan, SyntheticPlan)
    with pytest.raises(DataError, match="copy has no probes"):
        plan.probe(0, columns)


def test_a_rehearsal_needs_no_values_of_probes(tmp_path):
    values = {**SHAPE, "objective": {"type": "kto"}, "data": rated(tmp_path)}
    assert rehearse_rank(resolve(values), 1, 0).peak > 0
