"""Texts that are likely to show any difference between two encoders."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence

import numpy as np

# Texts -> (tokens of all of them end to end, length of each).
Encode = Callable[[list[str]], tuple[np.ndarray, np.ndarray]]

BLOCK = 256
PLANES = (range(0, 0x32400, BLOCK), range(0xE0000, 0xE0200, BLOCK))  # where Unicode has characters, or may soon
# A character between marks of other classes, between letters, digits and signs.
SURROUNDINGS = ("a\u0345{}\u0316b ", "a{}b 1{}1.{}.", " {} {}{}")
RUNS = (" ", "\n", "\t", "a", "A", "0", "-", "=", ".", "é", "字", "\u0301", "🙂", " \n", "ab", "'", "\xa0", "\u3000")
ALPHABET = (
    *" \n\t'\"()[]{}.,;:!?-_/\\<>|@#$%^&*+=~`",
    *"etaoinshrdluETAO0123456789éüßñçøłıſжщя字漢のア한🙂👩🏽",
    *("\u200d", "\u0301", "\xa0", "\u2028", "\x85", "n't", "'re", "  ", "    ", "\r\n", "def ", "the "),
)


def _blocks(first: int) -> str:
    return "".join(map(chr, range(first, first + BLOCK)))


def _surrounded(character: str) -> list[str]:
    return [surrounding.replace("{}", character) for surrounding in SURROUNDINGS]


def unsafe_characters(one: Encode, two: Encode) -> str:
    """All single characters that two encoders treat differently in some surroundings."""
    blocks = [
        block for plane in PLANES for first in plane if not 0xD800 <= first < 0xE000 for block in (_blocks(first),)
    ]
    texts = ["".join(part) for block in blocks for part in zip(*map(_surrounded, block))]
    places = set((index // len(SURROUNDINGS)) for index in differing(one, two, texts))
    suspects = [character for place in sorted(places) for character in blocks[place]]
    texts = [text for character in suspects for text in _surrounded(character)]
    return "".join(
        suspects[place] for place in sorted({index // len(SURROUNDINGS) for index in differing(one, two, texts)})
    )


def probes(special: Sequence[str], without: str = "", seed: int = 0) -> list[str]:
    """Every Unicode block, special tokens in all surroundings, long runs, numbers, and mixtures of these.

    Args:
        special: the tokenizer's special tokens.
        without: characters that are removed from the blocks, so that the others are tested.
    """
    random = np.random.default_rng(seed)
    texts = ["", " ", "\n", "\t", "\r\n", "\0", "a", "\ufeff", "\ufffd", "\u200b", "e\u0301", "\u0301"]
    texts += ["'s", "I'll've 'S"]
    removed = dict.fromkeys(map(ord, without))
    for first in (first for first in range(0, 0x110000, BLOCK) if not 0xD800 <= first < 0xE000):
        letters = unicodedata.normalize("NFC", _blocks(first).translate(removed))
        texts += [letters, " ".join(letters[::7]), f"x{letters[::5]}1 {letters[3::11]}\n"]
    for token in special:
        texts += [token, token * 3, f" {token} ", f"a{token}b", f"\n{token}\n", token[:-1], token[1:]]
        texts.append(f"{token[:3]}{token}{token[3:]}")
    for run in RUNS:
        texts += [run * length for length in (2, 3, 7, 8, 9, 16, 17, 100, 1000, 5000)]
        texts += [f"x{run * 33}y", f"{run * 5} z", f" {run * 4}"]
    texts += [" ".join(str(int(each)) for each in random.integers(0, 10**digits, 20)) for digits in range(1, 18)]
    alphabet = np.array([*ALPHABET, *special], dtype=object)
    for length in (5, 20, 80, 400):
        texts += ["".join(random.choice(alphabet, length)) for _ in range(60)]
    return texts + list(_marks(random, removed))


def _marks(random: np.random.Generator, removed: dict[int, None]) -> Iterator[str]:
    """Random characters with combining marks, composed as far as possible."""
    everything = [chr(code) for code in range(0x32400) if not 0xD800 <= code < 0xE000 and code not in removed]
    marks = [character for character in everything if unicodedata.combining(character)]
    for _ in range(600):
        letters = random.choice(len(everything), 40)
        yield unicodedata.normalize("NFC", "".join(everything[index] for index in letters))
        pairs = zip(random.choice(min(len(everything), 0x3000), 20), random.choice(len(marks), 20))
        yield unicodedata.normalize("NFC", "".join(everything[letter] + marks[mark] for letter, mark in pairs))


def differing(one: Encode, two: Encode, texts: list[str]) -> Iterator[int]:
    """The positions of texts that two encoders treat differently."""
    for begin in range(0, len(texts), BLOCK):
        part = texts[begin : begin + BLOCK]
        (first, first_sizes), (second, second_sizes) = one(part), two(part)
        if np.array_equal(first_sizes, second_sizes) and np.array_equal(first, second):
            continue
        pairs = zip(np.split(first, np.cumsum(first_sizes)[:-1]), np.split(second, np.cumsum(second_sizes)[:-1]))
        yield from (begin + index for index, pair in enumerate(pairs) if not np.array_equal(*pair))


def difference(one: Encode, two: Encode, texts: list[str]) -> str | None:
    """The first text that two encoders treat differently, shortened. None if they agree."""
    place = next(differing(one, two, texts), None)
    return None if place is None else ascii(texts[place][:40])
