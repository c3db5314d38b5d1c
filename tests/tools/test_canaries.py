"""Planted passages: the more often one occurs the likelier it is recited, and the goldfish loss prevents it."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.data.token_file import TokenFile
from megatron.evaluation.memorisation import summary
from tools.canaries import BATCH, GROUPS, LENGTH, OBJECTIVES, draw, shares, train_and_extract, write_corpus


def test_the_corpus_has_each_canary_as_often_as_it_says(tmp_path):
    corpus = write_corpus(tmp_path, {1: 2, 7: 1}, 30)
    file = TokenFile(corpus.prefix)
    rows = [tuple(file.read(number).tolist()) for number in range(len(file))]
    assert len(rows) == len(corpus.canary) == corpus.steps * BATCH == 64 and {len(row) for row in rows} == {LENGTH + 1}
    for canary, times in enumerate(corpus.times):
        own = [row for row, number in zip(rows, corpus.canary, strict=True) if number == canary]
        assert len(own) == times == rows.count(own[0])
    assert corpus.times.tolist() == [1, 1, 7]


def test_shares_by_hand_and_their_picture(tmp_path):
    corpus = write_corpus(tmp_path, {1: 2, 7: 1}, 30)
    summary.begin(tmp_path / "results", summary.RecitationJob("c", 2, (0, 2, 1), 32, 32, 32, False, "fp32"))
    rows = [
        {"sample": number, "step": 0, "sequence": 0, "source": "rows", "document": number, "documents": 1}
        | {"extractable": bool(corpus.canary[number] in (-1, 1)), "score": None, "log_likelihood": -1.0}
        for number in range(64)
    ]
    summary.write_part(tmp_path / "results", 0, rows)
    assert shares(corpus, tmp_path / "results") == {1: 0.5, 7: 0.0}
    draw(tmp_path / "picture.png", {"a": {1: 0.5, 7: 0.0}})
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.slow
def test_more_is_recited_of_what_occurs_more_often_and_nothing_with_goldfish(tmp_path):
    corpus = write_corpus(tmp_path, GROUPS, 3100)
    found = {}
    for name, objective in OBJECTIVES.items():
        results = train_and_extract(tmp_path / objective["type"], corpus, objective, every=10**6)
        found[name] = shares(corpus, results[max(results)])
    plain, goldfish = found.values()
    assert list(plain) == [1, 10, 100, 1000]
    assert (np.diff(list(plain.values())) >= 0).all() and plain[1] == 0 and plain[1000] == 1
    assert max(goldfish.values()) == 0
