"""Majority voting and Markovian RSA: by hand, the special cases of the paper, and in a run's evaluations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config import resolve
from megatron.config.problems import UserError
from megatron.data.tokenizer import BytesTokenizer
from megatron.features.align.problems import Prompt
from megatron.features.align.sampler import Drawn
from megatron.features.align.verifier import Verdict
from megatron.features.align.voting import Voting, answer_of, filled, majority
from megatron.testing.runs import train_on_ranks
from tests.features.align.test_rounds import values


def test_the_most_frequent_answer_wins():
    assert [answer_of(" 3 of 1,024. ", kind) for kind in ("text", "number")] == ["3 of 1,024.", 1024]
    assert answer_of("none", "number") is None and answer_of(" ", "text") is None
    assert majority(["1", "2", "2"]) == 1 and majority(["1", "2"]) == 0 and majority([None, None, "3"]) == 2
    assert majority([None, None]) == 0
    assert majority([answer_of(each, "number") for each in ("3", "it is 0", "0.0")]) == 1  # equal numbers
    assert filled("{problem}: {tails} {x}", "a {problem}", "b {tails}") == "b {tails}: a {problem} {x}"


class Program:
    """Answers each prompt with its own ending and the number of the draw, and keeps what it was asked."""

    def __init__(self, tmp_path: Any, **align: Any) -> None:
        self.config: Any = resolve(values(tmp_path, **align))
        self.config = self.config.model_copy(
            update={"training": self.config.training.model_copy(update={"sequence_length": 400})}
        )
        self.own, self.tokenizer, self.asked = self.config.align, BytesTokenizer(), list[list[str]]()

    def draw(self, ids: Any, numbers: Any, rule: Any) -> list[Drawn]:
        self.asked.append([bytes(each).decode() for each in ids])
        return [Drawn([*f"abc{number:02d}".encode(), 256], [0.0] * 6, True) for number in numbers]

    def rule(self, seed: int, purpose: str) -> Any:
        return SimpleNamespace(seed=seed, purpose=purpose)

    def text(self, drawn: Drawn) -> str:
        return bytes(drawn.tokens[:-1]).decode()

    def verify(self, prompts: Any, drawn: Any) -> list[Verdict]:
        return [Verdict(float(self.text(each)[-1] == "3")) for each in drawn]


def evaluated(tmp_path: Any, **align: Any) -> tuple[dict[str, float], list[list[str]]]:
    program: Any = Program(tmp_path, tokens=6, **align)
    prompts = [Prompt((113, 49), "q1", {}), Prompt((113, 50), "q2", {})]
    return Voting(program).evaluate(prompts), program.asked


def test_special_cases_of_the_paper(tmp_path):
    """No rounds: parallel sampling. A tail of all tokens: recursive self-aggregation. One tail: a chain."""
    found, asked = evaluated(tmp_path, votes=3)
    assert asked == [["q1"] * 3 + ["q2"] * 3]
    assert found == {"single": 1 / 6, "majority": 0.5, "best": 0.5}
    _, asked = evaluated(tmp_path, votes=3, aggregate={"rounds": 1, "tails": 3, "tail": 6})
    assert asked[1] == ["abc00\nabc01\nabc02\nq1"] * 3 + ["abc03\nabc04\nabc05\nq2"] * 3
    _, asked = evaluated(tmp_path, votes=3, aggregate={"rounds": 2, "tails": 1, "tail": 2})
    assert set(asked[1][:3]) <= {"00\nq1", "01\nq1", "02\nq1"} and set(asked[1][3:]) <= {f"0{n}\nq2" for n in (3, 4, 5)}
    assert set(asked[2][:3]) <= {f"0{n}\nq1" for n in (6, 7, 8)} and len(asked) == 3
    more = {"rounds": 2, "tails": 2, "tail": 2, "template": "{problem} {tails} {problem}"}
    found, asked = evaluated(tmp_path, votes=3, aggregate=more)
    assert all(each.startswith("q1 0") and each.endswith(" q1") and len(each) == 11 for each in asked[1][:3])
    # Of the draws 12 ... 17 only 13 is right, and the first of equal votes wins.
    assert found["aggregated"] == 1 / 6 and found["aggregated_majority"] == 0.0
    assert evaluated(tmp_path, votes=3, aggregate=more)[1] == asked
    with pytest.raises(UserError, match="must have at most 395"):
        evaluated(tmp_path, votes=99, aggregate={"rounds": 1, "tails": 99, "tail": 6})


def test_evaluations_of_a_run_have_them(tmp_path):
    """The policy's texts do not depend on them."""
    more = {"votes": 3, "aggregate": {"rounds": 1, "tails": 1, "tail": 2}, "tokens": 3, "evaluate": 4}
    plain = train_on_ranks(1, values(tmp_path / "a", tokens=3, evaluate=None))
    voted = train_on_ranks(1, values(tmp_path / "b", **more))
    found = [each["held_out"] for each in voted if "held_out" in each]
    assert len(found) == 2 and all(each["best"] >= each["majority"] for each in found)
    assert found[0].keys() == {"reward", "single", "majority", "best", "aggregated", "aggregated_majority"}
    steps = [[each["objective_loss"] for each in records if "loss" in each] for records in (plain, voted)]
    assert steps[0] == steps[1]
