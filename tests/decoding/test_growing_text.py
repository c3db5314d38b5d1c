"""Texts that grow token by token have the letters of the whole text."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from megatron.data.tokenizer import BytesTokenizer, HuggingFaceTokenizer, Tokenizer
from megatron.decoding.growing_text import GrowingText
from megatron.decoding.sampling import ending


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("a", "b"), ("Ġ", "a"), ("Ã", "©"), ("ab", "Ã")]
    vocabulary = {each: at for at, each in enumerate([*letters, *("".join(pair) for pair in pairs)])}
    backend = Backend(models.BPE(vocabulary, pairs))
    backend.decoder = decoders.ByteLevel()
    return HuggingFaceTokenizer(backend, "", "byte-level")


def metaspace() -> Tokenizer:
    words = ["▁a", "▁", "b", "▁bc", "é", "<unk>"]
    backend = Backend(models.WordLevel({each: at for at, each in enumerate(words)}, "<unk>"))
    backend.decoder = decoders.Metaspace()
    return HuggingFaceTokenizer(backend, "", "metaspace")


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), byte_level(), metaspace()], ids=lambda each: each.name)
def test_pieces_are_the_whole_text(tokenizer):
    draw = random.Random(2)
    for _ in range(60):
        ids = [draw.randrange(tokenizer.size) for _ in range(draw.randrange(40))]
        if draw.random() < 0.5:
            ids = tokenizer.encode("ab éab → ab 漢字" * 2)
        growing = GrowingText(tokenizer)
        found = [*map(growing.add, ids), growing.rest()]
        assert "".join(found) == tokenizer.decode(ids)


def test_what_is_left_ends_before_a_stop():
    """A token may have a stop string and the beginning of a character."""
    growing = GrowingText(byte_level(), ["ab"])
    tokenizer = growing.tokenizer
    (last,) = (each for each in range(tokenizer.size) if tokenizer.token(each) == "ab\ufffd")
    assert growing.add(last) + growing.rest() == "" and growing.stopped
    growing = GrowingText(tokenizer, ["b"], keep_stop=True)
    assert growing.add(last) + growing.rest() == "ab"


def test_a_text_that_continues_another_has_its_space():
    tokenizer = metaspace()
    prompt, more = [0], [0, 2]
    growing = GrowingText(tokenizer, after=prompt)
    whole = tokenizer.decode([*prompt, *more])
    assert whole == "a ab" and tokenizer.decode(more) == "ab"
    assert [growing.add(more[0]), growing.add(more[1]) + growing.rest()] == [" a", "b"]
    ended = ending(tokenizer, [" a"], after=prompt)
    assert ended is not None and ended([0]) and not ended([2]), "the prompt's own text is no stop"
    growing = GrowingText(BytesTokenizer(), after=[0xC3])
    assert growing.add(ord("a")) == "a", "the prompt ends within a character"


def test_stops_before_the_fewest_tokens_are_text():
    tokenizer = BytesTokenizer()
    growing, ended = GrowingText(tokenizer, ["aa"], least=4), ending(tokenizer, ["aa"], 4)
    text = list(b"aabaab")
    assert [growing.add(each) for each in text] == ["", "a", "ab", "", "", ""] and growing.stopped
    assert ended is not None and [ended(text[:end]) for end in (4, 5, 6)] == [False, True, True]
