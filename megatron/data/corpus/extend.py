"""Add tokens to the tokenizer of a trained model: byte-pair merges learned on new texts.

Every id keeps its meaning, and so do the rows of an embedding. The old merges come first, so a text is cut as before.
The new merges then join the pieces.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from ...config.file_access import read_json, replace_file
from ..errors import DataError
from ..tokenizer import from_json


def extend(old: Path, corpus: Iterator[str], size: int, output: Path) -> dict:
    """Write a tokenizer.json with further tokens.

    Args:
        old: a tokenizer.json with byte-pair merges.
        size: ids of the new vocabulary, including the old ones.

    Returns:
        `path`, `kind` and `size` of the file, and the number of `added` tokens.

    Raises:
        DataError: the old one cannot be read, has no merges, or has this number of ids already.
    """
    tokenizer = from_json(old, old.name)
    content = read_json(old)
    model = content["model"]
    if model["type"] != "BPE":
        raise DataError(old, f"it is of kind {model['type']}, and only BPE has merges to add to", "train a new one")
    if size <= tokenizer.size:
        raise DataError("--size", f"{size} is not more than the {tokenizer.size} ids of {old}", "ask for more")
    backend = tokenizer.backend
    counts: Counter[str] = Counter()
    for text in corpus:
        plain = backend.normalizer.normalize_str(text) if backend.normalizer else text
        counts.update(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(plain))
    words = [([token.value for token in backend.model.tokenize(word)], count) for word, count in counts.items()]
    joined = all(isinstance(merge, str) for merge in model["merges"])  # files of older libraries: "a b"
    added = 0
    for left, right in merges(words, set(model["vocab"]), size - tokenizer.size):
        model["vocab"][left + right] = tokenizer.size + added
        model["merges"].append(f"{left} {right}" if joined and model["merges"] else [left, right])
        added += 1
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output, json.dumps(content, ensure_ascii=False, indent=1).encode())
    return {"path": str(output), "kind": "bpe", "size": tokenizer.size + added, "added": added}


def merges(words: list[tuple[list[str], int]], known: set[str], wanted: int) -> Iterator[tuple[str, str]]:
    """Pairs of pieces to join, the most frequent first, counted in the words as joined so far.

    Args:
        words: pieces of each word, and its number of occurrences. Changed in place.
        known: existing tokens. A pair that would make one of them is skipped.
        wanted: number of pairs. Fewer if no pair occurs twice.
    """
    pairs: Counter[tuple[str, str]] = Counter()
    where: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for number, (pieces, count) in enumerate(words):
        for pair in zip(pieces, pieces[1:]):
            pairs[pair] += count
            where[pair].add(number)
    while wanted and pairs:
        best, count = min(pairs.items(), key=lambda item: (-item[1], item[0]))
        if count < 2:
            return
        if best[0] + best[1] in known:
            del pairs[best]
            continue
        for number in where.pop(best):
            pieces, times = words[number]
            for pair in zip(pieces, pieces[1:]):
                pairs[pair] -= times
            pieces[:] = _join(pieces, best)
            for pair in zip(pieces, pieces[1:]):
                pairs[pair] += times
                where[pair].add(number)
        del pairs[best]
        known.add(best[0] + best[1])
        wanted -= 1
        yield best


def _join(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    result: list[str] = []
    at = 0
    while at < len(pieces):
        both = tuple(pieces[at : at + 2]) == pair
        result.append(pieces[at] + pieces[at + 1] if both else pieces[at])
        at += 2 if both else 1
    return result
