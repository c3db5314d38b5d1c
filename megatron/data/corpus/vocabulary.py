"""Train tokenizers on texts: byte-level BPE and unigram with `tokenizers`, both with `sentencepiece`, characters."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...config.file_access import replace_file
from ..errors import DataError
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
        raise DataError(
            "--size", f"a byte-level vocabulary has at least {len(alphabet) + len(special)} ids", "ask for more"
        )
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
