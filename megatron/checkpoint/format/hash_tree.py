"""A hash tree: verifies any part of a file without the rest.

Each block of the content has a checksum. Each block of these checksums has one in turn, up to one block, whose checksum
is the root. To verify a range, its blocks and one block of each level above are read: three levels for a gigabyte. The
levels follow the content, the lowest first.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from .errors import reading, refuse_checksum

BLOCK = 4096  # bytes: 256 checksums
DIGEST = 16  # bytes, of xxh3_128
AT_ONCE = 256  # blocks read at once: one block of checksums


class HashTreeBuilder:
    """The tree over a content that arrives in parts. No part is kept."""

    def __init__(self) -> None:
        self._lowest, self._rest = bytearray(), bytearray()

    def add(self, part: bytes | memoryview) -> None:
        """Append bytes to the content."""
        self._rest += part
        whole = max(0, len(self._rest) - 1) // BLOCK * BLOCK  # the last block may be the only one
        with memoryview(self._rest) as blocks:
            self._lowest += _digests(blocks[:whole])
        del self._rest[:whole]

    def finish(self) -> tuple[bytes, str]:
        """The levels above the content, and the root in hexadecimal digits."""
        below = bytes(self._rest)
        if self._lowest:
            below = bytes(self._lowest) + _digests(below)
        levels = [below] if self._lowest else []
        while len(below) > BLOCK:
            below = _digests(below)
            levels.append(below)
        return b"".join(levels), xxhash.xxh3_128_hexdigest(below)


def _digests(content: bytes | memoryview) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(content[place : place + BLOCK]) for place in range(0, len(content), BLOCK))


def spans(size: int) -> list[tuple[int, int]]:
    """(begin, end) of a content of `size` bytes, and of each level above it."""
    found = [(0, size)]
    while (blocks := _blocks(*found[-1])) > 1:
        found.append((found[-1][1], found[-1][1] + blocks * DIGEST))
    return found


def _blocks(begin: int, end: int) -> int:
    return -(-(end - begin) // BLOCK)


class HashTree:
    """Verifies ranges of a content, each block once.

    Args:
        subject: the file, for messages.
        fetch: returns bytes `begin` to `end` of the content and its levels, or raises OSError.
        size: bytes of the content.
        root: as of `HashTreeBuilder.finish`.
    """

    def __init__(self, subject: object, fetch: Callable[[int, int], bytes], size: int, root: str) -> None:
        self._subject, self._fetch, self._root = subject, fetch, bytes.fromhex(root)
        self._spans = spans(size)
        self._known = [bytearray(_blocks(*span)) for span in self._spans]

    @property
    def read(self) -> int:
        """Bytes verified so far."""
        sizes = (end - begin for begin, end in self._spans)
        return sum(min(sum(known) * BLOCK, size) for known, size in zip(self._known, sizes, strict=True))

    def check(self, begin: int, end: int) -> None:
        """Verify bytes `begin` to `end` of the content.

        Raises:
            CheckpointError: they differ from the written ones, or cannot be read.
        """
        if begin < end:
            self._check(0, begin // BLOCK, _blocks(0, end))

    def check_share(self, share: tuple[int, int]) -> None:
        """Verify share (number, count) of the content, cut in equal parts."""
        blocks = len(self._known[0])
        self._check(0, *(blocks * number // share[1] for number in (share[0], share[0] + 1)))

    def _check(self, level: int, first: int, last: int) -> None:
        known, (begin, end) = self._known[level], self._spans[level]
        while (first := known.find(0, first, last)) >= 0:
            stop = known.find(1, first, min(last, first + AT_ONCE))
            stop = min(last, first + AT_ONCE) if stop < 0 else stop
            with reading(self._subject):
                found = self._fetch(begin + first * BLOCK, min(begin + stop * BLOCK, end))
            parts = (found[place : place + BLOCK] for place in range(0, (stop - first) * BLOCK, BLOCK))
            digests = b"".join(map(xxhash.xxh3_128_digest, parts))
            refuse_checksum(self._subject, digests, self._written(level, first, stop))
            known[first:stop] = b"\1" * (stop - first)

    def _written(self, level: int, first: int, last: int) -> bytes:
        if level + 1 == len(self._spans):
            return self._root
        self._check(level + 1, first * DIGEST // BLOCK, _blocks(0, last * DIGEST))
        above = self._spans[level + 1][0]
        with reading(self._subject):
            return self._fetch(above + first * DIGEST, above + last * DIGEST)
