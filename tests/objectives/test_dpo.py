"""Losses of preference pairs: golden values of another implementation, autograd, layouts, files and whole runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron import api
from megatron.config import ConfigError, resolve
from megatron.config.problems import UserError
from megatron.data.errors import DataError
from megatron.data.loader import build_loader
from megatron.objectives.dpo.objective import PreferencePairs
from megatron.objectives.named import objective_of
from megatron.parallel.layers.label_costs import Labels, LabelsLoss
from megatron.parallel.layout.mesh import ALONE
from megatron.testing.layouts import check_layouts
from megatron.testing.runs import train_on_ranks
from tests.data.make import write_documents

LENGTHS = (5, 3, 4, 2, 5, 4)  # of three chosen and three rejected sequences

# TRL 1.16 in float64: loss, and its derivatives by the first log-probability of the first chosen and rejected sequence.
GOLDEN: list[tuple[dict[str, Any], float, float, float]] = [
    ({}, 0.890613042465, -0.015923573964, 0.015923573964),
    ({"label_smoothing": 0.1}, 0.856698858451, -0.012590240631, 0.012590240631),
    ({"loss": "robust", "label_smoothing": 0.1}, 0.933005772483, -0.020090240631, 0.020090240631),
    ({"loss": "hinge"}, 1.339141840144, -0.033333333333, 0.033333333333),
    ({"loss": "ipo"}, 81.636203223167, -2.738464788140, 2.738464788140),
    ({"loss": "ipo", "average": True}, 33.743829437646, -0.625864779572, 1.564661948929),
    ({"average": True}, 0.731961089044, -0.003282334954, 0.008205837385),
    ({"average": True, "beta": 5.0}, 4.302713444184, -0.059327777368, 0.148319443419),
    (
        {"average": True, "beta": 2.0, "margin": 0.5, "reference_free": True},
        *(1.049970689382, -0.012011271944, 0.030028179861),
    ),
    (
        {"average": True, "beta": 2.0, "margin": 0.6, "reference_free": True},  # 0.3 of beta
        *(1.095801303895, -0.013149922477, 0.032874806192),
    ),
    ({"reference_free": True}, 0.703692671555, -0.016658898253, 0.016658898253),
    ({"sft_weight": 1.0}, 2.079852179856, -0.099256907298, 0.015923573964),
    ({"loss": "orpo"}, 1.260718533239, -0.084885448825, 0.002607013684),
]


def golden_pairs() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probabilities [3, 10] of three pairs, weights, and columns. Places 0 to 4 are chosen, 5 to 9 rejected."""
    i, t = torch.arange(6, dtype=torch.float64)[:, None], torch.arange(5, dtype=torch.float64)
    policy, reference = -1.5 + torch.sin(1.3 * i + 0.7 * t), -1.5 + 0.8 * torch.cos(0.9 * i - 0.4 * t)
    counts = t < torch.tensor(LENGTHS)[:, None]

    def paired(rows: Tensor) -> Tensor:
        return torch.cat([rows[:3], rows[3:]], 1)

    labels = paired(counts).sum(1, keepdim=True)
    weights = paired(counts).double() / labels / 3
    sequence = paired((i >= 3).expand(6, 5)).double()
    return paired(policy), weights, {"sequence": sequence, "reference": paired(reference)}


@pytest.mark.parametrize("options, loss, of_chosen, of_rejected", GOLDEN)
def test_golden_values(options, loss, of_chosen, of_rejected):
    log_p, weights, columns = golden_pairs()
    objective = PreferencePairs(**options)
    of_labels = LabelsLoss(objective.cost_of_labels, 2, PreferencePairs.reports)
    of_labels.units = {name: 1 / float(each.sum()) for name, each in objective.counted(weights, columns).items()}
    signed, found = of_labels.weights(-log_p, weights, columns, ALONE)
    assert float(found) == pytest.approx(loss, rel=1e-10, abs=1e-11)
    assert [-float(signed[0, 0]), -float(signed[0, 5])] == pytest.approx([of_chosen, of_rejected], rel=1e-9, abs=1e-11)
    assert not signed[weights == 0].any()


