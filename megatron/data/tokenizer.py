"""Tokenizers: ids of texts and back, size of the vocabulary, end-of-document id, and an identifying hash."""

import hashlib
import json
import os
import socket
import threading
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron.config.file_access import read_json
from megatron.config.sections.data import TokenizerSection

from .errors import DataError

PATIENCE = 2.5  # seconds for an answer to a connection. The library's own variable replaces it


def unreachable(endpoint: str) -> str | None:
    """Why a server cannot be reached, or None if it, or the proxy on the way to it, accepts a connection.

    Args:
        endpoint: its URL.
    """
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(host):
        way = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        host, port = way.hostname or "", way.port or (443 if way.scheme == "https" else 80)
    patience = _number(os.environ.get("HF_HUB_ETAG_TIMEOUT")) or PATIENCE
    outcome: list[str | None] = []

    def call() -> None:
        try:
            socket.create_connection((host, port), patience).close()
            outcome.append(None)
        except OSError as error:
            outcome.append(f"{host} cannot be reached ({error.strerror or error})")

    thread = threading.Thread(target=call, daemon=True)  # looking up a name has no time limit of its own
    thread.start()
    thread.join(patience)
    late = f"{host} does not answer within {patience:g} seconds (HF_HUB_ETAG_TIMEOUT gives it more)"
    return outcome[0] if outcome else late


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


# Tokens that end a document in published vocabularies, searched in this order.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")
# GPT-2's alphabet: printable bytes of Latin-1 are themselves, the others are the characters from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
CHARACTER_SIZE = 512  # of GPT-NeoX's CharLevelTokenizer


class Tokenizer(ABC):
    """Interface of all tokenizers."""

    kind: str
    name: str
    size: int  # the largest id plus one
    eod_id: int | None  # id of the end-of-document token, or None
    hash: str  # SHA-256 of everything that determines the ids. Token files of one blend must have the same.

    @property
    def facts(self) -> dict[str, Any]:
        """The entry of a manifest."""
        return {name: getattr(self, name) for name in ("kind", "name", "hash", "size", "eod_id")}

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text, with nothing added at its ends."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, with special tokens spelled out."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, each as by `encode`."""
        return [self.encode(text) for text in texts]

    def bytes_of_ids(self) -> list[bytes] | None:
        """The bytes of each id, whose sequence is a text's bytes. None if ids have none."""
        return None

    def token(self, identity: int) -> str:
        """The text of one id, for showing."""
        return self.decode([identity])


