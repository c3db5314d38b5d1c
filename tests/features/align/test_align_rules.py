"""Refusals before a round of reinforcement learning, and the keys that the launcher reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.config import ConfigError, load, resolve
from megatron.data.errors import DataError
from megatron.data.tokenizer import build_tokenizer
from megatron.features.align.check import before_start
from megatron.features.align.problems import Problems
from tests.features.align.test_rounds import values
from tests.paths import ROOT

UNWRITABLE = "tests.features.align.judges:unwritable"


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"align": {"rewards": [{"type": "exakt"}]}}, "must be one of exact, number, math"),
        ({"align": {"rewards": [{"type": "nowhere.there:judge"}]}}, "there is no module nowhere.there"),
        ({"align": {"rewards": []}}, "must have a reward"),
        ({"align": {"group": 3}}, "must divide the 8 completions of a round"),
        ({"align": {"tokens": 16}}, "must leave room for a prompt"),
        ({"align": {"difficulty": [3, 1]}}, "must be two numbers of at least 1 in order"),
        ({"align": {"prompts": "a.jsonl"}}, "must not both be given"),
        ({"align": {"stop": ""}}, "must not be empty"),
        ({"align": {"curriculum": 0.5}}, "must come with align.environment and two difficulties"),
        ({"align": {"held_out_labels": "a"}}, "must come with align.held_out, and is not read here"),
        ({"align": {"held_out": "a.jsonl"}}, "must come with align.prompts, and is not read here"),
        ({"align": {"template": "chatml"}}, "must come with align.prompts, and is not read here"),
        (
            {"align": {"environment": None, "prompts": "a", "held_out": "a", "evaluate": None}},
            "must come with align.evaluate, and is not read here",
        ),
        ({"align": {"environment": None}}, "must come with align.prompts or align.environment"),
        ({"training": {"weight_average": None}}, "the average of the weights is the reference"),
        ({"data": {"synthetic": "copy"}}, "must be rollouts with align"),
        ({"objective": {"options": {"replay": True}}}, "replay must come with layers of experts"),
        ({"align": {"routes": "sampler"}}, "must be replay: true with routes: sampler"),
        (
            {
                "model": {"layers": "(attention/moe) x2", "moe": {"experts": 4, "capacity_factor": 1.0}},
                "align": {"routes": "sampler"},
            },
            "must be trainer where the decoder does not read texts: a token's result depends on the other texts",
        ),
        ({"training": {"batch_schedule": [{"until": 2, "global_batch_size": 4}]}}, "all rounds have one size"),
        ({"evaluation": {"at_end": True}}, "must be off with align"),
        ({"model": {"dropout": 0.1}}, "must be 0.0 with align"),
        ({"optimizer": {"type": "schedule_free_adamw"}}, "this one evaluates an average"),
    ],
)
def test_mistakes_are_found_before_a_start(tmp_path, change, rule):
    whole = values(tmp_path)
    for section, keys in change.items():
        whole[section] = {**whole[section], **keys}
    with pytest.raises(ConfigError, match=rule):
        resolve(whole)


def test_the_launcher_reads_prompts_and_imports_rewards(tmp_path):
    def mistakes(**align: Any) -> str:
        return "\n".join(before_start([], resolve(values(tmp_path, **align))))

    file = tmp_path / "prompts.jsonl"
    assert mistakes() == ""
    assert "must have nothing" in mistakes(rewards=[{"type": "tests.features.align.judges:nothing"}])
    assert "must have nothing" in mistakes(environment="tests.features.align.judges:nothing")
    given = {"environment": None, "prompts": str(file), "held_out": str(file)}
    assert f"{file}: prompts cannot be read" in mistakes(**given)
    file.write_text("[" * 100_000)
    assert f"{file}:1: it must be a JSON object" in mistakes(**given)
    file.write_text(json.dumps({"prompt": "a\u2028b\x85"}, ensure_ascii=False))  # line ends of Unicode, inside a line
    assert mistakes(**given) == ""
    file.write_text(json.dumps({"prompt": "a\ud800"}))
    assert f"{file}:1" in mistakes(**given)
    own: Any = resolve(values(tmp_path, environment=UNWRITABLE))
    with pytest.raises(DataError, match="must be values of JSON"):
        Problems(own, build_tokenizer(own.tokenizer))(0)


def test_the_example_is_a_run():
    files = [str(ROOT / f"examples/arithmetic/{name}.yml") for name in ("pretrain", "align")]
    config: Any = load(files, [], ranks=1, check_inputs=False).config
    assert config.align.environment == "addition" and config.objective.type == "policy"