def test_a_policy_that_is_the_reference_costs_ln_2_and_swapped_pairs_turn_the_margin():
    log_p, weights, columns = golden_pairs()
    same = Labels(log_p, weights, {**columns, "reference": log_p}, 2)
    assert PreferencePairs().cost_of_labels(same)[weights > 0].tolist() == pytest.approx([math.log(2)] * 23, rel=1e-12)
    one, other = (Labels(log_p, weights, {**columns, "sequence": each}, 2) for each in _both_ways(columns["sequence"]))
    for each in (one, other):
        PreferencePairs().cost_of_labels(each)
    assert float(one.reported["preference_margin"]) == pytest.approx(-float(other.reported["preference_margin"]))
    assert float(one.reported["preference_accuracy"] + other.reported["preference_accuracy"]) == pytest.approx(1)


def _both_ways(sequence: Tensor) -> tuple[Tensor, Tensor]:
    return sequence, 1 - sequence


def test_several_pairs_in_a_sample_are_those_of_several_samples():
    log_p, weights, columns = golden_pairs()
    cost = PreferencePairs().cost_of_labels(Labels(log_p, weights, columns, 2))
    packed = {name: each.reshape(1, -1) for name, each in columns.items()}
    packed["sequence"] = (columns["sequence"] + 2 * torch.arange(3)[:, None]).reshape(1, -1)
    found = PreferencePairs(pairs=3).cost_of_labels(Labels(log_p.reshape(1, -1), weights.reshape(1, -1), packed, 6))
    torch.testing.assert_close(found.view_as(cost), cost, rtol=1e-12, atol=0)


# -- layouts -----------------------------------------------------------------------------------------------------------

