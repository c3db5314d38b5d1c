"""Token files: Megatron's bytes, and every kind of damage."""

from __future__ import annotations

import hashlib
import os
import struct

import numpy as np
import pytest

from megatron.data.corpus.files import examine_file, merge
from megatron.data.errors import DataError
from megatron.data.plan_builder import build_plan
from megatron.data.token_file import TokenFile, TokenFileWriter, token_dtype, write_index
from tests.data.make import configuration, write_documents, write_sizes
from tests.paths import shared

FOLDER = shared("data/golden_pythia")


def test_bytes_of_an_index(tmp_path):
    write_documents(tmp_path / "toy", [[0] * size for size in (5, 3, 8, 2, 7, 4)])
    content = (tmp_path / "toy.idx").read_bytes()
    assert len(content) == 162
    assert content[:34].hex() == "4d4d4944494458000001000000000000000806000000000000000700000000000000"
    assert struct.unpack("<6i", content[34:58]) == (5, 3, 8, 2, 7, 4)
    assert struct.unpack("<6q", content[58:106]) == (0, 10, 16, 32, 36, 50)
    assert struct.unpack("<7q", content[106:]) == tuple(range(7))


@pytest.mark.skipif(FOLDER is None, reason="the golden arrays are not here")
@pytest.mark.parametrize("name", "ab")
def test_files_of_the_original(tmp_path, name):
    """They are read as the original reads them, and written again byte for byte."""
    file = TokenFile(FOLDER / f"golden_{name}_text_document.bin")
    file.verify()
    with TokenFileWriter(tmp_path / "again", np.uint16) as writer:
        for document in range(len(file)):
            writer.append(file[document])
    for ending in (".bin", ".idx"):
        again = (tmp_path / f"again{ending}").read_bytes()
        assert again == (FOLDER / f"golden_{name}_text_document{ending}").read_bytes()
    if name == "a":
        golden = np.load(FOLDER / "indexed_a.npz")
        np.testing.assert_array_equal(file.sizes, golden["sizes"])
        np.testing.assert_array_equal(file.document_index, golden["doc_idx"])
        np.testing.assert_array_equal(file[0], golden["doc0"])
        longest = int(np.argmax(file.sizes))
        np.testing.assert_array_equal(file.read(longest, 3, 7), golden["doc5_off3_len7"])


def test_types_by_vocabulary():
    assert token_dtype(65499) == np.uint16 and token_dtype(65500) == np.int32


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_round_trip(tmp_path, dtype):
    documents = [[1, 2, 3], [], [np.iinfo(dtype).max], [], [5]]
    file = write_documents(tmp_path / "dir.with.dots" / "a.v2", documents, dtype)
    file.verify()
    assert [file[index].tolist() for index in range(5)] == documents
    assert file.tokens == 5 and file.extent() == (0, np.iinfo(dtype).max)
    assert TokenFile(tmp_path / "dir.with.dots" / "a.v2.bin").flat(2, 2).tolist() == [3, np.iinfo(dtype).max]


def test_offsets_beyond_32_bits(tmp_path):
    """An index whose offsets need 64 bits, next to a sparse file of 6 GB."""
    sizes = np.array([2**31 - 1, 2**30, 7])
    with open(tmp_path / "big.idx", "wb") as index:
        write_index(index, sizes, np.uint16)
    with open(tmp_path / "big.bin", "wb") as tokens:
        tokens.truncate(int(sizes.sum()) * 2)
        tokens.seek(int(sizes[:2].sum()) * 2)
        tokens.write(np.arange(7, dtype=np.uint16).tobytes())
    file = TokenFile(tmp_path / "big")
    file.verify()
    assert file[2].tolist() == list(range(7)) and int(file.offsets[2]) == 2 * (2**31 - 1 + 2**30)


def damage(path, position, content):
    data = bytearray(path.read_bytes())
    data[position : position + len(content)] = content
    path.write_bytes(data)


