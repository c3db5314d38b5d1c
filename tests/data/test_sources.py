"""Sources of samples by name: what they give is checked, and reaches the batch as it is."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.config.problems import UserError
from megatron.data.errors import DataError
from megatron.data.loader import build_loader
from megatron.data.sample import Sample
from tests.data.make import configuration

S = 5


class Counting:
    """Sample n is n, n + 1, .... Even labels count. A document begins at token 3."""

    masked = True

    @classmethod
    def build(cls, config, name):
        assert name in ("train", "validation")
        return cls()

    def sample(self, number: int) -> Sample:
        tokens = number + np.arange(S + 1)
        return Sample(tokens, (tokens[1:] % 2 == 0).astype(np.float32), np.isin(np.arange(S + 1), (0, 3)))


class Broken(Counting):
    answer = Sample(np.arange(S + 1))

    def sample(self, number: int) -> Sample:
        return self.answer


def loader(source: str, **data):
    config = configuration(
        {"synthetic": source, **data},
        model={"layers": "attention/mlp", "hidden_size": 16, "vocab_size": 30, "attention": {"heads": 2}},
        training={"steps": 3, "sequence_length": S, "global_batch_size": 4, "micro_batch_size": 2},
    )
    return build_loader(config, data_rank=0, data_ranks=1)


@pytest.mark.parametrize("apart", [False, True])
def test_a_source_by_its_import_path(apart):
    batch = loader(f"{__name__}:Counting", reset_attention_at_eod=apart).step(2)
    wanted = 8 + np.arange(4)[:, None] + np.arange(S + 1)
    assert batch.tokens.flatten(0, 1).tolist() == wanted.tolist()
    assert batch.loss_mask.flatten(0, 1).tolist() == (wanted[:, 1:] % 2 == 0).astype(float).tolist()
    if apart:
        assert batch.documents.flatten(0, 1).tolist() == [[0, 0, 0, 1, 1]] * 4
        assert batch.positions.flatten(0, 1).tolist() == [[0, 1, 2, 0, 1]] * 4
    else:
        assert batch.documents is None and batch.positions is None


@pytest.mark.parametrize(
    "answer, rule",
    [
        (Sample(np.arange(S)), r"must have tokens int64 \[6\]: int64 \[5\]"),
        (Sample(np.arange(S + 1).astype(np.int32)), "int32"),
        (Sample(np.arange(S + 1) + 25), "must have ids below model.vocab_size = 30: 25 ... 30"),
        (Sample(np.arange(S + 1) - 1), "-1 ... 4"),
        (Sample(np.arange(S + 1), np.ones(S + 1, np.float32)), r"must have weights \[5\]"),
        (Sample(np.arange(S + 1), begins=np.ones(S, bool)), "of 6 tokens whether a document begins"),
    ],
)
def test_what_cannot_be_a_sample(answer, rule, monkeypatch):
    monkeypatch.setattr(Broken, "answer", answer)
    with pytest.raises(DataError, match=f"sample 0 of .*:Broken {rule}" if rule.startswith("must") else rule):
        loader(f"{__name__}:Broken").read(0)


def test_weights_that_nobody_announced(monkeypatch):
    monkeypatch.setattr(Broken, "masked", False)
    monkeypatch.setattr(Broken, "answer", Counting().sample(0))
    with pytest.raises(DataError, match="`masked` say so"):
        loader(f"{__name__}:Broken").read(0)


def test_what_is_no_source_is_refused():
    with pytest.raises(UserError, match="must have build and sample"):
        loader("fractions:Fraction")
