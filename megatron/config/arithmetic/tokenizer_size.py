"""How many ids a tokenizer has, read from its files, so that `model.vocab_size` is known before a process starts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..file_access import read_json


class SizeUnknown(Exception):
    """The size cannot be read from local files. str() has the reason."""


def _size(file: Path, what: str, size: Callable[[Any], int]) -> int:
    """The size that the content of a JSON file gives."""
    if not file.is_file():
        raise SizeUnknown(f"{file} is no local file")
    try:
        return size(read_json(file))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SizeUnknown(f"{file} is no {what} ({type(error).__name__}: {error})") from error


def _inside(path: Path, name: str) -> Path:
    return path / name if path.is_dir() else path


def _largest(content: Any) -> int:
    """The largest id of tokenizer.json (its model's vocabulary and its added tokens) plus one."""
    vocabulary = content["model"]["vocab"]
    added = [token["id"] for token in content.get("added_tokens") or ()]
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max([*ids, *added], default=-1) + 1


def local_tokens(tokenizer: Mapping[str, Any]) -> set[str] | None:
    """The tokens of a local tokenizer.json, as it spells them, added ones included, or None."""
    if tokenizer["type"] != "huggingface" or not tokenizer["path"]:
        return None
    file = _inside(Path(tokenizer["path"]), "tokenizer.json")
    if not file.is_file():
        return None
    try:
        content = read_json(file)
        vocabulary = content["model"]["vocab"]
        words = vocabulary if isinstance(vocabulary, dict) else (word for word, _ in vocabulary)
        return {*words, *(token["content"] for token in content.get("added_tokens") or ())}
    except (ValueError, KeyError, TypeError):
        return None  # which is reported where its size is read


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


_READERS: dict[str, Callable[[Path], int]] = {
    "huggingface": lambda path: _size(_inside(path, "tokenizer.json"), "tokenizer.json", _largest),
    "gpt2": lambda path: _size(_inside(path, "vocab.json"), "vocabulary", lambda ids: max(ids.values()) + 1),
    # one more for all other characters, and the end of document
    "characters": lambda path: _size(path, "list of characters", lambda content: len(content) + 2),
    "sentencepiece": _sentencepiece,
}
_BUILT_IN = {"bytes": 257, "characters": 512}  # bytes and the end of document, and GPT-NeoX's character tokenizer