@pytest.mark.parametrize(
    "what, match",
    [
        ("no bin", "does not exist"),
        ("no idx", "does not exist"),
        ("magic", "MMIDIDX"),
        ("version", "version 9"),
        ("type", "type 77"),
        ("float", "not token ids"),
        ("short idx", "announces"),
        ("short bin", "ends at byte"),
        ("long bin", "ends at byte"),
        ("size", "damaged|ends at byte"),
        ("offset", "document 1 is damaged"),
        ("negative", "document 1 is damaged"),
        ("documents", "document index"),
    ],
)
def test_damage(tmp_path, what, match):
    write_sizes(tmp_path / "a", [5, 3, 8])
    bin_path, idx_path = tmp_path / "a.bin", tmp_path / "a.idx"
    {
        "no bin": lambda: bin_path.unlink(),
        "no idx": lambda: idx_path.unlink(),
        "magic": lambda: damage(idx_path, 0, b"X"),
        "version": lambda: damage(idx_path, 9, b"\x09"),
        "type": lambda: damage(idx_path, 17, bytes([77])),
        "float": lambda: damage(idx_path, 17, b"\x06"),
        "short idx": lambda: idx_path.write_bytes(idx_path.read_bytes()[:-1]),
        "short bin": lambda: bin_path.write_bytes(bin_path.read_bytes()[:-2]),
        "long bin": lambda: bin_path.write_bytes(bin_path.read_bytes() + b"\0\0"),
        "size": lambda: damage(idx_path, 34, struct.pack("<i", 6)),
        "offset": lambda: damage(idx_path, 46 + 8, struct.pack("<q", 8)),
        "negative": lambda: damage(idx_path, 38, struct.pack("<i", -3)),
        "documents": lambda: damage(idx_path, 46 + 24 + 24, struct.pack("<q", 9)),
    }[what]()
    with pytest.raises(DataError, match=match) as caught:
        TokenFile(tmp_path / "a").verify()
    assert "fix:" in str(caught.value)


@pytest.mark.parametrize("listed", [[0], [0, 1, 2]], ids=["none", "those of the first file"])
def test_merged_by_the_original(tmp_path, listed):
    """GPT-NeoX's merge_file_ appends sequences, but not to the document index: such files are read, with a note."""
    documents = [[1, 2, 3], [4], [5, 6], [7, 8, 9]]
    write_documents(tmp_path / "a", documents)
    with open(tmp_path / "a.idx", "wb") as index:
        write_index(index, np.array([3, 1, 2, 3]), np.uint16, np.array(listed))
    file = TokenFile(tmp_path / "a")
    file.verify()
    assert [file[number].tolist() for number in range(4)] == documents
    assert f"ends at sequence {listed[-1]} of 4" in file.note
    assert write_documents(tmp_path / "b", documents).note is None
    merge([str(tmp_path / "a"), str(tmp_path / "b")], tmp_path / "c", "")
    assert len(merged := TokenFile(tmp_path / "c")) == 8 and merged.note is None
    assert examine_file(tmp_path / "a")["notes"] == [file.note]
    config = configuration(
        {"train": str(tmp_path / "a"), "cache": str(tmp_path / "x")}, training={"sequence_length": 2}
    )
    assert file.note in build_plan(config).warnings()


def test_what_cannot_be_opened_is_said_plainly(tmp_path, monkeypatch):
    write_documents(tmp_path / "a", [[1, 2, 3]])
    (tmp_path / "b.idx").mkdir()
    (tmp_path / "b.bin").mkdir()
    with pytest.raises(DataError, match="b.bin: it is a directory, and a file is needed"):
        TokenFile(tmp_path / "b")
    with pytest.raises(DataError, match="no/where.bin: .*does not exist"):
        TokenFile(tmp_path / "no" / "where")
    with pytest.raises(DataError, match="does not exist"):
        TokenFile(tmp_path / "a.bin" / "a")
    (tmp_path / "a.idx").chmod(0)
    if os.geteuid() == 0:  # root may read everything

        def refuse(path, *arguments, opened=os.open, **options):
            if str(path).endswith("a.idx"):
                raise PermissionError(13, "Permission denied", str(path))
            return opened(path, *arguments, **options)

        monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DataError, match="a.idx: there is no permission to read it"):
        TokenFile(tmp_path / "a")


def test_writer_refuses(tmp_path):
    with pytest.raises(DataError, match="do not fit into uint16"), TokenFileWriter(tmp_path / "a", np.uint16) as writer:
        writer.append([1, 65536])
    with pytest.raises(DataError, match="do not fill"), TokenFileWriter(tmp_path / "a", np.uint16) as writer:
        writer.extend([1, 2, 3], [2])
    assert list(tmp_path.iterdir()) == []


def test_fingerprint_follows_sizes_only(tmp_path):
    first = write_documents(tmp_path / "a", [[1, 2], [3]]).fingerprint()
    assert write_documents(tmp_path / "b", [[9, 9], [9]]).fingerprint() == first
    assert write_documents(tmp_path / "c", [[1], [2, 3]]).fingerprint() != first
    assert len(hashlib.new("blake2b", digest_size=16).hexdigest()) == len(first)
