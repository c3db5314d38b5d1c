"""Overlap of examples with a run's data, against comparing everything with everything."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from megatron.config import load, save_resolved
from megatron.config.sections.data import TokenizerSection
from megatron.data.corpus.encode import Treatment
from megatron.data.corpus.inputs import find_inputs
from megatron.data.corpus.job import TokenizeJob
from megatron.data.corpus.job import run as tokenize
from megatron.data.errors import DataError
from megatron.data.overlap import search as module
from megatron.data.overlap.search import NgramIndex, OverlapSearch, read_examples, usual_n
from megatron.data.overlap.units import Words, words
from megatron.data.provenance import Provenance, run_config
from megatron.data.token_file import TokenFile
from megatron.data.tokenizer import build_tokenizer
from tests.eval_tasks.models import tokenizer_file
from tools.data import overlap as tool

CONFIG = """
model: {layers: "(attention/mlp) x1", hidden_size: 16, vocab_size: 300, attention: {heads: 2}}
training: {steps: 12, sequence_length: 48, global_batch_size: 12, micro_batch_size: 2}
tokenizer: TOKENIZER
data:
  train: [{path: PATH/a, weight: 0.75}, {path: PATH/b, weight: 0.25}]
  order: stream
run: {dir: PATH/run}
"""
N = 4
WORDS = "the cat sat on a mat and Ärger don't stop 42 naïve “quoted” end. x-ray ΣΑΣ".split()


def texts() -> dict[str, list[str]]:
    draw = random.Random(3)
    made = {name: [_text(draw, 8, 40) for _ in range(count)] for name, count in (("a", 90), ("b", 40))}
    made["b"][5] = made["a"][7]  # a document that both have
    return made


def _text(draw: random.Random, least: int, most: int) -> str:
    return draw.choice([" ", "  ", "\n"]).join(draw.choices(WORDS, k=draw.randint(least, most)))


def examples() -> list[tuple[str, str]]:
    draw, corpora = random.Random(5), texts()
    cut = [corpora[name][number].upper().replace(" ", " , ")[10:90] for name, number in (("a", 7), ("b", 3), ("a", 60))]
    new = [_text(draw, 2, 20) for _ in range(40)]
    return [(str(number), text) for number, text in enumerate([*cut, *new, "", "wholly unknown words of five letters"])]


@pytest.fixture(scope="module", params=["bytes", "huggingface"])
def run(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("overlap")
    section = TokenizerSection(type="bytes")
    if request.param == "huggingface":
        section = TokenizerSection(type="huggingface", path=str(tokenizer_file(folder)))
    for name, records in texts().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in records))
        tokenize(TokenizeJob(find_inputs([str(folder / f"{name}.jsonl")]), folder / name, section, Treatment()))
    given = json.dumps({"type": section.type, "path": section.path})
    (folder / "run.yml").write_text(CONFIG.replace("PATH", str(folder)).replace("TOKENIZER", given))
    save_resolved(load([folder / "run.yml"], ranks=3), folder / "run" / "config.yml")
    return folder


def plain(text: str) -> list[str]:
    """The words of a text, character by character."""
    kept = "".join(each for each in text.lower() if each.isalnum() or each.isspace())
    return kept.split()


def ngrams(items: list) -> list[tuple]:
    return [tuple(items[at : at + N]) for at in range(len(items) - N + 1)]


def brute(folder: Path, by: str) -> list[dict]:
    """Every n-gram of every example in every document, and every step's every piece."""
    provenance = Provenance(run_config(folder / "run"))
    tokenizer = build_tokenizer(provenance.config.tokenizer)
    read: dict[tuple, int] = {}  # of the tokens of a source's document: the first step
    for step in range(provenance.plan.steps):
        for piece in (piece for sequence in provenance.step(step) for piece in sequence.pieces):
            for token in range(piece.start, piece.start + piece.length):
                read.setdefault((piece.source, piece.document, token), step)
    places: dict[tuple, list] = {}  # of an n-gram: source, document, its tokens
    for source in "ab":
        file = TokenFile(folder / source)
        for document in range(len(file)):
            ids = file[document].tolist()
            for gram, tokens in _of_document(ids, tokenizer, by):
                places.setdefault(gram, []).append((source, document, tokens))
    found = []
    for _, text in examples():
        items = plain(text) if by == "words" else tokenizer.encode(text)
        grams = ngrams(items)
        steps = {
            gram: [read[source, document, token] for source, document, tokens in places.get(gram, ())
                   for token in tokens if (source, document, token) in read]
            for gram in grams
        }  # fmt: skip
        inside = [any(at <= place < at + N and gram in places for at, gram in enumerate(grams))
                  for place in range(len(items))]  # fmt: skip
        documents: dict[tuple, set] = {}
        for gram in grams:
            for source, document, _ in places.get(gram, ()):
                documents.setdefault((source, document), set()).add(gram)
        found.append({
            "ngrams": len(grams),
            "found": sum(gram in places for gram in grams),
            "read": sum(bool(steps[gram]) for gram in grams),
            "covered": sum(inside),
            "first_step": min((step for each in steps.values() for step in each), default=None),
            "most": max(map(len, documents.values()), default=0),
        })
    return found


