"""How many ids a tokenizer has, read from its files, so that `model.vocab_size` is known before a process starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..file_access import read_json


class SizeUnknown(Exception):
    """The size cannot be read from local files. str() has the reason."""


def _huggingface(path: Path) -> int:
    """The largest id of tokenizer.json (its model's vocabulary and its added tokens) plus one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise SizeUnknown(f"{file} is no local file")
    try:
        content = read_json(file)
        vocabulary = content["model"]["vocab"]
        added = [token["id"] for token in content.get("added_tokens") or ()]
    except (ValueError, KeyError, TypeError) as error:
        raise SizeUnknown(f"{file} is no tokenizer.json ({type(error).__name__}: {error})") from error
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max([*ids, *added], default=-1) + 1


def local_tokens(tokenizer: Mapping[str, Any]) -> set[str] | None:
    """The tokens of a local tokenizer.json, as it spells them, added ones included, or None."""
    if tokenizer["type"] != "huggingface" or not tokenizer["path"]:
        return None
    path = Path(tokenizer["path"])
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return None
    try:
        content = read_json(file)
        vocabulary = content["model"]["vocab"]
        words = vocabulary if isinstance(vocabulary, dict) else (word for word, _ in vocabulary)
        return {*words, *(token["content"] for token in content.get("added_tokens") or ())}
    except (ValueError, KeyError, TypeError):
        return None  # which is reported where its size is read


def _gpt2(path: Path) -> int:
    """The largest id of a GPT-2 vocab.json plus one."""
    file = path / "vocab.json" if path.is_dir() else path
    if not file.is_file():
        raise SizeUnknown(f"{file} is no local file")
    try:
        return max(read_json(file).values()) + 1
    except (ValueError, AttributeError, TypeError) as error:
        raise SizeUnknown(f"{file} is no vocabulary ({type(error).__name__}: {error})") from error


def _characters(path: Path) -> int:
    """A JSON list of characters, one for all others, and the end of document."""
    if not path.is_file():
        raise SizeUnknown(f"{path} is no local file")
    try:
        return len(read_json(path)) + 2
    except (ValueError, TypeError) as error:
        raise SizeUnknown(f"{path} is no list of characters ({type(error).__name__}: {error})") from error


def _sentencepiece(path: Path) -> int:
    if not path.is_file():
        raise SizeUnknown(f"{path} is no local file")
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes()).vocab_size()
    except RuntimeError as error:
        raise SizeUnknown(f"{path} is no SentencePiece model ({error})") from error


def tokenizer_size(tokenizer: Mapping[str, Any]) -> int:
    """The largest id plus one of the tokenizer that a `tokenizer` section describes.

    Raises:
        SizeUnknown: there is none, it is not on this machine, or its kind needs its library's own data.
    """
    kind, path = tokenizer["type"], tokenizer["path"]
    if kind in _BUILT_IN and not path:
        return _BUILT_IN[kind]
    if kind in _READERS and path:
        return _READERS[kind](Path(path))
    if kind == "none" or not path:
        raise SizeUnknown("there is no tokenizer")
    raise SizeUnknown(f"the size of a {kind} tokenizer stands in no local file")


_READERS = {"huggingface": _huggingface, "gpt2": _gpt2, "characters": _characters, "sentencepiece": _sentencepiece}
_BUILT_IN = {"bytes": 257, "characters": 512}  # bytes and the end of document, and GPT-NeoX's character tokenizer
