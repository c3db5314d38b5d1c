"""Encode the texts of a chunk in a worker, and choose the encoder."""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np

from ...config.file_access import parse_json
from ..errors import DataError
from ..tokenizer import HuggingFaceTokenizer, Tokenizer
from .inputs import InputChunk

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
    blocks = [_blocks(first) for plane in PLANES for first in plane if not 0xD800 <= first < 0xE000]
    texts = ["".join(part) for block in blocks for part in zip(*map(_surrounded, block))]
    places = set((index // len(SURROUNDINGS)) for index in differing(one, two, texts))
    suspects = [character for place in sorted(places) for character in blocks[place]]
    texts = [text for character in suspects for text in _surrounded(character)]
    return "".join(suspects[at] for at in sorted({i // len(SURROUNDINGS) for i in differing(one, two, texts)}))


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


ORIGIN = np.dtype([("input", "<i4"), ("start", "<i8"), ("length", "<i8")])
LITTLE = 12 << 20  # bytes of one worker below which the probes, 4.5 s, are not worth their seconds


@dataclass(frozen=True)
class Treatment:
    """Treatment of texts."""

    key: str = "text"  # of the text in JSON objects and tables
    append_eod: bool = True  # end each document with an end-of-document token
    normalise: Literal["NFC", "NFD", "NFKC", "NFKD"] | None = None  # Unicode normal form ("NFC", ...), or None
    strip: bool = False  # remove white space at both ends


@dataclass
class Encoded:
    """The encoded documents of a chunk."""

    tokens: np.ndarray  # ids, document after document
    sizes: np.ndarray  # int32, tokens of each document
    origin: np.ndarray  # origin of each document (ORIGIN)
    bad: list[tuple[int, str]] = field(default_factory=list)  # (line, reason) of lines that are no text
    empty: int = 0  # number of texts without any token
    text_bytes: int = 0
    lines: int = 0


def texts_of(chunk: InputChunk, treatment: Treatment) -> tuple[list[str], list[tuple[int, int]], list[tuple[int, str]]]:
    """The texts of a chunk, (start, length) of each in the input, and (line, reason) of bad records."""
    if chunk.kind == "lines" and isinstance(chunk.content, bytes):
        return _texts_of_lines(chunk, chunk.content, treatment)
    texts, places, bad = [], [], []
    values: Sequence[object]
    if isinstance(chunk.content, bytes):
        values, width = [chunk.content], [(chunk.start, len(chunk.content) + 8 * (chunk.kind == "dat"))]
    else:
        values, width = chunk.content, [(chunk.start + index, 1) for index in range(len(chunk.content))]
    for index, value in enumerate(values):
        text, reason = _as_text(value, treatment)
        if reason:
            bad.append((chunk.line + index, reason))
        else:
            texts.append(text)
            places.append(width[index])
    return texts, places, bad


def _texts_of_lines(
    chunk: InputChunk, content: bytes, treatment: Treatment
) -> tuple[list[str], list[tuple[int, int]], list[tuple[int, str]]]:
    texts, places, bad = [], [], []
    position = chunk.start
    for number, line in enumerate(content.split(b"\n")):
        start, position = position, position + len(line) + 1
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            bad.append((chunk.line + number, f"no JSON: {error}"))
            continue
        if not isinstance(value, dict) or treatment.key not in value:
            keys = f", only {', '.join(map(repr, list(value)[:8]))}" if isinstance(value, dict) and value else ""
            bad.append((chunk.line + number, f"no object with the key {treatment.key!r}{keys}"))
            continue
        text, reason = _as_text(value[treatment.key], treatment)
        if reason:
            bad.append((chunk.line + number, reason))
        else:
            texts.append(text)
            places.append((start, len(line)))
    return texts, places, bad


def _as_text(value: Any, treatment: Treatment) -> tuple[str, str]:
    """A value as a treated text, or the reason why it is none. Lists of paragraphs are joined, as in lm_dataformat."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = "\n\n".join(value)
    try:
        if isinstance(value, (bytes, bytearray)):
            value = bytes(value).decode("utf-8")
        if not isinstance(value, str):
            return "", f"the text is {type(value).__name__}, not a string"
        value.encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        return "", f"no valid Unicode: {error.reason}"
    if treatment.normalise:
        value = unicodedata.normalize(treatment.normalise, value)
    return value.strip() if treatment.strip else value, ""


def encode_chunk(chunk: InputChunk, encode: Encode, treatment: Treatment, eod: int | None, dtype: np.dtype) -> Encoded:
    texts, places, bad = texts_of(chunk, treatment)
    tokens, sizes = encode(texts)
    kept = sizes > 0
    sizes = sizes[kept]
    if treatment.append_eod and eod is not None:
        tokens = np.insert(tokens, np.cumsum(sizes), eod)
        sizes = sizes + 1
    if len(tokens) and tokens.max() > np.iinfo(dtype).max:
        raise DataError("tokenizer", f"the id {tokens.max()} does not fit into {dtype.name}", "use a larger type")
    origin = np.array([(chunk.input, *place) for place in places], dtype=ORIGIN)[kept]
    return Encoded(
        tokens.astype(dtype),
        sizes.astype(np.int32),
        origin,
        bad,
        int((~kept).sum()),
        sum(len(text.encode()) for text in texts),
        chunk.content.count(b"\n") if chunk.kind == "lines" else 1,
    )


def with_gigatoken(tokenizer: HuggingFaceTokenizer) -> Encode:
    """Encoding by gigatoken on the calling thread."""
    import awkward
    import gigatoken

    fast = gigatoken.Tokenizer(tokenizer.backend)

    def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if not texts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        ids = fast.encode_batch(texts, parallel=False)
        return np.asarray(awkward.flatten(ids)).astype(np.int64), np.asarray(awkward.num(ids)).astype(np.int64)

    return encode


def mixed(fast: Encode, exact: Encode, unsafe: str) -> Encode:
    """Encoding by `fast` where it is known to be exact, by `exact` otherwise.

    Texts go to `exact` if they are not in Unicode's composed normal form, or have one of the `unsafe` characters. For
    these the libraries use different versions of Unicode."""
    pattern = re.compile(f"[{re.escape(unsafe)}]") if unsafe else None

    def is_safe(text: str) -> bool:
        return text.isascii() or (unicodedata.is_normalized("NFC", text) and not (pattern and pattern.search(text)))

    def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        safe = np.fromiter(map(is_safe, texts), bool, len(texts))
        if safe.all():
            return fast(texts)
        parts = [fn([t for t, own in zip(texts, safe) if own == kind]) for fn, kind in ((fast, True), (exact, False))]
        sizes = np.empty(len(texts), np.int64)
        sizes[safe], sizes[~safe] = parts[0][1], parts[1][1]
        tokens, from_fast = np.empty(int(sizes.sum()), np.int64), np.repeat(safe, sizes)
        tokens[from_fast], tokens[~from_fast] = parts[0][0], parts[1][0]
        return tokens, sizes

    return encode


def with_tokenizer(tokenizer: Tokenizer) -> Encode:
    """Encoding by the tokenizer's own library."""

    def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = tokenizer.encode_batch(texts)
        sizes = np.fromiter(map(len, ids), np.int64, len(ids))
        tokens = np.fromiter(chain.from_iterable(ids), np.int64, int(sizes.sum()))
        return tokens, sizes

    return encode


@dataclass(frozen=True)
class EncoderChoice:
    """An encoder: "gigatoken" or "tokenizer", the reason, and the characters that gigatoken must not encode."""

    name: str
    reason: str
    unsafe: str = ""


def choose_encoder(tokenizer: Tokenizer, requested: str = "auto", text_bytes: int | None = None) -> EncoderChoice:
    """Choose an encoder. "auto" takes gigatoken if it is installed and agrees with the tokenizer's own library on all
    probes.

    Args:
        text_bytes: bytes that each worker encodes. The probes cost more than they save on little text.

    Raises:
        DataError: gigatoken was requested and cannot be used.
    """
    own = {"huggingface": "tokenizers", "gpt2": "tokenizers"}.get(tokenizer.kind, tokenizer.kind)
    if requested == "tokenizer":
        return EncoderChoice("tokenizer", f"{own}, as asked")
    if requested == "auto" and text_bytes is not None and text_bytes < LITTLE:
        return EncoderChoice("tokenizer", f"{own} (too little text for a faster one to pay)")
    reason, unsafe = _try_gigatoken(tokenizer)
    if not reason:
        return EncoderChoice(
            "gigatoken",
            f"gigatoken: agrees with {own} on all probes. {own} encodes {len(unsafe)} rare characters",
            unsafe,
        )
    if requested == "gigatoken":
        raise DataError("--encoder", f"gigatoken cannot be used: {reason}", "use --encoder auto")
    return EncoderChoice("tokenizer", f"{own}: {reason}")


def _try_gigatoken(tokenizer: Tokenizer) -> tuple[str, str]:
    """Why gigatoken cannot be used ("" if it can), and the characters that it must not encode."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return f"gigatoken is not used for {tokenizer.kind} tokenizers", ""
    try:
        fast = with_gigatoken(tokenizer)
    except ImportError as error:
        return f"gigatoken is not installed ({error.name} is missing)", ""
    except Exception as error:  # the library raises its own and bare classes for tokenizers it does not know
        return f"gigatoken does not know this tokenizer ({error})", ""
    exact = with_tokenizer(tokenizer)
    special = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
    try:
        unsafe = unsafe_characters(exact, fast)
        found = difference(exact, mixed(fast, exact, unsafe), probes(special[:64], unsafe))
    except Exception as error:  # see above
        return f"gigatoken fails on a probe ({error})", ""
    return ("" if found is None else f"gigatoken differs from it on {found}"), unsafe


def build_encoder(tokenizer: Tokenizer, choice: EncoderChoice) -> Encode:
    exact = with_tokenizer(tokenizer)
    if choice.name != "gigatoken" or not isinstance(tokenizer, HuggingFaceTokenizer):
        return exact
    return mixed(with_gigatoken(tokenizer), exact, choice.unsafe)
