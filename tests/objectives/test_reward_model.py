"""Reward models: golden values of another implementation, layouts, files, whole runs, and transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig

from megatron import api
from megatron.checkpoint.hf.export import _unskipped
from megatron.config import ConfigError, resolve
from megatron.config.problems import UserError
from megatron.data.errors import DataError
from megatron.data.loader import build_loader
from megatron.model.costs.describe import layers
from megatron.objectives.reward_model.objective import RewardModel
from megatron.parallel.layers.label_costs import LabelsLoss
from megatron.parallel.layout.mesh import ALONE
from megatron.testing.layouts import check_layouts
from megatron.testing.runs import train_on_ranks
from tests.data.make import write_documents
from tests.scripts import script

ROOT = Path(__file__).parents[2]

# TRL 1.16 in float64.
GOLDEN = [({}, 0.565723350311), ({"margins": True}, 0.704420588210), ({"centre": 0.01}, 0.573203806328)]


@pytest.mark.parametrize("options, loss", GOLDEN)
def test_golden_values(options, loss):
    k = torch.arange(4, dtype=torch.float64)
    values = torch.stack([torch.zeros(4), (0.9 * k).sin(), torch.ones(4), (1.1 * k).cos()], 1)
    objective = RewardModel(**options)
    of_labels = LabelsLoss(objective.cost_of_labels, 2, RewardModel.reports)
    sequence = torch.tensor([-1.0, 0, -1, 1]).expand(4, 4)
    weights = torch.tensor([0.0, 1, 0, 1]).double().expand(4, 4) / 8
    columns = {"sequence": sequence, "margin": torch.tensor([0, 0.5, 1, 0.25])[:, None].expand(4, 4)}
    columns = {name: columns[name] for name in objective.columns}
    signed, found = of_labels.weights(-values, weights, columns, ALONE)
    assert float(found) == pytest.approx(loss, rel=1e-10, abs=1e-11)
    assert of_labels.sums is not None and float(of_labels.sums[1]) == 0.75
    assert not signed[:, [0, 2]].any()


def test_squares_are_those_of_both_values():
    values = torch.tensor([[2.0, -1.0]], dtype=torch.float64)
    of_labels = LabelsLoss(RewardModel(squares=0.1).cost_of_labels, 2, RewardModel.reports)
    _, found = of_labels.weights(-values, torch.full((1, 2), 0.5), {"sequence": torch.tensor([[0.0, 1.0]])}, ALONE)
    assert float(found) == pytest.approx(math.log(1 + math.exp(-3)) + 0.5, rel=1e-12)


SHAPE = {
    "model": {
        "layers": "(attention/mlp) x2",
        "hidden_size": 32,
        "vocab_size": 48,
        "attention": {"heads": 4},
        "mlp": {"hidden_size": 64, "activation": "silu", "gated": True},
        "norm": {"type": "rmsnorm"},
    },
    "training": {"steps": 3, "sequence_length": 16, "micro_batch_size": 2, "global_batch_size": 4},
    "tokenizer": {"type": "none", "eod_id": 0},
    "optimizer": {"type": "sgd", "lr": 0.05, "weight_decay": 0.0},
    "logging": {"console": "quiet", "curve": False},
}


@pytest.mark.parametrize("tied", [False, True])
def test_layouts_are_one_process(tied):
    """Against autograd through one pass."""
    objective = {"type": "reward_model", "options": {"margins": True, "centre": 0.02}}
    values = {**SHAPE, "objective": objective, "data": {"reset_attention_at_eod": True}}
    values["model"] = {**SHAPE["model"], "embedding": {"tied": tied}}
    layouts: list[dict[str, Any]] = [{"parallel": {each: 2}} for each in ("tensor", "pipeline", "context")]
    layouts += [{"parallel": {"tensor": 2, "sequence": True}}, {"zero": {"stage": 1}}, {"zero": {"stage": 3}}]
    check_layouts(values, layouts[:3] if tied else layouts)


# -- files and runs ----------------------------------------------------------------------------------------------------

CHOSEN = [[5, 6, 7, 8, 0], [9, 9, 3, 0], [4, 4, 2, 1, 8, 0], [11, 12, 0]]
REJECTED = [[5, 6, 1, 0], [9, 9, 9, 9, 9, 0], [4, 4, 0], [11, 30, 0]]
MARGINS = [0.5, 0.0, 1.0, 0.25]


def pairs(folder: Path, **more: Any) -> dict[str, Any]:
    write_documents(folder / "chosen", CHOSEN)
    write_documents(folder / "rejected", REJECTED)
    np.save(folder / "margins.npy", np.array(MARGINS, np.float32))
    sides = {side: str(folder / side) for side in ("chosen", "rejected")}
    options = {**sides, "margins": str(folder / "margins.npy"), "validation": sides}
    return {"synthetic": "reward_pairs", "options": options | more, "reset_attention_at_eod": True}


def test_values_are_read_at_last_tokens_or_before_the_label_of_gpt_neox(tmp_path):
    """Its files end with two ends of text, and the second one is the label."""

    def rows(**more: Any) -> dict[tuple[int, ...], tuple[list[int], list[float]]]:
        config = resolve({**SHAPE, "objective": OBJECTIVE, "data": pairs(tmp_path, **more)})
        batch = build_loader(config, data_rank=0, data_ranks=1).step(0)
        found = {}
        for number in range(4):
            at = divmod(number, 2)
            places = batch.columns["sequence"][at].tolist()
            assert batch.loss_mask is not None
            assert [0.5 if each >= 0 else 0.0 for each in places] == batch.loss_mask[at].tolist()
            found[tuple(batch.tokens[at][:2].tolist())] = ([places.index(0), places.index(1)], places)
        return found

    last = {tuple(c[:2]): [len(c) - 1, len(c) + len(r) - 1] for c, r in zip(CHOSEN, REJECTED)}
    assert {pair: places for pair, (places, _) in rows().items()} == last
    for name, documents in (("chosen", CHOSEN), ("rejected", REJECTED)):
        write_documents(tmp_path / f"{name}_neox", [[*each, 0] for each in documents])
        labels = [[*[-100] * len(each), 0] for each in documents]
        write_documents(tmp_path / f"{name}_neox_labels", labels, np.int32)
    more = {f"{side}{end}": str(tmp_path / f"{side}_neox{end}") for side in ("chosen", "rejected")
            for end in ("", "_labels")}  # fmt: skip
    before = {tuple(c[:2]): [len(c) - 1, len(c) + 1 + len(r) - 1] for c, r in zip(CHOSEN, REJECTED)}
    assert {pair: places for pair, (places, _) in rows(**more).items()} == before


OBJECTIVE = {"type": "reward_model", "options": {"margins": True, "centre": 0.1}}


def test_a_run_from_a_language_model_is_one_run_on_all_layouts_and_transformers_opens_it(tmp_path):
    """The first loss follows from values that the programming interface gives. Then SGD, whose step is the gradient."""
    start = {**SHAPE, "data": {"synthetic": "copy"}, "run": {"dir": str(tmp_path / "sft")}}
    train_on_ranks(1, start)
    values = {**SHAPE, "objective": OBJECTIVE, "data": pairs(tmp_path), "evaluation": {"at_end": True, "batches": 1}}
    values["checkpoint"] = {"initialize_from": str(tmp_path / "sft")}
    names = ("objective_loss", "preference_margin", "preference_accuracy", "mean_reward", "loss", "grad_norm")

    def run(name: str, ranks: int, *overrides: str) -> tuple[list[list[float]], float]:
        given = {**values, "run": {"dir": str(tmp_path / name)}}
        records = train_on_ranks(ranks, given, overrides)
        held_out = next(each["validation"] for each in records if "validation" in each)
        return [[each[key] for key in names] for each in records if "loss" in each], float(_number(held_out))

    one, held_out = run("one", 1)
    assert one[0][4] == pytest.approx(one[0][0], rel=1e-6)  # `loss` is that of the objective
    model = api.open_model(str(tmp_path / "one"))
    scored = [[model.reward(each) for each in side] for side in (CHOSEN, REJECTED)]
    costs = [math.log1p(math.exp(r - c)) + 0.1 * (c + r) ** 2 for c, r in zip(*scored)]
    assert held_out == pytest.approx(float(np.mean(costs)), rel=1e-5)  # without margins
    layouts = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2", "zero.stage=1", "zero.stage=3"]
    for number, layout in enumerate(layouts):
        found, other = run(f"other{number}", 2, layout, "training.micro_batch_size=1")
        assert found == [pytest.approx(each, rel=3e-5, abs=1e-6) for each in one], layout
        assert other == pytest.approx(held_out, rel=3e-5), layout
    _exchange(tmp_path, scored)


def _number(found: Any) -> float:
    while isinstance(found, dict):
        found = next(iter(found.values()))
    return found


def _exchange(folder: Path, scored: list[list[float]]) -> None:
    """Export, transformers, import, and the command that scores."""

    def tool(name: str, *words: Any) -> None:
        done = script(name, *words)
        assert done.returncode == 0, done.stderr

    (step,) = sorted((folder / "one/checkpoints").glob("step_*"))[-1:]
    tool("checkpoint/to_hf.py", step, folder / "hf", "--verify")
    theirs = AutoModelForSequenceClassification.from_pretrained(folder / "hf", dtype=torch.float32).eval()
    assert type(theirs).__name__.endswith("ForSequenceClassification") and theirs.config.num_labels == 1
    theirs.config.pad_token_id = None
    with torch.no_grad():
        found = [[float(theirs(torch.tensor([each])).logits) for each in side] for side in (CHOSEN, REJECTED)]
    assert found == [pytest.approx(each, rel=1e-4, abs=1e-6) for each in scored]
    tool("checkpoint/from_hf.py", folder / "hf", folder / "back/step_00000000")
    back = api.open_model(str(folder / "back/step_00000000"))
    assert [[back.reward(each) for each in side] for side in (CHOSEN, REJECTED)] == scored
    tool("reward.py", folder / "one", "--tokens", folder / "chosen", "--output", folder / "rewards.npy")
    assert np.load(folder / "rewards.npy").tolist() == pytest.approx(scored[0], rel=1e-6)


def test_the_command_scores_texts(tmp_path):
    """Bytes are the tokens, so the interface can score the same texts."""
    shape = {**SHAPE["model"], "vocab_size": 257}
    values = {**SHAPE, "model": shape, "tokenizer": {"type": "bytes"}, "objective": {"type": "reward_model"}}
    values |= {"data": pairs(tmp_path), "run": {"dir": str(tmp_path / "run")}}
    values["data"]["options"].pop("margins")
    train_on_ranks(1, values)
    texts = tmp_path / "a.jsonl"
    texts.write_text('{"text": "Yes.", "id": 3}\n{"text": "no"}\n')
    command = ("reward.py", tmp_path / "run", "--texts", texts, "--output")
    done = script(*command, tmp_path / "out.jsonl")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    model = api.open_model(str(tmp_path / "run"))
    assert [each["reward"] for each in found] == [model.reward([*b"Yes.", 256]), model.reward([*b"no", 256])]
    assert found[0]["id"] == 3
    with pytest.raises(ValueError, match="has no logits"):
        model.logits(torch.zeros(1, 4, dtype=torch.long))
    texts.write_text('{"text": "Yes."}\n{"words": 1}\n')
    done = script(*command, tmp_path / "b.jsonl")
    assert done.returncode == 2 and "a.jsonl:2" in done.stderr and not list(tmp_path.glob("*b.jsonl*"))
    for wrong, why in (([], "have a token"), ([1, 257], "below 257")):
        with pytest.raises(ValueError, match=why):
            model.reward(wrong)
    with pytest.raises(ValueError, match="loss of pairs only"):
        model.log_probabilities(tmp_path / "chosen")


@pytest.mark.parametrize("pad, end, eod, left", [(7, 7, 0, None), (0, [5, 6], 0, None), (3, [5, 6], 0, 3)])
def test_an_export_keeps_no_filler_that_ends_documents(pad, end, eod, left):
    """transformers reads the value before the last tokens that are filler."""
    theirs = LlamaConfig(vocab_size=48, pad_token_id=pad, eos_token_id=end)
    notes = _unskipped(theirs, resolve({**SHAPE, "data": {"synthetic": "copy"}, "tokenizer": {"eod_id": eod}}))
    assert theirs.pad_token_id == left and len(notes) == (left is None)


def test_costs_count_one_output():
    values = {**SHAPE, "data": {"synthetic": "copy", "reset_attention_at_eod": True}, "objective": OBJECTIVE}
    (head,) = [each for each in layers(resolve(values)) if each.name == "head"]
    assert head.counts.parameters == 32 + 32  # with the norm


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"objective": {"type": "reward_model", "options": {"centre": -1}}}, "centre must be a number from 0"),
        ({"data": {"train": ["a"], "reset_attention_at_eod": True}}, "must be a source of pairs of answers"),
        ({"data": {"synthetic": "copy"}}, "must be true with a reward model"),
        (
            {"data": {"synthetic": "reward_pairs", "reset_attention_at_eod": True}},
            "must have the key validation, with the pairs that are evaluated",
        ),
        (
            {"data": {"synthetic": "reward_pairs", "reset_attention_at_eod": True, "options": {"margins": "a.npy"}}},
            "options.margins must be true if data.options has margins",
        ),
        ({"evaluation": {"tasks": [{"name": "arc_easy"}]}}, "must be empty with a reward model"),
        ({"evaluation": {"samples": {"every": 2, "prompts": ["a"]}}}, "must be null with a reward model"),
        ({"adapter": {"type": "lora", "rank": 2}}, "must be none with a reward model"),
    ],
)
def test_mistakes_are_found_before_a_start(change, rule):
    values = {**SHAPE, "objective": {"type": "reward_model"}}
    values["data"] = {"synthetic": "copy", "reset_attention_at_eod": True}
    with pytest.raises(ConfigError, match=rule):
        resolve({**values, **change})


def test_files_that_do_not_fit_are_refused(tmp_path):
    def refused(**more: Any) -> str:
        config = resolve({**SHAPE, "objective": OBJECTIVE, "data": pairs(tmp_path, **more)})
        with pytest.raises((DataError, UserError)) as found:
            build_loader(config, data_rank=0, data_ranks=1)
        return str(found.value)

    write_documents(tmp_path / "long", [[*range(1, 13)], *REJECTED[1:]])
    write_documents(tmp_path / "many", [[-100, *each[1:]] for each in CHOSEN], np.int32)
    np.save(tmp_path / "few.npy", np.zeros(3, np.float32))
    said = refused(rejected=str(tmp_path / "long"))
    assert "have more than the 16 tokens of a sample, up to 17" in said and "use at least 17" in said
    assert "must have one label that counts" in refused(chosen_labels=str(tmp_path / "many"))
    assert "must have one number for each of 4 documents" in refused(margins=str(tmp_path / "few.npy"))
    assert "must be the path of a .npy file" in refused(margins=1)
    write_documents(tmp_path / "empty", [[5, 6], [], *REJECTED[2:]])
    assert "document 1 must have a token" in refused(rejected=str(tmp_path / "empty"))
    labels = [[*[-100] * (len(each) - 1), 7] for each in CHOSEN]
    write_documents(tmp_path / "other", labels, np.int32)
    assert "a label of document 0 (7) is neither -100 nor its token" in refused(chosen_labels=str(tmp_path / "other"))
    assert "must not have chosen_reference" in refused(chosen_reference="a")
