"""Keys by which documents are duplicates: of the whole text, of its lines, or of bands of a MinHash signature.

Decontamination: documents that share n-grams of words with an evaluation set."""

import hashlib
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import xxhash

from megatron.config.problems import Problem
from megatron.config.section import Section, key
from megatron.data.errors import DataError
from megatron.data.overlap.search import NgramIndex, read_examples
from megatron.data.overlap.units import words

from ..signals import normalised
from .contract import Keys, Noted, Parts, Removed, StageKind, Work
from .texts import one_file

PRIME = np.uint64((1 << 61) - 1)


class ExactSection(Section):
    by: Literal["text", "normalised"] = key(
        "text", "The view that must be equal. normalised: without ASCII punctuation, case and white space."
    )


class MinhashSection(Section):
    unit: Literal["words", "characters"] = key("words", "Elements of n-grams, in the normalised text.")
    n: int = key(13, "Length of an n-gram. A shorter document is compared with none.", ge=1)
    bands: int = key(14, "Bands of the signature. Documents that agree in one are duplicates.", ge=1)
    rows: int = key(8, "Hashes of a band.", ge=1)
    seed: int = key(1, "Seed of the hash functions.", ge=0)


class LinesSection(Section):
    by: Literal["text", "normalised"] = key("normalised", "The view of a line that must be equal.")
    least: int = key(1, "Characters of that view below which a line is compared with none.", ge=1)


def _exact(options: ExactSection) -> Keys:
    def keys(document: Any) -> np.ndarray:
        text = document.text if options.by == "text" else normalised(document.text)
        digest = hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()
        return np.frombuffer(digest, "<u8").reshape(1, 2)

    return keys


def _lines(options: LinesSection) -> Parts:
    """Of each line of a text, as CCNet and RedPajama v1 compare paragraphs."""

    def parts(document: Any) -> np.ndarray:
        lines = document.text.split("\n")
        views = [each.strip() if options.by == "text" else normalised(each) for each in lines]
        hashes = [
            (xxhash.xxh3_64_intdigest(each.encode("utf-8")) or 1) if len(each) >= options.least else 0 for each in views
        ]
        return np.array(hashes, np.uint64)

    return parts


def shingles(text: str, unit: str, n: int) -> np.ndarray:
    """Hashes of the distinct n-grams of a text, uint64, in no particular order. Empty if it is shorter than n."""
    normal = normalised(text)
    if unit == "characters":
        grams: Iterable[str] = {normal[first : first + n] for first in range(len(normal) - n + 1)}
    else:
        words = normal.split()
        grams = {" ".join(words[first : first + n]) for first in range(len(words) - n + 1)}
    return np.array([xxhash.xxh3_64_intdigest(each.encode("utf-8")) for each in grams], np.uint64)


def signature(hashes: np.ndarray, factors: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """For each hash function (h·a + b mod 2^64) mod 2^61 - 1, the least value over all hashes.

    Args:
        hashes: uint64 [count], not empty.
        factors, terms: uint64 [functions].
    """
    least = np.full(len(factors), PRIME, np.uint64)
    for first in range(0, len(hashes), 1024):
        part = (hashes[first : first + 1024, None] * factors + terms) % PRIME
        least = np.minimum(least, part.min(axis=0))
    return least


def _minhash(options: MinhashSection) -> Keys:
    count = options.bands * options.rows
    draw = np.random.Generator(np.random.PCG64(options.seed))
    factors = draw.integers(1, 1 << 61, count, np.uint64) | np.uint64(1)
    terms = draw.integers(0, 1 << 61, count, np.uint64)

    def keys(document: Any) -> np.ndarray | None:
        hashes = shingles(document.text, options.unit, options.n)
        if not len(hashes):
            return None
        bands = signature(hashes, factors, terms).astype("<u8").reshape(options.bands, options.rows)
        digests = b"".join(hashlib.blake2b(each.tobytes(), digest_size=16).digest() for each in bands)
        return np.frombuffer(digests, "<u8").reshape(options.bands, 2)

    return keys


def _minhash_rules(options: MinhashSection, path: str, where: str) -> Iterable[Problem]:
    if options.bands * options.rows > 10_000:
        rule = f"{path} must have at most 10,000 hashes, and bands x rows are {options.bands * options.rows:,}"
        yield Problem(f"{path}.bands", rule, "use fewer bands or rows", options.bands, where)


EXACT = StageKind(ExactSection, keys=_exact)
LINES = StageKind(LinesSection, parts=_lines)
MINHASH = StageKind(MinhashSection, keys=_minhash, rules=_minhash_rules)


class DecontaminateSection(Section):
    file: str = key(..., "The evaluation set: JSON lines (.jsonl), or a text whose paragraphs are the examples.")
    fields: list[str] = key(
        list, "Of JSON lines, the keys whose texts are joined. Default: text, or context and continuation."
    )
    action: Literal["remove", "report"] = key(
        "remove", "report: the document is kept and counted, with the example in its metadata."
    )
    n: int = key(13, "Words of an n-gram that a document must not share with an example.", ge=1)


def _decontaminate(options: DecontaminateSection) -> Work:
    examples = read_examples(options.file, tuple(options.fields))
    numbers: dict[str, int] = {}
    sequences = [
        np.array([numbers.setdefault(each, len(numbers) + 1) for each in words(text)], np.int32) for _, text in examples
    ]
    index = NgramIndex(sequences, options.n, len(numbers))
    first_with = {row: name for (name, _), rows in reversed(list(zip(examples, index.of))) for row in rows.tolist()}

    def work(document: Any) -> Removed | Noted | None:
        known = np.array([numbers.get(each, 0) for each in words(document.text)], np.int32)
        places, rows = index.find(known)
        if not len(places):
            return None
        reason, example = "shares an n-gram with an example", first_with[int(rows[0])]
        if options.action == "remove":
            return Removed(reason, f"example {example}")
        document.metadata["overlap"] = example
        return Noted(reason)

    return work


def _rules(options: DecontaminateSection, path: str, where: str) -> Iterable[Problem]:
    try:
        examples = read_examples(options.file, tuple(options.fields))
    except DataError as error:
        yield Problem(
            f"{path}.file", f"{path}.file must be an evaluation set: {error}", "check it", options.file, where
        )
        return
    if not any(len(words(text)) >= options.n for _, text in examples):
        rule = f"{path}.n must be at most the number of words of some example, and no example has {options.n}"
        yield Problem(f"{path}.n", rule, "use a smaller n", options.n, where)


DECONTAMINATE = StageKind(DecontaminateSection, work=_decontaminate, rules=_rules, files=one_file)
