"""WARC files: texts of WET records, as warcio's own writer stores them, and whatever is broken about them."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest

pytest.importorskip("datatrove")
pytest.importorskip("warcio")

import zstandard  # noqa: E402
from warcio.warcwriter import WARCWriter  # noqa: E402

from megatron.curation.reading import FREE  # noqa: E402
from tests.curation.recipes import curate, kept, lines  # noqa: E402


def archive(records: list[tuple[str, str, bytes]], packed: bool) -> bytes:
    """A file with a record (type, URL, content) each, after the usual first record."""
    file = io.BytesIO()
    writer = WARCWriter(file, gzip=packed)
    writer.write_record(writer.create_warcinfo_record("a.warc", {"software": "a test"}))
    for kind, url, content in records:
        writer.write_record(
            writer.create_warc_record(
                url, kind, payload=io.BytesIO(content), length=len(content), warc_content_type="text/plain"
            )
        )
    return file.getvalue()


def reasons(folder: Path, **more) -> dict[str, str]:
    curate(folder, [], [{"name": "s", "path": str(folder / "in")}], **more)
    found = lines(folder / "out" / "quarantine")
    return {each["file"] + (f":{each['record']}" if each["record"] else ""): each["reason"] for each in found}


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


TEXTS = [("conversion", f"http://example.org/{each}", f"Text ä {each}.\n\nSecond.".encode()) for each in range(3)]


def test_texts_and_addresses_of_all_forms(inputs: Path, tmp_path: Path) -> None:
    plain = archive(TEXTS, packed=False)
    (inputs / "a.warc").write_bytes(plain)
    (inputs / "b.warc.gz").write_bytes(archive(TEXTS, packed=True))  # a member per record
    (inputs / "c.warc.wet.gz").write_bytes(gzip.compress(plain))  # one member
    (inputs / "d.warc.zst").write_bytes(zstandard.ZstdCompressor().compress(plain))
    assert reasons(tmp_path) == {}
    found = lines(tmp_path / "out/documents")
    assert [each["id"] for each in found] == [
        f"s/{file}:{record}" for file in ("a.warc", "b.warc.gz", "c.warc.wet.gz", "d.warc.zst") for record in (2, 3, 4)
    ]
    for each, (_, url, content) in zip(found, TEXTS * 4):
        assert each["text"].encode() == content and each["metadata"]["record"]["url"] == url


def test_what_is_no_text_is_counted(inputs: Path, tmp_path: Path) -> None:
    page = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>text</p>"
    records = [
        ("conversion", "http://example.org/1", b"\xff broken"),
        ("conversion", "http://example.org/2", b"x" * 3000),
        ("conversion", "http://example.org/3", b" \n"),
        ("response", "http://example.org/4", page),
        ("conversion", "http://example.org/5", b"a good document"),
    ]
    (inputs / "a.warc").write_bytes(archive(records, packed=False))
    assert reasons(tmp_path, limits={"document": 2048}) == {
        "a.warc:2": "the record is not UTF-8",
        "a.warc:3": "the record has more than 2048 bytes",
        "a.warc:4": "the text is empty",
        "a.warc:5": "the record is a response: extract texts first, as WET files have them",
    }
    assert kept(tmp_path / "out") == ["s/a.warc:6"]


def test_cut_files_give_no_half_of_a_text(inputs: Path, tmp_path: Path) -> None:
    """Cut anywhere: whole texts of the beginning are kept, and the rest is counted."""
    for packed, ending in ((False, "warc"), (True, "warc.gz")):
        whole = archive(TEXTS, packed)
        for at in range(len(whole) // 3, len(whole) - 8, 61):  # the last bytes are empty lines
            (inputs / f"{at:04d}.{ending}").write_bytes(whole[:at])
    found = reasons(tmp_path)
    texts = {content.decode() for _, _, content in TEXTS}
    documents = lines(tmp_path / "out/documents")
    assert documents and all(each["text"] in texts for each in documents)
    assert {each.partition(":")[0] for each in found} >= {each.name for each in inputs.glob("*.gz")}
    cut = {"the record has fewer bytes than its Content-Length", "the file cannot be read to its end (EOFError)"}
    assert set(found.values()) <= cut | {"the text is empty"}


def test_bombs_and_foreign_content(inputs: Path, tmp_path: Path) -> None:
    count = 2 * FREE // 1_000_000
    large = [("conversion", f"http://example.org/{each}", b"a " * 500_000) for each in range(count)]
    (inputs / "a.warc.gz").write_bytes(archive(large, packed=True))
    (inputs / "b.warc").write_bytes(b"no archive at all\n" * 5)
    (inputs / "c.warc.gz").write_bytes(b"no gzip")
    found = reasons(tmp_path, limits={"expansion": 2})
    assert found["a.warc.gz"] == "the file expands by more than a factor of 2"
    assert found.keys() == {"a.warc.gz", "b.warc", "c.warc.gz"} and len(kept(tmp_path / "out")) < count
