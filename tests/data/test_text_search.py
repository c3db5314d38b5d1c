"""A text is found wherever the decoded documents have it, whatever the tokenizer, and however tokens are cut."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from megatron.config.sections.data import TokenizerSection
from megatron.data import text_search
from megatron.data.corpus.vocabulary import train
from megatron.data.text_search import find_text, table_of
from megatron.data.tokenizer import build_tokenizer
from tests.data.make import write_documents

WORDS = ["window", "sill", "a", "aa", "naïve", "日本", "the", "other", "mother", "😀", "end\nline", "x = 1"]
TEXTS = ["ndow s", "a", "aa", "the", "other", "ï", "本", "😀 ", "line", "nowhere", "window sill", "r the o"]


@pytest.fixture(scope="module")
def documents() -> list[str]:
    draw = random.Random(5)
    return [" ".join(draw.choices(WORDS, k=draw.randint(0, 30))) for _ in range(200)]


@pytest.fixture(scope="module", params=["bpe", "unigram", "sentencepiece-bpe", "bytes", "characters"])
def tokenizer(request, documents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        return build_tokenizer(TokenizerSection(type="bytes"))
    path = folder / ("t.model" if "piece" in request.param else "t.json")
    train(request.param, iter([each for each in documents if each]), 300, path)
    kind = {"characters": "characters", "sentencepiece-bpe": "sentencepiece"}.get(request.param, "huggingface")
    return build_tokenizer(TokenizerSection(type=kind, path=str(path)))


def written(folder, tokenizer, documents):
    ended = [[*tokenizer.encode(each), tokenizer.eod_id] for each in documents]
    return write_documents(folder / "a", ended, np.int32)


@pytest.mark.parametrize("decoding", [False, True], ids=["bytes", "decoding"])
def test_against_looking_into_every_document(tmp_path, tokenizer, documents, decoding, monkeypatch):
    """Each place is a smallest stretch of tokens with the text. Together they are all that decoding shows."""
    monkeypatch.setattr(text_search, "CHUNK", 160)  # many places lie across two chunks
    file = written(tmp_path, tokenizer, documents)
    assert table_of(file, tokenizer) is not None
    if decoding:
        monkeypatch.setattr(text_search, "table_of", lambda file, tokenizer: None)
    decoded = [tokenizer.decode(file[number].tolist()) for number in range(len(file))]
    for text in TEXTS:
        found = list(find_text(file, tokenizer, text))
        assert sorted({document for document, _, _ in found}) == [n for n, each in enumerate(decoded) if text in each]
        assert found == sorted(set(found))
        for document, first, count in found[:60]:
            ids = file[document].tolist()
            assert text in tokenizer.decode(ids)[: len(tokenizer.decode(ids[: first + count]))]
            assert text not in tokenizer.decode(ids[first + 1 : first + count])
            assert text not in tokenizer.decode(ids[first : first + count - 1])


def test_processes_and_progress(tmp_path, documents, monkeypatch):
    tokenizer = build_tokenizer(TokenizerSection(type="bytes"))
    file = written(tmp_path, tokenizer, documents)
    alone = list(find_text(file, tokenizer, "window sill"))
    monkeypatch.setattr(text_search, "ALONE", 0)
    monkeypatch.setattr(text_search, "CHUNK", file.tokens // 5)
    shown = []
    assert list(find_text(file, tokenizer, "window sill", 2, lambda *state: shown.append(state))) == alone
    assert len(alone) > 5 and shown[-1] == (file.tokens, file.tokens) and len(shown) == 6


def test_a_tokenizer_without_fixed_bytes(tmp_path, documents):
    """WordPiece drops spaces when it decodes, so documents are decoded."""
    vocabulary = {each: number for number, each in enumerate(["[UNK]", "</s>", "win", "##dow", "sill"])}
    content = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": vocabulary}
        | {"max_input_chars_per_word": 100},
    }
    (tmp_path / "t.json").write_text(json.dumps(content))
    tokenizer = build_tokenizer(TokenizerSection(type="huggingface", path=str(tmp_path / "t.json")))
    file = written(tmp_path, tokenizer, ["sill window", "sill"])
    assert table_of(file, tokenizer) is None
    assert list(find_text(file, tokenizer, "window")) == [(0, 1, 2)]
