"""Checksums of a token file's blocks, which detect tokens that a disk has changed.

A changed token within the vocabulary is otherwise undetectable. The manifest of a pair has a CRC-32 of every block of
the .bin. A process checks a block before its first read.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import DataError

if TYPE_CHECKING:
    from .token_file import TokenFile

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

    def read_by(self, step: int, sample: int) -> DamagedTokens:
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
            raise DataError(
                file.prefix, f"the checksums in its manifest are damaged ({error})", "copy the manifest again"
            ) from error
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
