"""Which documents are duplicates, against brute force and closed formulas, and which of them stays."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("datatrove")

from datatrove.data import Document  # noqa: E402

from megatron.curation.stages.duplicates import EXACT, MINHASH, shingles  # noqa: E402
from megatron.curation.survivors import components, survivors  # noqa: E402
from tests.curation.recipes import curate, kept, lines, written  # noqa: E402


def keys_of(kind, options: dict, texts: list[str]) -> list[np.ndarray | None]:
    keys = kind.keys(kind.options(**options))
    return [keys(Document(text, "x")) for text in texts]


def brute_force(documents: int, pairs: set[tuple[int, int]]) -> list[int]:
    """The smallest member of each document's component, by walking."""
    found = list(range(documents))
    for _ in range(documents):
        for one, other in pairs:
            found[one] = found[other] = min(found[one], found[other])
    return found


@pytest.mark.parametrize("seed", range(20))
def test_components_are_those_of_brute_force(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count, bands = int(draw.integers(1, 60)), int(draw.integers(1, 5))
    keys = draw.integers(0, int(draw.integers(2, 90)), (bands, count, 2)).astype(np.uint64)  # zeros are no keys
    pairs = {
        (one, other)
        for band in keys
        for one, other in itertools.combinations(range(count), 2)
        if tuple(band[one]) == tuple(band[other]) != (0, 0)
    }
    found = components(count, keys)
    assert found.tolist() == brute_force(count, pairs)
    priority = draw.integers(0, 3, count)
    stays = survivors(found, priority)
    for document in range(count):
        members = [each for each in range(count) if found[each] == found[document]]
        assert stays[document] == min(members, key=lambda each: (priority[each], each))


def test_a_long_chain_is_one_component() -> None:
    """Each document shares a key with the next only, in one band or the other."""
    count = 1001
    keys = np.zeros((2, count, 2), np.uint64)
    for band in (0, 1):
        for first in range(band, count - 1, 2):
            keys[band, first : first + 2] = first + 1
    shuffled = np.random.default_rng(1).permutation(count)
    assert set(components(count, keys[:, shuffled]).tolist()) == {0}


def near(text: list[str], replaced: int, draw: random.Random) -> list[str]:
    """The text with some words replaced by new ones."""
    copy = list(text)
    for place in draw.sample(range(len(text)), replaced):
        copy[place] = f"n{draw.randrange(10**9):x}q"
    return copy


@pytest.mark.parametrize(("bands", "rows", "replaced"), [(14, 8, 2), (14, 8, 4), (9, 13, 2), (32, 4, 6), (5, 25, 1)])
def test_planted_near_duplicates_are_found_as_often_as_the_formula_says(bands: int, rows: int, replaced: int) -> None:
    """1 - (1 - J^r)^b for each pair's exact Jaccard similarity J. Within four standard deviations of the sum."""
    draw = random.Random(7)
    expected, variance, found = 0.0, 0.0, 0
    for _ in range(150):
        text = [f"w{draw.randrange(10**9):x}" for _ in range(120)]
        pair = [" ".join(text), " ".join(near(text, replaced, draw))]
        one, other = (set(shingles(each, "words", 5).tolist()) for each in pair)
        chance = 1 - (1 - (len(one & other) / len(one | other)) ** rows) ** bands
        expected, variance = expected + chance, variance + chance * (1 - chance)
        first, second = keys_of(MINHASH, {"n": 5, "bands": bands, "rows": rows}, pair)
        assert first is not None and second is not None
        found += bool((first == second).all(axis=1).any())
    assert abs(found - expected) <= 4 * math.sqrt(variance) + 1e-9


@pytest.mark.parametrize(
    ("unit", "n", "bands", "rows", "least"),
    [("words", 5, 14, 8, 0.85), ("words", 13, 32, 4, 0.7), ("characters", 25, 8, 16, 0.95)],
)
def test_recall_of_all_similar_pairs_of_a_corpus(unit: str, n: int, bands: int, rows: int, least: float) -> None:
    """Brute force compares all pairs. From `least` on, the formula's recall is at least 0.96 for each of them."""
    draw = random.Random(5)
    texts = []
    for _ in range(60):
        text = [f"w{draw.randrange(10**9):x}" for _ in range(200)]
        texts += [" ".join(text), " ".join(near(text, draw.choice((0, 1, 2, 3)), draw))]
    sets = [set(shingles(each, unit, n).tolist()) for each in texts]
    similar, found = set(), set()
    keys = keys_of(MINHASH, {"unit": unit, "n": n, "bands": bands, "rows": rows}, texts)
    for one, other in itertools.combinations(range(len(texts)), 2):
        jaccard = len(sets[one] & sets[other]) / len(sets[one] | sets[other])
        if jaccard >= least:
            similar.add((one, other))
        if (keys[one] == keys[other]).all(axis=1).any():
            found.add((one, other))
            assert jaccard > 0
    assert 1 - (1 - least**rows) ** bands >= 0.96 and len(similar) >= 25
    assert len(similar & found) >= 0.95 * len(similar)


def test_what_shares_no_n_gram_is_never_found() -> None:
    draw = random.Random(3)
    texts = [" ".join(f"w{draw.randrange(10**12):x}" for _ in range(40)) for _ in range(200)]
    keys = np.stack(keys_of(MINHASH, {"n": 5, "bands": 32, "rows": 4}, texts))
    assert components(len(texts), keys.transpose(1, 0, 2)).tolist() == list(range(len(texts)))


def test_shingles_are_distinct_n_grams() -> None:
    assert len(shingles("a b c d e f " * 3, "words", 5)) == 6
    assert len(shingles("aaaa", "characters", 2)) == 1 and len(shingles("abcd", "characters", 2)) == 3
    assert len(shingles("too short", "words", 3)) == 0
    assert keys_of(MINHASH, {"n": 3}, ["too short"]) == [None]


def test_exact_keys() -> None:
    one, other, third = keys_of(EXACT, {"by": "normalised"}, ["A b, c", "a  B c!", "a b d"])
    assert (one == other).all() and (one != third).any()
    one, other, _ = keys_of(EXACT, {}, ["A b, c", "a  B c!", "a b d"])
    assert (one != other).any()


def test_the_source_of_the_smallest_priority_keeps_a_duplicate(tmp_path: Path) -> None:
    """Also where its document comes later. Within a source the first stays."""
    written(tmp_path, "web", ["same text", "web only", "in web twice", "in web twice"])
    written(tmp_path, "books", ["books only", "same text"])
    sources = [
        {"name": "web", "path": str(tmp_path / "web"), "priority": 2},
        {"name": "books", "path": str(tmp_path / "books"), "priority": 1},
    ]
    report = curate(tmp_path, [{"exact": {}}], sources)
    assert kept(tmp_path / "out") == ["web/a.jsonl:2", "web/a.jsonl:3", "books/a.jsonl:1", "books/a.jsonl:2"]
    gone = {each["id"]: each["detail"] for each in lines(tmp_path / "out" / "removed")}
    assert gone == {"web/a.jsonl:1": "of books/a.jsonl:2", "web/a.jsonl:4": "of web/a.jsonl:3"}
    assert report["removed"] == {"01_exact": {"duplicate": {"web": 2}}}
