"""Tokens that a disk has changed within the vocabulary are noticed when their block is first read."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path

import numpy as np
import pytest

from megatron.data.corpus.files import add_checksums, examine_file, merge
from megatron.data.errors import DataError
from megatron.data.hashing import file_hash
from megatron.data.loader import build_loader
from megatron.data.manifest import DamagedTokens, Manifest, read_manifest
from tests.data.make import configuration, write_documents

SIZES = [40, 3, 0, 77, 1, 60, 25, 130, 9, 55]


@pytest.fixture
def pair(tmp_path, monkeypatch) -> Path:
    """A token file of 800 bytes in blocks of 64, with the manifest of an older version."""
    monkeypatch.setattr("megatron.data.manifest.BLOCK", 64)
    draw = np.random.default_rng(5)
    file = write_documents(tmp_path / "corpus", [draw.integers(0, 50, size).tolist() for size in SIZES])
    hashes = {f"{name}_hash": file_hash(tmp_path / f"corpus.{name}") for name in ("bin", "idx")}
    tokenizer = {"kind": "bytes", "name": "bytes", "hash": "0" * 16, "size": 64, "eod_id": None}
    Manifest(tokenizer, len(file), file.tokens, 49, file.dtype.name, **hashes).write(file.prefix)
    return file.prefix


def loader(pair: Path, order: str = "sequential"):
    training = {"steps": 30, "sequence_length": 16, "global_batch_size": 1, "micro_batch_size": 1}
    return build_loader(
        configuration({"train": str(pair), "order": order}, training=training), data_rank=0, data_ranks=1
    )


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def test_files_of_older_versions_are_read_and_can_get_checksums(pair):
    assert loader(pair).read(0).hash == loader(pair).read(0).hash
    assert any("no checksums" in note for note in examine_file(pair)["notes"])
    made = add_checksums(pair)
    content = Path(f"{pair}.bin").read_bytes()
    expected = [zlib.crc32(content[begin : begin + 64]) for begin in range(0, len(content), 64)]
    table = b"".join(each.to_bytes(4, "little") for each in expected)
    assert made.blocks is not None and made.blocks["table"] == f"{zlib.crc32(table):08x}"
    assert read_manifest(pair) == made and not examine_file(pair, verify=True)["notes"]
    assert not [each for each in examine_file(pair, verify=True)["problems"] if "differ" in each]


def test_a_changed_file_gets_no_checksums(pair):
    flip(Path(f"{pair}.bin"), 100)
    with pytest.raises(DataError, match="SHA-256"):
        add_checksums(pair)


@pytest.mark.parametrize("seed", range(12))
def test_one_flipped_bit_is_named_with_its_document_and_step(pair, seed):
    """Steps that read no byte of its block are as before. The first one that does ends the run."""
    draw = random.Random(seed)
    order = draw.choice(["sequential", "stream", "pythia"])
    add_checksums(pair)
    before = loader(pair, order)
    steps = [before.read(step) for step in range(before.steps)]
    place = draw.randrange(2 * sum(SIZES))
    flip(Path(f"{pair}.bin"), place, 0)  # the lowest bit: an id stays in the vocabulary
    block, offsets = place // 64, np.cumsum([0, *SIZES]) * 2
    after, seen = loader(pair, order), False
    for step, expected in enumerate(steps):
        spans = [span for n in expected.sample_ids.flatten().tolist() for span in before.plan.sample(n).spans]
        ranges = [(offsets[each.document] + 2 * each.start, 2 * each.length) for each in spans]
        touched = any(begin < (block + 1) * 64 and begin + size > block * 64 for begin, size in ranges)
        try:
            found = after.read(step)
        except DamagedTokens as error:
            seen = True
            assert touched and f"Step {step} reads it" in str(error) and f"bytes {block * 64} to" in str(error)
            assert offsets[error.document] < (block + 1) * 64 and offsets[error.document + 1] > block * 64
        else:
            assert not touched and found.hash == expected.hash
    assert seen
    problems = examine_file(pair, verify=True)["problems"]
    assert any(f"bytes {block * 64} to" in each and "documents" in each for each in problems)


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_table_is_refused_before_anything_is_read(pair, seed):
    draw = random.Random(seed)
    add_checksums(pair)
    path = Path(f"{pair}.json")
    values = json.loads(path.read_text())
    name = draw.choice(["bytes", "crc32", "table"])
    values["blocks"][name] = draw.choice([None, "", -1, 7, "AAAA", "zz", [], {"a": 1}, 2**80])
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match="manifest"):
        loader(pair)


def test_an_entry_of_the_index_that_changed_after_its_examination_is_noticed(pair, tmp_path):
    """The order is in the cache, and the index is not searched again."""
    opened = loader(pair)
    file = opened.plan.sources[0].file
    file.offsets = file.offsets.copy()
    file.offsets[3] += 2
    with pytest.raises(DamagedTokens, match="document 2|document 3"):
        for step in range(opened.steps):
            opened.read(step)


def test_merged_files_have_checksums_of_their_own(pair, tmp_path):
    made = merge([str(pair), str(pair)], tmp_path / "both", "1")
    assert made is not None and made.blocks is not None
    assert not [each for each in examine_file(tmp_path / "both", verify=True)["problems"] if "differ" in each]