def _of_document(ids: list[int], tokenizer, by: str) -> list[tuple[tuple, range]]:
    if by == "tokens":
        return [(gram, range(at, at + N)) for at, gram in enumerate(ngrams(ids))]
    ids = ids[:-1]  # the end of the document
    table = tokenizer.bytes_of_ids()
    owner = [number for number, each in enumerate(ids) for _ in table[each]]  # the token of each byte
    content = b"".join(table[each] for each in ids)
    parts = [match for match in re.finditer(rb"[^ \n]+", content) if plain(match[0].decode())]
    made = []
    for at in range(len(parts) - N + 1):
        gram = tuple("".join(plain(part[0].decode())) for part in parts[at : at + N])
        made.append((gram, range(owner[parts[at].start()], owner[parts[at + N - 1].end() - 1] + 1)))
    return made


def searched(folder: Path, by: str = "words", **options) -> tuple[OverlapSearch, list]:
    config = run_config(folder / "run")
    search = OverlapSearch(Provenance(config), build_tokenizer(config.tokenizer), examples(), by, N)
    return search, search.run(**options)


@pytest.mark.parametrize("by", ["words", "tokens"])
def test_against_comparing_everything(run, by):
    _, found = searched(run, by)
    expected = brute(run, by)
    assert sum(each["found"] > 0 for each in expected) > 10 and any(each["found"] > each["read"] for each in expected)
    for one, other in zip(found, expected, strict=True):
        most = max((match.found for match in one.matches), default=0)
        assert {name: getattr(one, name) for name in other if name != "most"} | {"most": most} == other
    if by == "words":  # the first example is of a:7, which b:5 is too. Its first and last words are cut
        best = found[0].matches[:2]
        assert {(match.source, match.document) for match in best} == {("a", 7), ("b", 5)}
        assert all(match.found >= found[0].ngrams - 2 > 0 for match in best)


def test_pieces_and_decoding_change_nothing(run, monkeypatch):
    _, expected = searched(run)
    monkeypatch.setattr(module, "PIECE", 256)
    assert searched(run)[1] == expected
    monkeypatch.setattr("megatron.data.overlap.units.table_of", lambda *_: None)  # as if ids had no fixed bytes
    decoded = searched(run)[1]
    assert [(each.found, each.covered) for each in decoded] == [(each.found, each.covered) for each in expected]
    assert [each.matches[:1] and each.matches[0].document for each in decoded] == [
        each.matches[:1] and each.matches[0].document for each in expected
    ]


@pytest.mark.slow
def test_processes_change_nothing(run, monkeypatch):
    _, expected = searched(run)
    monkeypatch.setattr(module, "PIECE", 256)
    monkeypatch.setattr(module, "ALONE", 0)
    assert searched(run, workers=2)[1] == expected


