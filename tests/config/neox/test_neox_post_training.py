"""GPT-NeoX's files of preferences and reward models: what they become, and runs of it on files that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.testing.runs import train_on_ranks
from tests.config.neox.neox_cases import at, flat, noted, problem_of
from tests.data.make import write_documents

PAIRS = {
    f"{sign}_{name}_{kind}data_paths": [f"{side}_{kind}document"]
    for sign, side in (("pos", "chosen"), ("neg", "rejected"))
    for name in ("train", "valid", "test")
    for kind in ("", "label_")
}
# The keys of its five files that are about the objective and the data.
FILES: dict[str, dict[str, Any]] = {
    "dpo": {"train_impl": "dpo", "dataset_impl": "pairwise", "dpo_fp32": True, "dpo_beta": 0.01, **PAIRS},
    "rm": {"train_impl": "rm", "dataset_impl": "pairwise", "z_loss": 0.25, **PAIRS},
    "kto": {
        **{"train_impl": "kto", "kto_fp32": True, "kto_beta": 0.2, "kto_undesirable_weight": 1.5},
        **{f"{name}_{kind}data_paths": [f"answers_{kind}document"] for name in ("train", "valid", "test")
           for kind in ("", "label_", "reward_")},
    },
    "normal": {f"{name}_{kind}data_paths": [f"answers_{kind}document"] for name in ("train", "valid", "test")
               for kind in ("", "label_")},
}  # fmt: skip
PACKING = {"pack_impl": "unpacked", "allow_chopped": False, "pos_emb": "rotary"}


def test_pairs():
    found = flat(**FILES["dpo"], **PACKING)
    assert found.problems == []
    assert found.values["objective"] == {"type": "dpo", "options": {"beta": 0.01, "reference_free": False}}
    assert (at(found, "data.synthetic"), at(found, "data.reset_attention_at_eod")) == ("pairs", True)
    held = {key: f"{key.removesuffix('_labels')}_{'label_' if 'labels' in key else ''}document"
            for key in ("chosen", "chosen_labels", "rejected", "rejected_labels")}  # fmt: skip
    reference = {f"{side}_reference": f"{side}_document_reference.npy" for side in ("chosen", "rejected")}
    assert at(found, "data.options") == {**held, **reference, "validation": held}
    assert at(found, "training.sequence_length") == 64  # of two answers
    assert noted(found, "deepy data reference --model CHECKPOINT --input chosen_document rejected_document")
    free = flat(**FILES["dpo"], **PACKING, dpo_reference_free=True)
    assert at(free, "data.options") == {**held, "validation": held}


def test_reward_models():
    found = flat(**FILES["rm"], **PACKING)
    assert found.problems == []
    assert found.values["objective"] == {"type": "reward_model", "options": {"squares": 0.25}}
    assert at(found, "data.synthetic") == "reward_pairs" and "chosen_reference" not in at(found, "data.options")


def test_rated_answers():
    found = flat(**FILES["kto"], **PACKING)
    assert found.problems == []
    options = {"beta": 0.2, "desirable_weight": 1.0, "undesirable_weight": 1.5, "kl": False}
    assert found.values["objective"] == {"type": "kto", "options": options}
    held = {"answers": "answers_document", "answers_labels": "answers_label_document"}
    more = {"answers_reference": "answers_document_reference.npy", "rewards": "answers_reward_document"}
    assert at(found, "data.options") == {**held, **more, "validation": held}
    assert noted(found, "objective.options.kl: false", "filler")


REINFORCE: dict[str, Any] = {
    **{"train_impl": "reinforce", "dataset_impl": "online", "reinforce_leave_one_out": True, "fp32_reinforce": True},
    **{"kl_impl": "abs", "online_dataserver_ports": [10000, 10001], "serve_model_weights": True, "eval_iters": 10},
    **{name: value for name, value in FILES["normal"].items()},
}


def test_online_data():
    found = flat(**REINFORCE, **PACKING)
    assert found.problems == []
    options = {"loss": "reinforce", "beta": 0.1, "kl": "abs"}
    assert found.values["objective"] == {"type": "policy", "options": options}
    prompts = {"prompts": "answers_document", "prompt_labels": "answers_label_document"}
    held = {"held_out": "answers_document", "held_out_labels": "answers_label_document", "evaluate": 1000}
    assert found.values["align"] == {"advantage": "leave_one_out", **prompts, **held}
    assert at(found, "training.weight_average") == 1.0 and at(found, "evaluation.at_end") is False
    assert noted(found, "align.rewards must be given", "pickle")
    without = flat(**{**REINFORCE, "kl_div_beta": 0.0, "reinforce_leave_one_out": False}, **PACKING)
    assert without.values["objective"]["options"] == {"loss": "reinforce", "beta": 0.0} and not without.problems
    assert noted(without, "of one rank, which a restart forgets")


@pytest.mark.parametrize(
    "changes, key",
    [
        ({**REINFORCE, "dataset_impl": "gpt2"}, "dataset_impl"),
        ({**REINFORCE, "kl_impl": "full"}, "kl_impl"),
        ({**REINFORCE, "train_label_data_paths": None}, "train_label_data_paths"),
        ({**FILES["dpo"], "pos_train_data_paths": ["a", "b"]}, "pos_train_data_paths"),
        ({**FILES["dpo"], "neg_train_label_data_paths": None}, "neg_train_label_data_paths"),
        ({**FILES["kto"], "train_reward_data_paths": None}, "train_reward_data_paths"),
        ({**FILES["dpo"], "dataset_impl": "gpt2"}, "dataset_impl"),
        ({**FILES["kto"], "dataset_impl": "pairwise"}, "dataset_impl"),
        ({"train_impl": "ppo"}, "train_impl"),
    ],
)
def test_what_cannot_be_read_is_a_problem(changes, key):
    assert len(problem_of(flat(**changes, **PACKING), key).fix) > 5


# -- runs --------------------------------------------------------------------------------------------------------------

CHOSEN = [[5, 6, 7, 8, 0], [9, 9, 3, 0], [4, 4, 2, 1, 8, 0], [11, 12, 0]]
REJECTED = [[5, 6, 1, 0], [9, 9, 9, 9, 9, 0], [4, 4, 0], [11, 30, 0]]


def test_files_as_it_writes_them_train(tmp_path: Path):
    """Labels are -100 or the token, in int32. Reward files have a document of one number for each answer."""
    ends = {"rm": [0]}  # its reward models read two ends of text, and the label is the second one
    for kind, keys in FILES.items():
        folder = tmp_path / kind
        folder.mkdir()
        for side, documents in (("chosen", CHOSEN), ("rejected", REJECTED), ("answers", CHOSEN)):
            whole = [[*each, *ends.get(kind, [])] for each in documents]
            cut = {"rm": -1}.get(kind, 2)
            labels = [[*[-100] * len(each[:cut]), *each[cut:]] for each in whole]
            write_documents(folder / f"{side}_document", whole, np.int32)
            write_documents(folder / f"{side}_label_document", labels, np.int32)
            np.save(folder / f"{side}_document_reference.npy", np.full(sum(map(len, whole)), -4.0, np.float32))
        write_documents(folder / "answers_reward_document", [[1], [-1], [-1], [1]], np.int32)
        given = {name: [str(folder / each) for each in value] if name.endswith("_paths") else value
                 for name, value in keys.items()}  # fmt: skip
        found = flat(**given, **PACKING, train_iters=2, warmup=0.5, eval_interval=2, eval_iters=1)
        assert found.problems == []
        values = {
            **found.values,
            "tokenizer": {"type": "none", "eod_id": 0},
            "run": {"dir": str(tmp_path / f"r{kind}")},
        }
        values["model"] = {**values["model"], "vocab_size": 48}
        values["logging"] = {"console": "quiet", "curve": False}
        values["precision"] = {"compute": "fp32"}
        records = train_on_ranks(1, values)
        name = "loss" if kind == "normal" else "objective_loss"
        assert [np.isfinite(each[name]) for each in records if "loss" in each] == [True, True], kind
        assert any("validation" in each for each in records), kind
