"""The manifest of a `.bin/.idx` pair: its inputs, tokenizer and hashes.

It has a CRC-32 of every block of the .bin, which detect tokens that a disk has changed. A changed token within the
vocabulary is otherwise undetectable. A process checks a block before its first read."""

import base64
import binascii
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..config.file_access import read_json, replace_file
from .errors import DataError
from .hashing import file_hash
from .token_file import TokenFile, with_ending

BLOCK = 1 << 18  # bytes
NO_CHECKSUMS = "has no checksums of blocks, so changed tokens are not detected: deepy data inspect {} --add-checksums"


class DamagedTokens(DataError):
    """Tokens differ from the written ones.

    Attributes:
        document: the first of the documents to read that has bytes in the damaged block.
    """

    def __init__(self, path: object, document: int, what: str, reader: str = ""):
        self.path, self.document, self.what = path, document, what
        super().__init__(
            path,
            f"{what}: document {document} is not what was written{reader}",
            "copy the file again from where it is intact (deepy data inspect FILE --verify lists all damaged blocks)",
        )

    def read_by(self, step: int, sample: int) -> "DamagedTokens":
        """The same error, with the step that reads the tokens."""
        return DamagedTokens(self.path, self.document, self.what, f". Step {step} reads it (sample {sample})")

    def __reduce__(self) -> tuple[type[DataError], tuple[object, ...]]:
        return DamagedTokens, (self.path, self.document, self.what)


def checksums_of(path: Path) -> dict[str, Any]:
    """The entry `blocks` of a .bin's manifest. Reads the whole file."""
    with open(path, "rb") as file:
        sums = [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK), b"")]
    table = np.array(sums, "<u4").tobytes()
    return {"bytes": BLOCK, "crc32": base64.b64encode(table).decode(), "table": f"{zlib.crc32(table):08x}"}


class BlockChecksums:
    """The checksums of a .bin, and which blocks this process has checked.

    Args:
        file: the open pair.
        entry: `blocks` of its manifest.

    Raises:
        DataError: the entry is damaged, or belongs to another file.
    """

    def __init__(self, file: TokenFile, entry: Mapping[str, Any]):
        self._file, self._width = file, file.dtype.itemsize
        self._bytes = file.flat(0, file.tokens).view(np.uint8)
        try:
            self._size, table = int(entry["bytes"]), base64.b64decode(entry["crc32"], validate=True)
            sums = np.frombuffer(table, "<u4")
            if self._size < 1 or f"{zlib.crc32(table):08x}" != entry["table"]:
                raise ValueError("its own checksum differs")
            if len(sums) != -(-len(self._bytes) // self._size):
                raise ValueError(f"it has {len(sums)} blocks for {len(self._bytes)} bytes")
        except (ValueError, KeyError, TypeError, OverflowError, binascii.Error) as error:
            raise DataError(file.prefix, f"its block checksums are damaged ({error})", "copy the manifest") from error
        self._sums, self._checked = sums, bytearray(len(sums))

    def check(self, document: int, start: int, length: int) -> None:
        """Check the blocks of a document's tokens before they are read.

        Raises:
            DamagedTokens: a block is damaged.
        """
        if not length:
            return
        begin = int(self._file.offsets[document]) + start * self._width
        for block in range(begin // self._size, (begin + length * self._width - 1) // self._size + 1):
            if not self._checked[block]:
                if self._differs(block):
                    raise DamagedTokens(self._file.bin_path, document, self._place(block))
                self._checked[block] = 1

    def damaged(self) -> list[str]:
        """All damaged blocks, each with its documents. Reads everything."""
        found = []
        for block in range(len(self._sums)):
            if self._differs(block):
                offsets, last = self._file.offsets, (block + 1) * self._size - 1
                first, last = (int(np.searchsorted(offsets, at, "right")) - 1 for at in (block * self._size, last))
                found.append(f"{self._place(block)} differ from the written ones (documents {first} to {last})")
        return found

    def _differs(self, block: int) -> bool:
        part = self._bytes[block * self._size : (block + 1) * self._size]
        return zlib.crc32(part.data) != int(self._sums[block])

    def _place(self, block: int) -> str:
        return f"bytes {block * self._size} to {min((block + 1) * self._size, len(self._bytes)) - 1}"


ENDING = ".json"
FORMAT = "token file manifest"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """Facts about a token file besides its tokens."""

    tokenizer: dict[str, Any]  # kind, name, hash, size and eod_id of the tokenizer
    documents: int  # documents, tokens: counts
    tokens: int
    largest: int  # the largest id
    dtype: str  # type of the stored tokens
    bin_hash: str  # bin_hash, idx_hash: SHA-256 of the two files
    idx_hash: str
    # For each input file its path, bytes, SHA-256 (of files), documents and tokens
    inputs: list[dict[str, Any]] = field(default_factory=list)
    # Unit of the numbers in the pair's `.origin` table ("bytes", "rows"). None without a table.
    origin: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # treatment of the texts
    encoder: str = ""  # program that computed the ids
    version: str = ""  # of this program
    job: str = ""  # hash of the inputs and options of a tokenizing job, or ""
    blocks: dict[str, Any] | None = None  # checksums of the .bin by block (`block_checksums`), or None

    def write(self, prefix: str | os.PathLike) -> Path:
        """Write it next to a pair, completely or not at all."""
        path = with_ending(prefix, ENDING)
        values = {"format": FORMAT, "format_version": VERSION, **asdict(self)}
        replace_file(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
        return path


def hashed(binary: Path, index: Path) -> dict[str, Any]:
    """The entries of a manifest that depend on the content of a pair."""
    return {"bin_hash": file_hash(binary), "idx_hash": file_hash(index), "blocks": checksums_of(binary)}


def keep_others(prefix: str | os.PathLike) -> None:
    """Refuse to overwrite a file that is no manifest.

    Raises:
        DataError: there is such a file.
    """
    path = with_ending(prefix, ENDING)
    if not path.exists():
        return
    try:
        ours = read_json(path)["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise DataError(path, "the manifest would replace this file, which is something else", "use another --output")


def read_manifest(prefix: str | os.PathLike) -> Manifest | None:
    """The manifest of a pair. None if there is none, as with other programs' files.

    Raises:
        DataError: it is damaged.
    """
    path = with_ending(prefix, ENDING)
    if not path.is_file():
        return None
    try:
        values = read_json(path)
        if values.pop("format") != FORMAT or values.pop("format_version") != VERSION:
            raise ValueError("another format")
        return Manifest(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(path, f"it is no intact manifest ({error})", "remake the pair, or remove this file") from error
