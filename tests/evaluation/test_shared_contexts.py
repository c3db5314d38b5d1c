"""Endings of one context, which is read once: the scores of reading each text whole, with fewer tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config import resolve
from megatron.evaluation.scoring import Text
from megatron.evaluation.shared_contexts import SharedContexts, depends_on_batch, reads_on, split
from megatron.model.stack import Model
from tests.evaluation.test_scoring import MATRIX, alone, plain_model, settings_of, texts
from tests.training import matrix

CPU = torch.device("cpu")
# The layers of all tests' architectures, each once.
LAYERS = {str(each["model"].get("layers")): name for name, each in MATRIX["architectures"].items()}


class OneProcess:
    """A reader without an engine."""

    config: Any = None  # nobody asks here

    def __init__(self, model: Model) -> None:
        self.model, self.passes = model, 0

    def new_state(self) -> list[Any]:
        return self.model.new_state()

    @torch.no_grad()
    def read_on(self, tokens_BS, reader, state, begin):
        self.passes += 1
        return self.model(tokens_BS, tokens_BS, tokens_BS, reader=reader, state=state, begin=begin)


@pytest.mark.parametrize("architecture", sorted(LAYERS.values()), ids=lambda word: word.replace(" ", "-"))
def test_scores_are_those_of_whole_texts(architecture):
    settings, _ = settings_of(architecture, "one, ZeRO 0")
    config = resolve(settings)
    model = plain_model({k: v for k, v in settings.items() if k not in ("parallel", "zero")})
    engine = OneProcess(model)
    if not reads_on(config, engine):
        assert depends_on_batch(config) or model.core is not None
        return
    given = texts(config.model.vocab_size)
    groups, others = split(given)
    shared = SharedContexts(engine, 3, (0, 1), CPU)
    found = shared.read(groups, given)
    assert len(groups) == 3 and set(found) == set(range(len(given))) - set(others) and len(found) == 12
    for index, (logs, greedy) in found.items():
        expected, likeliest = alone(model, given[index])
        assert len(logs) == given[index].scored and sum(logs) == pytest.approx(expected, abs=1e-4)
        assert greedy == likeliest
    assert shared.tokens < sum(len(given[index].inputs) for index in found) / 2


def test_data_ranks_make_equally_many_passes():
    settings, _ = settings_of("neox", "one, ZeRO 0")
    model = plain_model({k: v for k, v in settings.items() if k not in ("parallel", "zero")})
    given = texts(model.plan.config.model.vocab_size)
    groups, _ = split(given)
    whole, passes, together = SharedContexts(OneProcess(model), 3, (0, 1), CPU).read(groups, given), [], {}
    for rank in range(4):
        engine = OneProcess(model)
        found = SharedContexts(engine, 3, (rank, 4), CPU).read(groups, given)
        assert not set(found) & set(together)
        together |= found
        passes.append(engine.passes)
    assert len(set(passes)) == 1 and set(together) == set(whole)
    assert all(together[index][1] == whole[index][1] for index in whole)


def test_what_is_worth_it():
    """Not windows of a text, each after the end-of-document token. Not one text twice."""
    windows = [Text((0, *range(number, number + 9)), 9) for number in (1, 20)]
    same = [Text((1, 2, 3, 4, 5, 6), 2)] * 2
    last = [Text((7, 8, 9, token), 1) for token in (1, 2)]
    assert split([*windows, *same, *last]) == ([], list(range(6)))
    choices = [Text((*range(20), *ending), len(ending)) for ending in ((3, 4), (5, 6, 7))]
    (group,), others = split([*windows, *choices])
    assert group.context == tuple(range(20)) and group.endings == {(3,): [2], (5, 6): [3]} and others == [0, 1]


def test_where_a_text_is_read_whole():
    base, _ = settings_of("moe", "one, ZeRO 0")
    model = plain_model({k: v for k, v in base.items() if k not in ("parallel", "zero")})
    assert reads_on(resolve(base), OneProcess(model))
    for values in (
        {"model": {"moe": {"capacity_factor": 1.0}}},
        {"parallel": {"context": 2}},
        {"parallel": {"tensor": 2, "sequence": True}},
        {"parallel": {"pipeline": 2}},
    ):
        assert not reads_on(resolve(matrix.merged(base, values), ranks=2), OneProcess(model))
