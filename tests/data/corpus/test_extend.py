"""Tokens added to a tokenizer: old ids keep their meaning, and texts go through it and back."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from megatron.data.corpus.vocabulary import extend, merges, train
from megatron.data.errors import DataError
from megatron.data.tokenizer import from_json

OLD = ["the cat sat on the mat and the dog sat on the log"] * 20
NEW = ["gradient descent descends gradients of the gradient landscape; the momentum gradient"] * 30


def test_old_ids_stay_and_new_words_become_shorter(tmp_path):
    train("bpe", iter(OLD), 300, tmp_path / "old.json")
    made = extend(tmp_path / "old.json", iter(NEW), 330, tmp_path / "new.json")
    old, new = from_json(tmp_path / "old.json", "old"), from_json(tmp_path / "new.json", "new")
    assert made["added"] == new.size - old.size > 10
    known = new.backend.get_vocab()
    assert all(known[token] == number for token, number in old.backend.get_vocab().items())
    for text in (OLD[0], NEW[0], "völlig neu\n\t gradient <|endoftext|>"):
        assert new.decode(new.encode(text)) == text
    assert len(new.encode(NEW[0])) < 0.6 * len(old.encode(NEW[0]))
    with pytest.raises(DataError, match="not more than"):
        extend(tmp_path / "old.json", iter(NEW), old.size, tmp_path / "x.json")
    assert json.loads((tmp_path / "new.json").read_text())["added_tokens"]


def test_merges_are_those_of_counting_anew_each_time():
    draw = random.Random(3)
    words = [("".join(draw.choice("abc") for _ in range(draw.randint(1, 9))), draw.randint(1, 5)) for _ in range(60)]
    found = list(merges([(list(word), count) for word, count in words], {"ab"}, 12))
    pieces, expected, known = [(list(word), count) for word, count in words], [], {"ab"}
    for _ in range(12):
        counted: Counter = Counter()
        for word, count in pieces:
            for pair in zip(word, word[1:]):
                counted[pair] += count
        best = min((pair for pair in counted if "".join(pair) not in known), key=lambda pair: (-counted[pair], pair))
        expected.append(best)
        known.add("".join(best))
        for word, _ in pieces:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == best:
                    word[at : at + 2] = ["".join(best)]
                at += 1
    assert found == expected