def test_hashes_that_collide_change_nothing(monkeypatch):
    """With hashes of ten bits most candidates are false."""
    whole = NgramIndex._hash
    monkeypatch.setattr(NgramIndex, "_hash", lambda self, grams: whole(self, grams) >> np.uint64(54) << np.uint64(54))
    draw = np.random.default_rng(1)
    sequences = [draw.integers(1, 6, size, np.int32) for size in (5, 2, 7)]
    index, text = NgramIndex(sequences, 3, 5), draw.integers(0, 6, 5000, np.int32)
    wanted = {tuple(row): number for number, row in enumerate(index.grams.tolist())}
    assert sorted(wanted) == sorted({
        tuple(each[at : at + 3].tolist()) for each in sequences for at in range(len(each) - 2)
    })
    places = [(at, wanted[gram]) for at in range(4998) if (gram := tuple(text[at : at + 3].tolist())) in wanted]
    assert list(zip(*(each.tolist() for each in index.find(text)))) == places and len(places) > 50
    assert [[tuple(index.grams[row].tolist()) for row in rows] for rows in index.of] == [
        [tuple(each[at : at + 3].tolist()) for at in range(len(each) - 2)] for each in sequences
    ]


def test_words_and_n_are_those_of_gpt_3():
    assert words("Don't — stop:  the 'X-ray'!\n$5") == ["dont", "stop", "the", "xray", "5"]
    assert words("ΟΔΟΣ ΟΔΟΣ.") == ["οδος", "οδος"]
    assert [usual_n(lengths) for lengths in ([100] * 9, [3, 4, 90], [10] * 50, [])] == [13, 8, 10, 13]


def test_the_smallest_stretch_of_tokens(tmp_path):
    """Without its first or its last token a stretch has no longer all words."""
    tokenizer = build_tokenizer(TokenizerSection(type="huggingface", path=str(tokenizer_file(tmp_path))))
    unit = Words(tokenizer)
    unit._table = tokenizer.bytes_of_ids()
    text = " ".join(words(texts()["a"][3]))  # no marks, which are no part of a word
    ids, wanted = np.array(tokenizer.encode(text)), words(text)
    for place, (first, last) in enumerate(unit.spans(ids, np.arange(len(wanted) - N + 1), N).tolist()):
        gram = wanted[place : place + N]
        assert words(tokenizer.decode(ids[first:last].tolist())) == gram or last - first > N  # a token may have more
        for less in (ids[first + 1 : last], ids[first : last - 1]):
            assert " ".join(gram) not in " ".join(words(tokenizer.decode(less.tolist())))


def test_the_tool(run, tmp_path, capsys):
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps({"q": text, "id": 3}) + "\n" for _, text in examples()))
    words = [str(run / "run"), "--examples", str(file), "--fields", "q", "--n", str(N)]
    result = tool.main(tool.options().parse_args(words))
    _, found = searched(run)
    assert [each["first_step"] for each in result["overlaps"]] == [each.first_step for each in found]
    assert result["overlapping"] == sum(each.found > 0 for each in found) and result["too_short"] > 0
    tool.show(result)
    assert re.search(
        r"\d+: \d+\.\d%, first read at step \d+, [ab] document \d+ tokens \d+-\d+", capsys.readouterr().out
    )
    json.dumps(result)


def test_examples_of_a_text(tmp_path):
    (tmp_path / "set.txt").write_text("one two\nthree\n\n  \nfour\n")
    assert read_examples(tmp_path / "set.txt") == [("1", "one two\nthree"), ("2", "four")]
    (tmp_path / "set.jsonl").write_text('{"context": "a", "continuation": "b"}\n\n{"text": "c", "context": 3}\n')
    assert read_examples(tmp_path / "set.jsonl") == [("1", "a b"), ("3", "c")]


@pytest.mark.parametrize(
    "line, says",
    [("{", "set.jsonl:1: it must be a JSON"), ("[1]", "has list"), ('{"a": 1}', "has a"), ('{"text": 1}', "be text")],
)
def test_lines_that_are_no_examples(tmp_path, line, says):
    (tmp_path / "set.jsonl").write_text(line)
    with pytest.raises(DataError, match=says):
        read_examples(tmp_path / "set.jsonl")
