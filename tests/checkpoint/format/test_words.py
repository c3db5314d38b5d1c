"""Messages about a damaged or renamed checkpoint: sentences about the file, not about Python."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import pytest

from megatron.checkpoint import CheckpointError, open_checkpoint, save
from megatron.checkpoint.format.durable import MANIFEST, META
from megatron.checkpoint.format.index import INDEX_NAME, checksum
from megatron.checkpoint.format.index_file import IndexSeal
from megatron.checkpoint.reshape import reshape
from megatron.checkpoint.save.store import Store
from megatron.checkpoint.save.writer import write_tensors
from megatron.parallel.layout.layout import Layout
from tests.checkpoint.format.former_format import to_format_1
from tests.checkpoint.model import Model, fragments, meta

PYTHON = re.compile(r"[A-Z]\w*(Error|Exception)\b|Traceback|object at 0x")


def write(folder, step):
    return save(folder, step, fragments(Model(seed=step), Layout(), 0), meta(step))


def resealed(content: object) -> bytes:
    """A manifest of this content with a checksum that fits."""
    text = json.dumps(content)
    return json.dumps({"checksum": checksum(text.encode()), "content": text}).encode()


CONTENTS = [
    b"",
    b"{",
    b"\xff\xfe\x00",
    b"[]",
    b"7",
    b"null",
    b"{}",
    b"[" * 100_000,
    json.dumps({"checksum": "0", "content": 5}).encode(),
    resealed([]),
    resealed({}),
    resealed({"format": 1, "files": [{"path": "x"}], "parts": {}}),
    resealed({"format": 1, "files": 5, "parts": {}}),
    resealed({"format": 1, "files": [], "parts": {"meta.json": {}}}),
    resealed({"format": 1, "files": [], "parts": []}),
    resealed({"format": [], "files": [], "parts": {}}),
    resealed({"format": 2, "parts": {"index.safetensors": {}, "meta.json": {}}}),
    resealed({"format": 2, "parts": {"index.safetensors": 7, "meta.json": {"size": 0, "checksum": ""}}}),
    resealed({"format": 2, "parts": None}),
]


def sealed(name: str, content: bytes, version: int) -> dict:
    """A part of a manifest whose checksums fit a content: of an index, one that is a header and nothing more."""
    if version == 1 or name == META:
        return {"size": len(content), "checksum": checksum(content)}
    size = len(content)
    return asdict(IndexSeal(size, checksum(content), size, size, checksum(b"")))


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content[:24]))
def test_a_damaged_manifest_is_told_in_words(tmp_path, content):
    path = write(tmp_path, 1)
    (path / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    assert not PYTHON.search(str(error.value)), str(error.value)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", [META, INDEX_NAME])
@pytest.mark.parametrize(
    "content", CONTENTS[:8] + [b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{}"], ids=range(10)
)
def test_parts_with_a_checksum_that_fits_are_told_in_words(tmp_path, name, content, version):
    path = to_format_1(write(tmp_path, 1)) if version == 1 else write(tmp_path, 1)
    (path / name).write_bytes(content)
    inner = json.loads(json.loads((path / MANIFEST).read_bytes())["content"])
    inner["parts"][name] = sealed(name, content, version)
    (path / MANIFEST).write_bytes(resealed(inner))
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    assert not PYTHON.search(str(error.value)), str(error.value)


def test_a_checkpoint_under_another_steps_name_is_not_believed(tmp_path):
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    second.rename(tmp_path / "step_00000900")
    found = Store(tmp_path).resume("auto")
    assert found.checkpoint.path == first
    assert "its name says step 900, and it holds step 2" in found.reason
    with pytest.raises(CheckpointError, match="its name says step 900, and it holds step 2.*step_00000002"):
        Store(tmp_path).resume(str(tmp_path / "step_00000900"))
    first.rename(tmp_path / "my_weights")  # a name without a step says nothing of one
    assert open_checkpoint(tmp_path / "my_weights").step == 1


def test_no_tool_writes_a_checkpoint_under_another_steps_name(tmp_path):
    source = open_checkpoint(write(tmp_path, 2))
    with pytest.raises(CheckpointError, match="its name says step 900, and it holds step 2: call it step_00000002"):
        reshape(source, tmp_path / "other" / "step_00000900", Layout())
    with pytest.raises(CheckpointError, match="its name says step 900, and it holds step 2"):
        write_tensors(tmp_path / "other" / "step_00000900", [], lambda _: [], meta(2))
    assert not list((tmp_path / "other").iterdir())
