"""Texts that grow token by token have the letters of the whole text."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from megatron.data.tokenizer import BytesTokenizer, HuggingFaceTokenizer, Tokenizer
from megatron.decoding.growing_text import GrowingText


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