SHAPE = {
    "model": {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": 48, "attention": {"heads": 4}},
    "training": {"steps": 3, "sequence_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "loss_chunk": 7},
    "tokenizer": {"type": "none", "eod_id": 0},
    "optimizer": {"type": "sgd", "lr": 0.05, "weight_decay": 0.0},
}


@pytest.mark.parametrize(
    "options", [{}, {"loss": "ipo", "average": True, "beta": 0.7, "pairs": 2}, {"loss": "orpo", "beta": 0.5}]
)
def test_layouts_are_one_process(options):
    """Two passes with sums over ranks, against autograd through one pass of whole logits."""
    values = {**SHAPE, "objective": {"type": "dpo", "options": options}, "data": {"reset_attention_at_eod": True}}
    layouts: list[dict[str, Any]] = [{"parallel": {each: 2}} for each in ("tensor", "pipeline", "context")]
    layouts += [{"parallel": {"tensor": 2, "sequence": True}}, {"zero": {"stage": 1}}, {"zero": {"stage": 3}}]
    check_layouts(values, layouts)


# -- files and runs ----------------------------------------------------------------------------------------------------

CHOSEN = [[5, 6, 7, 8, 0], [9, 9, 3, 0], [4, 4, 2, 1, 8, 0], [11, 12, 0]]
REJECTED = [[5, 6, 1, 0], [9, 9, 9, 9, 9, 0], [4, 4, 0], [11, 30, 0]]


def pairs(folder, **more: Any) -> dict[str, Any]:
    write_documents(folder / "chosen", CHOSEN)
    write_documents(folder / "rejected", REJECTED)
    # The first two tokens of each document are the prompt.
    for name, documents in (("chosen", CHOSEN), ("rejected", REJECTED)):
        write_documents(folder / f"{name}_labels", [[-100, -100, *each[2:]] for each in documents], np.int32)
        sizes = sum(map(len, documents))
        np.save(folder / f"{name}_reference.npy", -1.0 - np.arange(sizes, dtype=np.float32) / 8)
    options = {f"{side}{what}": str(folder / f"{side}{what}{end}") for side in ("chosen", "rejected")
               for what, end in (("", ""), ("_labels", ""), ("_reference", ".npy"))}  # fmt: skip
    options["validation"] = {side: options[side] for side in ("chosen", "rejected")}
    return {"synthetic": "pairs", "options": options | more, "reset_attention_at_eod": True}


def test_a_sample_has_a_pair_in_two_documents(tmp_path):
    config = resolve({**SHAPE, "objective": {"type": "dpo"}, "data": pairs(tmp_path)})
    loader = build_loader(config, data_rank=0, data_ranks=1)
    batch = loader.step(0)
    rows = batch.tokens.flatten(0, 1).tolist()
    assert sorted(row[: len(CHOSEN[0])] for row in rows) == sorted((each + [0] * 9)[:5] if len(each) >= 5 else
        (each + REJECTED[n])[:5] for n, each in enumerate(CHOSEN))  # fmt: skip
    at = next(place for place, row in enumerate(rows) if row[:5] == CHOSEN[0])
    assert rows[at][:9] == CHOSEN[0] + REJECTED[0]

    def row(whole: Tensor) -> list[float]:
        return whole.flatten(0, 1)[at].tolist()[:9]

    assert row(batch.documents) == [0] * 5 + [1] * 4
    assert batch.loss_mask is not None
    assert row(batch.loss_mask) == pytest.approx([0, 0.2, 0.2, 0.2, 0, 0, 0.2, 0.2, 0])
    assert row(batch.columns["sequence"]) == [-1, 0, 0, 0, -1, -1, 1, 1, -1]
    assert row(batch.columns["reference"]) == [0, -1.25, -1.375, -1.5, 0, 0, -1.25, -1.375, 0]
    again = loader.read(1)  # four pairs: the next pass
    assert sorted(again.tokens.flatten(0, 1).tolist()) == sorted(rows)


def test_runs_on_other_layouts_are_one_run(tmp_path):
    """With SGD, whose step is the gradient. The margin grows, and the loss is ln 2 where policy and reference agree."""

    def steps(name: str, ranks: int, *overrides: str) -> list[list[float]]:
        values = {**SHAPE, "objective": {"type": "dpo"}, "data": pairs(tmp_path), "run": {"dir": str(tmp_path / name)}}
        values["logging"] = {"console": "quiet", "curve": False}
        records = [each for each in train_on_ranks(ranks, values, overrides) if "loss" in each]
        names = ("objective_loss", "preference_margin", "preference_accuracy", "loss", "grad_norm")
        return [[each[key] for key in names] for each in records]

    one = steps("one", 1)
    assert len(one) == 3 and one[-1][0] < one[0][0] and one[-1][1] > one[0][1]
    for number, layout in enumerate(("parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2", "zero.stage=1")):
        found = steps(f"other{number}", 2, layout, *(["training.micro_batch_size=1"] if "pipeline" in layout else []))
        assert found == [pytest.approx(each, rel=2e-5, abs=1e-6) for each in one], layout


def test_a_run_of_orpo_evaluates_its_pairs_and_is_read_by_the_api(tmp_path):
    """Batches of an evaluation have no columns: nothing is counted in them."""
    data = pairs(tmp_path)
    for key in ("chosen_reference", "rejected_reference"):
        del data["options"][key]
    values = {**SHAPE, "objective": {"type": "dpo", "options": {"loss": "orpo"}}, "data": data}
    values |= {"run": {"dir": str(tmp_path / "run")}, "evaluation": {"at_end": True, "batches": 1}}
    assert [each["step"] for each in train_on_ranks(1, values) if "validation" in each] == [3]
    model = api.open_model(str(tmp_path / "run"))
    assert np.isfinite(model.log_probabilities(tmp_path / "chosen")).all()


def test_a_reference_that_the_api_records_is_the_policy_at_its_start(tmp_path):
    """The first step of a run from the same checkpoint has the loss ln 2 and no margin."""
    first = {
        **SHAPE,
        "data": {"synthetic": "copy", "reset_attention_at_eod": True},
        "run": {"dir": str(tmp_path / "sft")},
    }
    train_on_ranks(1, first)
    data, model = pairs(tmp_path), api.open_model(str(tmp_path / "sft"))
    for side in ("chosen", "rejected"):
        np.save(tmp_path / f"{side}_reference.npy", model.log_probabilities(tmp_path / side))
    values = {**SHAPE, "objective": {"type": "dpo"}, "data": data, "run": {"dir": str(tmp_path / "dpo")}}
    values["checkpoint"] = {"initialize_from": str(tmp_path / "sft")}
    step = next(each for each in train_on_ranks(1, values) if "loss" in each)
    assert step["objective_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert step["preference_margin"] == pytest.approx(0, abs=1e-6)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"objective": {"type": "dpo", "options": {"loss": "apo"}}}, "loss must be one of sigmoid, robust, ipo, hinge"),
        ({"objective": {"type": "dpo", "options": {"loss": "ipo", "margin": 1}}}, "margin must go with loss: sigmoid"),
        ({"data": {"synthetic": "pairs", "options": {"chosen": "a"}}}, "must be true with preference pairs"),
        ({"data": {"synthetic": "pairs", "reset_attention_at_eod": True}}, "must have chosen_reference"),
        (
            {"data": {"synthetic": "pairs", "reset_attention_at_eod": True, "options": {"chosen_reference": "a"}}},
            "must have the key validation, with the pairs that are evaluated",
        ),
        ({"training": {**SHAPE["training"], "z_loss": 0.1}}, "must be 0 with an objective that computes costs"),
    ],
)
def test_mistakes_are_found_before_a_start(change, rule):
    values = {**SHAPE, "objective": {"type": "dpo"}, "data": {"synthetic": "copy", "reset_attention_at_eod": True}}
    with pytest.raises(ConfigError, match=rule):
        resolve({**values, **change})


def test_files_that_do_not_fit_are_refused(tmp_path):
    def refused(**more: Any) -> str:
        config = resolve({**SHAPE, "objective": {"type": "dpo"}, "data": pairs(tmp_path, **more)})
        with pytest.raises((DataError, UserError)) as found:
            build_loader(config, data_rank=0, data_ranks=1)
        return str(found.value)

    write_documents(tmp_path / "short", CHOSEN[:2])
    write_documents(tmp_path / "long", [[*range(1, 17)], *REJECTED[1:]])
    np.save(tmp_path / "few.npy", np.zeros(3, np.float32))
    assert "it has 2 documents, chosen has 4" in refused(
        rejected=str(tmp_path / "short"), rejected_labels=None, rejected_reference=str(_zeros(tmp_path, 9))
    )
    assert "1 of 4 pairs have more than the 17 tokens of a sample" in refused(
        rejected=str(tmp_path / "long"), rejected_labels=None, rejected_reference=str(_zeros(tmp_path, 16 + 12))
    )
    assert "its label file has documents of other sizes" in refused(rejected=str(tmp_path / "short"))
    assert "must be a path, not 3" in refused(chosen_labels=3)
    assert "must have one number for each of 18 tokens" in refused(chosen_reference=str(tmp_path / "few.npy"))
    with pytest.raises(DataError, match="must have the column 'reference'"):
        objective = {"type": "dpo"}
        config = resolve({
            **SHAPE,
            "objective": objective,
            "data": {"synthetic": "copy", "reset_attention_at_eod": True},
        })
        build_loader(config, data_rank=0, data_ranks=1).step(0)
    assert objective_of(config).columns == ("sequence", "reference")


def _zeros(folder, tokens: int):
    np.save(folder / "zeros.npy", np.zeros(tokens, np.float32))
    return folder / "zeros.npy"
