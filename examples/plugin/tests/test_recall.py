"""The source: what its samples say, and runs that read the same on any ranks and after a resume."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from my_lab.recall import Recall

from megatron.config.problems import UserError
from megatron.testing import train_on_ranks

VALUES = yaml.safe_load((Path(__file__).parents[1] / "retention.yml").read_text())


@pytest.mark.parametrize("number", range(5))
def test_what_is_asked_for_was_given(number):
    source = Recall(1, "train", vocabulary=20, length=15, pairs=4, queries=3)
    found = source.sample(number)
    given = dict(zip(found.tokens[0:8:2].tolist(), found.tokens[1:8:2].tolist()))
    assert len(given) == 4 and all(key < 10 <= value < 20 for key, value in given.items())
    targets = [place + 1 for place, weight in enumerate(found.weights) if weight]
    assert targets == [9, 11, 13]
    assert [given[found.tokens[place - 1]] for place in targets] == found.tokens[targets].tolist()
    assert source.sample(number).tokens.tolist() == found.tokens.tolist() != source.sample(number + 1).tokens.tolist()


def test_in_a_run(tmp_path):
    """Two steps on one rank and two on two read and compute what four on one do, and log another set's losses."""
    short = {
        **VALUES,
        "data": {"synthetic": "recall", "options": {"pairs": 3, "queries": 2}},
        "training": {**VALUES["training"], "steps": 4},
        "evaluation": {"every": 4, "batches": 1},
        "checkpoint": {"every": 2},
        "logging": {"console": "quiet", "curve": False},
    }

    def steps(name, ranks, *overrides):
        records = train_on_ranks(ranks, {**short, "run": {"dir": str(tmp_path / name)}}, overrides)
        return [(each["batch_hash"], each["loss"], each["grad_norm"]) for each in records if "loss" in each], records

    straight, records = steps("straight", 1)
    assert len(straight) == 4 and len({each[0] for each in straight}) == 4
    assert any("validation" in each for each in records)
    steps("parts", 1, "training.stop_at_step=2")
    for one, two in zip(straight, steps("parts", 2, "zero.stage=1")[0], strict=True):
        assert two[0] == one[0] and two[1:] == pytest.approx(one[1:], rel=1e-5)


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"keys": 3}, "must not have keys: use pairs, queries"),
        ({"pairs": 33}, "pairs must be a whole number from 1 to 32"),
        ({"pairs": 2, "queries": 3}, "queries must be a whole number from 1 to 2"),
        ({"pairs": 5}, "must be at most 17 tokens"),
    ],
)
def test_options(options, rule):
    config = SimpleNamespace(
        data=SimpleNamespace(options=options, seed=1),
        model=SimpleNamespace(vocab_size=64),
        training=SimpleNamespace(sequence_length=16),
    )
    with pytest.raises(UserError, match=rule):
        Recall.build(config, "train")
