"""Train tokenizers on texts: byte-level BPE and unigram with `tokenizers`, both with `sentencepiece`, characters.

The tokenizer of a trained model can also get further tokens: byte-pair merges that are learned on new texts. Every id
keeps its meaning, and so do the rows of an embedding. The old merges come first, so a text is cut as before. The new
merges then join the pieces."""

import io
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.config.file_access import read_json, replace_file

from ..errors import DataError
from ..tokenizer import from_json
from .encode import Treatment, texts_of
from .inputs import Input, read_chunks

END = "<|endoftext|>"


def texts(inputs: list[Input], treatment: Treatment, limit: int | None = None) -> Iterator[str]:
    """All texts of inputs, in order, up to about `limit` bytes. Bad records are skipped.

    Raises:
        DataError: there is no text.
    """
    read = 0
    for number, entry in enumerate(inputs):
        for chunk in read_chunks(number, entry, key=treatment.key):
            for text in texts_of(chunk, treatment)[0]:
                if limit is not None and read >= limit:
                    return
                read += len(text.encode())
                yield text
    if read == 0:
        raise DataError(inputs[0].name, "there is no text to learn from", "check --key and the inputs")


def train(kind: str, corpus: Iterator[str], size: int, output: Path, special: tuple[str, ...] = ()) -> dict:
    """Train a tokenizer and write it.

    Args:
        kind: "bpe" or "unigram" (byte-level tokenizer.json), "sentencepiece-bpe" or "sentencepiece-unigram" (.model),
            or "characters" (.json).
        size: ids of the vocabulary, with special tokens. For characters their number decides.
        special: tokens after the end-of-document token, which is always the first (id 0).

    Returns:
        `path`, `kind` and `size` of the file.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    tokens = [END, *special]
    if kind in ("bpe", "unigram"):
        found = _with_tokenizers(kind, corpus, size, output, tokens)
    elif kind == "characters":
        found = _characters(corpus, output)
    else:
        found = _with_sentencepiece(kind.removeprefix("sentencepiece-"), corpus, size, output, tokens)
    return {"path": str(output), "kind": kind, "size": found}


def _with_tokenizers(kind: str, corpus: Iterator[str], size: int, output: Path, special: list[str]) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if size < len(alphabet) + len(special):
        raise DataError("--size", f"must be at least {len(alphabet) + len(special)}, to be byte-level", "ask for more")
    is_bpe = kind == "bpe"
    tokenizer = Tokenizer(models.BPE() if is_bpe else models.Unigram())
    make: Any = trainers.BpeTrainer if is_bpe else trainers.UnigramTrainer
    trainer = make(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(corpus, trainer)
    replace_file(output, tokenizer.to_str(pretty=True).encode())
    return max(tokenizer.get_vocab().values()) + 1


def _with_sentencepiece(kind: str, corpus: Iterator[str], size: int, output: Path, special: list[str]) -> int:
    import sentencepiece

    model = io.BytesIO()
    lines = (line for text in corpus for line in text.split("\n") if line)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            vocab_size=size,
            model_type=kind,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            eos_piece=END,
            bos_id=-1,
            pad_id=-1,
            eos_id=0,
            unk_id=1,
            control_symbols=special[1:],
            user_defined_symbols=["\n"],
            hard_vocab_limit=False,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(
            "--size", f"sentencepiece cannot make {size} ids ({error})", "ask for another size, or give more text"
        ) from error
    replace_file(output, model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).vocab_size()


def _characters(corpus: Iterator[str], output: Path) -> int:
    counts: Counter[str] = Counter()
    for text in corpus:
        counts.update(text)
    characters = [character for character, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    replace_file(output, json.dumps(characters, ensure_ascii=False).encode())
    return len(characters) + 2


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