def digest(kind: str, content: Any) -> str:
    """SHA-256 of a tokenizer's content: bytes as they are, other values as canonical JSON."""
    data = content if isinstance(content, bytes) else json.dumps(content, sort_keys=True, ensure_ascii=True).encode()
    return hashlib.sha256(kind.encode() + b"\0" + data).hexdigest()


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` run by the `tokenizers` library. Also GPT-2's vocabulary and merges."""

    def __init__(self, backend: Any, content: Any, name: str, end: str | None = None, kind: str = "huggingface"):
        """Args:
        backend: a `tokenizers.Tokenizer`.
        content: the content of its files, for the hash.
        end: text of the end-of-document token. Default: one of END_TOKENS in the vocabulary."""
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.name, self.kind = backend, name, kind
        self.size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eod_id = self._find(end)
        self.hash = digest(kind, content)

    def _find(self, end: str | None) -> int | None:
        for token in (end,) if end else END_TOKENS:
            found = self.backend.token_to_id(token)
            if found is not None:
                return found
        if end:
            raise DataError("tokenizer.eod_token", f"{self.name} has no token {end!r}", "name one of its tokens")
        return None

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # the fast one does not compute the place of each token in the text, and has the same ids
        return [each.ids for each in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def bytes_of_ids(self) -> list[bytes] | None:
        """For byte-level vocabularies: their characters stand for bytes, and added tokens are plain text."""
        decoder = json.loads(self.backend.to_str())["decoder"] or {}
        if decoder.get("type") != "ByteLevel":
            return None
        table = [b""] * self.size
        for token, identity in self.backend.get_vocab(with_added_tokens=False).items():
            known = all(each in BYTE_OF for each in token)
            table[identity] = bytes(map(BYTE_OF.__getitem__, token)) if known else token.encode()
        for identity, added in self.backend.get_added_tokens_decoder().items():
            table[identity] = added.content.encode()
        return table


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file."""

    kind = "sentencepiece"

    def __init__(self, path: Path, end: str | None = None):
        import sentencepiece

        content = path.read_bytes()
        try:
            self.model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise DataError(path, f"it is no SentencePiece model ({error})", "give a .model file") from error
        self.name, self.size, self.hash = path.name, self.model.vocab_size(), digest(self.kind, content)
        found = self.model.eos_id() if end is None else self.model.piece_to_id(end)
        if end is not None and self.model.id_to_piece(found) != end:
            raise DataError("tokenizer.eod_token", f"{path} has no piece {end!r}", "name a piece of the model")
        self.eod_id = None if found < 0 else found

    def encode(self, text: str) -> list[int]:
        return self.model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Control pieces (the end of a document) are spelled out, unlike in SentencePiece's own decoder."""
        parts: list[str] = []
        run: list[int] = []
        for each in map(int, ids):
            if self.model.is_control(each):
                parts += [self.model.decode(run), self.model.id_to_piece(each)]
                run = []
            else:
                run.append(each)
        return "".join([*parts, self.model.decode(run)])

    def bytes_of_ids(self) -> list[bytes]:
        space = "\N{LOWER ONE EIGHTH BLOCK}"
        return [
            bytes([int(piece[3:5], 16)]) if self.model.is_byte(identity) else piece.replace(space, " ").encode()
            for identity, piece in ((each, self.model.id_to_piece(each)) for each in range(self.size))
        ]


class TiktokenTokenizer(Tokenizer):
    """An encoding of the `tiktoken` library, by name (`cl100k_base`)."""

    kind = "tiktoken"

    def __init__(self, name: str, end: str | None = None):
        import tiktoken

        if name not in tiktoken.list_encoding_names():
            rule = f"tiktoken has no encoding {name!r}"
            raise DataError("tokenizer.path", rule, f"one of {', '.join(tiktoken.list_encoding_names())}")
        self.encoding = tiktoken.get_encoding(name)
        self.name, self.size = name, self.encoding.n_vocab
        special = self.encoding._special_tokens
        if end is not None and end not in special:
            raise DataError("tokenizer.eod_token", f"{name} has no token {end!r}", f"one of {', '.join(special)}")
        self.eod_id = special[end] if end else self.encoding.eot_token
        ranks = sorted((rank, token.hex()) for token, rank in self.encoding._mergeable_ranks.items())
        self.hash = digest(self.kind, [self.encoding._pat_str, ranks, sorted(special.items())])

    def encode(self, text: str) -> list[int]:
        """Text that looks like a special token is text, as in GPT-NeoX."""
        return self.encoding.encode(text, disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        table = self._table
        return b"".join(table[each] for each in ids if 0 <= each < self.size).decode("utf-8", errors="replace")

    def bytes_of_ids(self) -> list[bytes]:
        return self._table

    @cached_property
    def _table(self) -> list[bytes]:
        """Encodings have ids without a text, at which the library's own `decode` fails."""
        names = {rank: token for token, rank in self.encoding._mergeable_ranks.items()}
        names |= {identity: text.encode() for text, identity in self.encoding._special_tokens.items()}
        return [names.get(identity, b"") for identity in range(self.size)]


class BytesTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, then the end-of-document token. GPT-NeoX's variant has 512 ids and ends with 0."""

    def __init__(self, kind: str = "bytes", size: int = 257, eod_id: int = 256):
        self.kind = self.name = kind
        self.size, self.eod_id, self.hash = size, eod_id, digest("bytes", [size, eod_id])

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="surrogatepass"))

    def decode(self, ids: Sequence[int]) -> str:
        parts, run = [], bytearray()
        for each in ids:
            if each < 256 and each != self.eod_id:
                run.append(each)
            else:
                parts += [run.decode("utf-8", errors="replace"), "<|endoftext|>" if each == self.eod_id else ""]
                run = bytearray()
        return "".join([*parts, run.decode("utf-8", errors="replace")])

    def bytes_of_ids(self) -> list[bytes]:
        table = [bytes([each]) if each < 256 else b"" for each in range(self.size)]
        if self.eod_id is not None:
            table[self.eod_id] = b"<|endoftext|>"
        return table


class CharactersTokenizer(Tokenizer):
    """One id per character of a JSON list, then one for unknown characters, then the end of document."""

    kind = "characters"

    def __init__(self, path: Path):
        try:
            characters = read_json(path)
        except ValueError as error:
            raise DataError(path, f"it is no JSON ({error})", "give a JSON list of characters") from error
        if (
            not isinstance(characters, list)
            or not all(isinstance(each, str) and len(each) == 1 for each in characters)
            or len(set(characters)) != len(characters)
        ):
            raise DataError(path, "must be a JSON list of different characters", "use deepy data train-tokenizer")
        self.characters = characters
        self.ids = {each: index for index, each in enumerate(characters)}
        self.unknown_id, self.eod_id = len(characters), len(characters) + 1
        self.name, self.size, self.hash = path.name, len(characters) + 2, digest(self.kind, characters)

    def encode(self, text: str) -> list[int]:
        return [self.ids.get(each, self.unknown_id) for each in text]

    def decode(self, ids: Sequence[int]) -> str:
        special = ["\N{REPLACEMENT CHARACTER}", "<|endoftext|>"]
        return "".join((self.characters + special)[each] if each < self.size else "" for each in ids)

    def bytes_of_ids(self) -> list[bytes]:
        return [x.encode("utf-8", "replace") for x in [*self.characters, "\N{REPLACEMENT CHARACTER}", "<|endoftext|>"]]


def build_tokenizer(section: TokenizerSection) -> Tokenizer:
    """The tokenizer of a `tokenizer` section.

    Raises:
        DataError: its files are missing or damaged, or it lacks the end-of-document token.
    """
    if section.type == "none":
        raise DataError("tokenizer.type", "it is none: there is no tokenizer", "set tokenizer.type and tokenizer.path")
    tokenizer = _BUILDERS[section.type](section)
    if section.eod_id is not None:
        if section.eod_id >= tokenizer.size:
            rule = f"{section.eod_id} is no id: {tokenizer.name} has {tokenizer.size}"
            raise DataError("tokenizer.eod_id", rule, "give a smaller id")
        tokenizer.eod_id = section.eod_id
    return tokenizer


def tokenizer_for(section: TokenizerSection, append_eod: bool) -> Tokenizer:
    """The tokenizer of a section, for documents that may end with its end-of-document token."""
    tokenizer = build_tokenizer(section)
    if append_eod and tokenizer.eod_id is None:
        rule = f"{tokenizer.name} must have an end-of-document token"
        raise DataError("--tokenizer", rule, "name one with --eod-token, or use --no-append-eod")
    return tokenizer


def _path(section: TokenizerSection, what: str) -> str:
    if not section.path:
        raise DataError("tokenizer.path", f"a {section.type} tokenizer needs {what}", "set tokenizer.path")
    return section.path


def _file(section: TokenizerSection, what: str) -> Path:
    file = Path(_path(section, what))
    if not file.is_file():
        raise DataError(file, f"does not exist, and a {section.type} tokenizer needs {what}", "correct tokenizer.path")
    return file


def from_json(file: Path, name: str, end: str | None = None) -> HuggingFaceTokenizer:
    """The tokenizer of a tokenizer.json, without truncation and padding, which do not count in its hash."""
    from tokenizers import Tokenizer as Backend

    if not file.is_file():
        raise DataError(file, "this file does not exist", "correct tokenizer.path")
    try:
        backend, content = Backend.from_file(str(file)), read_json(file)
    except Exception as error:  # the library raises bare Exception for every kind of damage
        raise DataError(file, f"it cannot be read as a tokenizer.json ({error})", "give a tokenizer.json") from error
    return HuggingFaceTokenizer(backend, {**content, "truncation": None, "padding": None}, name, end)


def _end_of_folder(folder: Path) -> str | None:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    try:
        token = read_json(file).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(file, f"it must be a JSON object ({error})", "fix it, or give tokenizer.eod_token") from error
    return token_text(token)


def token_text(token: Any) -> str | None:
    """Text of a special token in a tokenizer's settings, which is a text or an object with one. None for others."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _huggingface(section: TokenizerSection) -> Tokenizer:
    path = _path(section, "a tokenizer.json, a folder with one, or a name on the hub")
    local = Path(path)
    if local.is_dir():
        return from_json(local / "tokenizer.json", path, section.eod_token or _end_of_folder(local))
    if local.is_file() or local.suffix == ".json" or path.count("/") > 1:
        return from_json(local, local.name, section.eod_token)
    file = _from_hub(path, "tokenizer.json")
    return from_json(file, path, section.eod_token or _end_of_folder(file.parent))


def _from_hub(name: str, file: str) -> Path:
    from huggingface_hub import constants, hf_hub_download

    missing = None if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
    try:
        return Path(hf_hub_download(name, file, endpoint=constants.ENDPOINT, local_files_only=bool(missing)))
    except (OSError, ValueError) as error:
        if missing:
            rule = f"it is no local file, it is not in the hub's local cache, and {missing}"
            fix = "give the path of a tokenizer.json, or fetch it where there is a network and take HF_HOME along"
            raise DataError(name, rule, fix) from error
        raise DataError(name, f"it is no local file, and not on the hub ({error})", "correct tokenizer.path") from error


def _gpt2(section: TokenizerSection) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    path = Path(_path(section, "a vocabulary (vocab.json)"))
    vocabulary = path / "vocab.json" if path.is_dir() else path
    merges = Path(section.merges) if section.merges else vocabulary.with_name("merges.txt")
    for file in (vocabulary, merges):
        if not file.is_file():
            raise DataError(file, "this file of a gpt2 tokenizer is missing", "set tokenizer.path and tokenizer.merges")
    try:
        backend = Backend(models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the library raises bare Exception for every kind of damage
        raise DataError(vocabulary, f"it or its merges cannot be read ({error})", "give GPT-2's two files") from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    content = [read_json(vocabulary), merges.read_text(encoding="utf-8").splitlines()]
    return HuggingFaceTokenizer(backend, content, vocabulary.name, section.eod_token, kind="gpt2")


_BUILDERS = {
    "huggingface": _huggingface,
    "sentencepiece": lambda section: SentencePieceTokenizer(_file(section, "a .model file"), section.eod_token),
    "tiktoken": lambda section: TiktokenTokenizer(_path(section, "the name of an encoding"), section.eod_token),
    "gpt2": _gpt2,
    "bytes": lambda section: BytesTokenizer(),
    "characters": lambda section: (
        CharactersTokenizer(_file(section, "a JSON list of characters"))
        if section.path
        else BytesTokenizer("characters", CHARACTER_SIZE, 0)
    ),
}
