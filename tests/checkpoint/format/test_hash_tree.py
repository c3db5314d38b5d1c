"""A part of a file is trusted after reading little, and nothing that was changed is."""

from __future__ import annotations

import random

import pytest
import xxhash

from megatron.checkpoint.format.errors import CheckpointError
from megatron.checkpoint.format.index_file import BLOCK, HashTree, HashTreeBuilder, spans

SIZES = [1, 4095, 4096, 4097, 3 * 4096, 256 * 4096, 256 * 4096 + 1, 300 * 4096 - 7]


def content_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def grow(content: bytes) -> tuple[bytes, str]:
    growth = HashTreeBuilder()
    growth.add(content)
    return growth.finish()


def tree_of(data: bytes, size: int, root: str) -> HashTree:
    return HashTree("the file", lambda begin, end: data[begin:end], size, root)


def root_of(content: bytes) -> bytes:
    """The definition: of one block its checksum, of more that of their checksums."""
    if len(content) <= 4096:
        return xxhash.xxh3_128(content).digest()
    blocks = [content[begin : begin + 4096] for begin in range(0, len(content), 4096)]
    return root_of(b"".join(xxhash.xxh3_128(block).digest() for block in blocks))


@pytest.mark.parametrize("size", [0, *SIZES])
def test_the_root_is_that_of_the_definition(size):
    content = content_of(size)
    levels, root = grow(content)
    assert bytes.fromhex(root) == root_of(content)
    assert spans(size)[0] == (0, size) and spans(size)[-1][1] == size + len(levels)
    tree_of(content + levels, size, root).check_share((0, 1))


@pytest.mark.parametrize("size", [0, *SIZES])
def test_a_tree_grows_with_parts_of_any_size(size):
    chance, content, growth, place = random.Random(size), content_of(size), HashTreeBuilder(), 0
    while place < size:
        step = chance.choice([0, 1, 4095, 4096, 4097, 50_000, 400_000])
        growth.add(memoryview(content)[place : place + step])
        place += step
    assert growth.finish() == grow(content)


@pytest.mark.parametrize("size", SIZES)
def test_a_changed_bit_is_found_by_whoever_comes_to_it(size):
    """In the content or in a level above it. A range that needs neither is trusted still."""
    chance, content = random.Random(size), content_of(size)
    levels, root = grow(content)
    whole = content + levels
    for place in {0, size - 1, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(20))}:
        changed = bytearray(whole)
        changed[place] ^= 1 << chance.randrange(8)
        with pytest.raises(CheckpointError, match="the file: it does not have the checksum"):
            tree_of(bytes(changed), size, root).check_share((0, 1))
        if place < size:
            with pytest.raises(CheckpointError):
                tree_of(bytes(changed), size, root).check(place, place + 1)
            if size > 2 * BLOCK:
                other = (place + size // 2) % size // BLOCK * BLOCK
                if other != place // BLOCK * BLOCK:
                    tree_of(bytes(changed), size, root).check(other, min(other + BLOCK, size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_shares_are_the_whole(size, ranks):
    """Each block of the content is one rank's, so a change anywhere is seen by some rank."""
    content = content_of(size)
    levels, root = grow(content)
    for place in {0, size // 3, size - 1}:
        changed = bytearray(content + levels)
        changed[place] ^= 4
        refused = 0
        for rank in range(ranks):
            try:
                tree_of(bytes(changed), size, root).check_share((rank, ranks))
            except CheckpointError:
                refused += 1
        assert refused == 1


def test_what_cannot_be_read_is_told():
    """Also if that is later than the first look: no part of a file is trusted because another was."""
    content = content_of(3 * BLOCK)
    levels, root = grow(content)
    gone = False

    def fetch(begin: int, end: int) -> bytes:
        if gone:
            raise OSError(5, "Input/output error")
        return (content + levels)[begin:end]

    tree = HashTree("the file", fetch, len(content), root)
    tree.check(0, 1)
    gone = True
    tree.check(0, BLOCK)
    with pytest.raises(CheckpointError, match="the file: it cannot be read: .*Input/output error"):
        tree.check(BLOCK, BLOCK + 1)


def test_little_is_read_for_a_little():
    """Of 65 MB, two blocks and one of each of the two levels above them. Nothing a second time."""
    size = 16_000 * BLOCK
    content = content_of(size)
    levels, root = grow(content)
    tree = tree_of(content + levels, size, root)
    tree.check(5 * BLOCK + 7, 6 * BLOCK + 1)
    top = -(-16_000 // 256) * 16
    assert tree.read == 2 * BLOCK + BLOCK + top
    tree.check(5 * BLOCK, 7 * BLOCK)
    assert tree.read == 2 * BLOCK + BLOCK + top
