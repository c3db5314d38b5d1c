"""Input that is broken or made to harm: counted, quarantined with a reason, and never the end of a run."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import pytest

pytest.importorskip("datatrove")
arrow = pytest.importorskip("pyarrow")

import pyarrow.parquet as parquet  # noqa: E402
import zstandard  # noqa: E402

from megatron.curation.reading import FREE  # noqa: E402
from tests.curation.recipes import curate, kept, lines  # noqa: E402

GOOD = '{"text": "a good document"}\n'


def quarantined(folder: Path, **more) -> dict[str, str]:
    """File and record -> reason, of a run over folder/in."""
    curate(folder, [], [{"name": "s", "path": str(folder / "in")}], **more)
    found = lines(folder / "out" / "quarantine")
    return {each["file"] + (f":{each['record']}" if each["record"] else ""): each["reason"] for each in found}


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def test_broken_records(inputs: Path, tmp_path: Path) -> None:
    records = [
        GOOD.encode(),
        b'{"text": "cut o\n',
        b"\xff\xfe{}\n",
        b'["no object"]\n',
        b'{"content": "other column"}\n',
        b'{"text": 7}\n',
        b'{"text": "\\ud800"}\n',
        b'{"text": "  "}\n',
        b'{"text": "a\\u0000b"}\n',
        b"[" * 100_000 + b"\n",
        b"\n",
        GOOD.encode().strip(),
    ]
    (inputs / "a.jsonl").write_bytes(b"".join(records))
    assert quarantined(tmp_path) == {
        "a.jsonl:2": "the record is no JSON",
        "a.jsonl:3": "the record is not UTF-8",
        "a.jsonl:4": "the record is no JSON object",
        "a.jsonl:5": "the record has no key 'text'",
        "a.jsonl:6": "the value of 'text' is no text",
        "a.jsonl:7": "the text has half of a surrogate pair",
        "a.jsonl:8": "the text is empty",
        "a.jsonl:9": "the text has NUL characters",
        "a.jsonl:10": "the record is no JSON",
    }
    assert kept(tmp_path / "out") == ["s/a.jsonl:1", "s/a.jsonl:12"]


def test_utf_16(inputs: Path, tmp_path: Path) -> None:
    (inputs / "a.jsonl").write_bytes(GOOD.encode("utf-16"))
    (inputs / "b.txt").write_bytes("text".encode("utf-16"))
    (inputs / "c.txt").write_bytes("text".encode("utf-16-le"))
    (inputs / "d.jsonl").write_text(GOOD)
    found = quarantined(tmp_path)
    assert found["a.jsonl"] == found["b.txt"] == "the file is UTF-16, and must be UTF-8"
    assert found["c.txt"] == "the text has NUL characters" and kept(tmp_path / "out") == ["s/d.jsonl:1"]


def test_a_long_line_is_not_held_in_memory(inputs: Path, tmp_path: Path) -> None:
    """A sparse file whose line is many times as long as the address space that the process may add to what it has."""
    import resource

    with open(inputs / "a.jsonl", "wb") as file:
        file.write(GOOD.encode())
        file.seek(1 << 30, os.SEEK_CUR)
        file.write(b"\n" + GOOD.encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert quarantined(tmp_path, limits={"document": 1 << 20}) == {
        "a.jsonl:2": f"the record has more than {1 << 20} bytes"
    }
    assert kept(tmp_path / "out") == ["s/a.jsonl:1", "s/a.jsonl:3"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def test_half_written_and_foreign_files(inputs: Path, tmp_path: Path) -> None:
    parquet.write_table(arrow.table({"text": ["one", None, "three"], "n": [1, 2, 3]}), inputs / "a.parquet")
    content = (inputs / "a.parquet").read_bytes()
    (inputs / "b.parquet").write_bytes(content[: len(content) // 2])
    parquet.write_table(arrow.table({"content": ["one"]}), inputs / "c.parquet")
    packed = gzip.compress(b"".join(b'{"text": "%d"}\n' % each for each in range(1000)))
    (inputs / "d.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    (inputs / "e.jsonl.zst").write_bytes(b"no zstandard")
    (inputs / "f.tar.gz").write_bytes(b"not read")
    found = quarantined(tmp_path)
    assert found.pop("f.tar.gz") == "its ending stands for no format"
    assert found.pop("a.parquet:2") == "the value of 'text' is no text"
    assert found.pop("c.parquet") == "the table has no column 'text', but content"
    assert found.keys() == {"b.parquet", "d.jsonl.gz", "e.jsonl.zst"}
    assert all(each.startswith("the file cannot be read to its end") for each in found.values())
    names = kept(tmp_path / "out")
    assert names[:2] == ["s/a.parquet:1", "s/a.parquet:3"] and 1 < len(names) < 1000


def test_compressed_files_that_are_cut_anywhere(inputs: Path, tmp_path: Path) -> None:
    """No compression takes half a file for a whole one, also where the cut is at the end of a line."""
    rows = [b'{"text": "%d"}\n' % each for each in range(200)]
    frames = zstandard.ZstdCompressor()
    first = frames.compress(b"".join(rows[:100]))  # a cut between two frames leaves a whole file
    packed = {
        "gz": gzip.compress(b"".join(rows)),
        "bz2": bz2.compress(b"".join(rows)),
        "xz": lzma.compress(b"".join(rows)),
        "zst": first + frames.compress(b"".join(rows[100:])),
    }
    for name, content in packed.items():
        (inputs / f"whole.jsonl.{name}").write_bytes(content)
        for at in [*range(len(content) // 2 + 3, len(content), 37), len(content) - 1]:
            at += at == len(first)
            (inputs / f"cut_{at}.jsonl.{name}").write_bytes(content[:at])
    found = quarantined(tmp_path)
    ends = {each.partition(":")[0] for each, reason in found.items() if "cannot be read to its end" in reason}
    assert ends == {each.name for each in inputs.iterdir() if each.name.startswith("cut")}
    assert len([each for each in kept(tmp_path / "out") if "/whole" in each]) == 4 * len(rows)


def test_bombs(inputs: Path, tmp_path: Path) -> None:
    """A file that stands for much more than it holds is read until the factor is exceeded. Memory stays small."""
    line = json.dumps({"text": "a" * 100_000}).encode() + b"\n"
    count = 2 * FREE // len(line)
    (inputs / "a.jsonl.gz").write_bytes(gzip.compress(line * count))
    (inputs / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(line * count))
    table = arrow.table({"text": arrow.array(["b" * 100_000] * count)})
    parquet.write_table(table, inputs / "b.parquet")
    reason = "the file expands by more than a factor of 2"
    assert quarantined(tmp_path, limits={"expansion": 2}) == dict.fromkeys(
        ("a.jsonl.gz", "b.parquet", "c.jsonl.zst"), reason
    )
    assert len(kept(tmp_path / "out")) < 3 * count


def test_names_that_lead_out_of_the_folder(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text('{"text": "secret"}\n')
    (inputs / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (inputs / "dangling.jsonl").symlink_to(tmp_path / "nothing.jsonl")
    os.mkfifo(inputs / "pipe.jsonl")
    (inputs / "good.jsonl").write_text(GOOD)
    found = quarantined(tmp_path)
    assert found["link.jsonl"] == "it is a link that leads out of the folder" and "pipe.jsonl" in found
    assert kept(tmp_path / "out") == ["s/good.jsonl:1"]
    assert "secret" not in (tmp_path / "out" / "report.html").read_text()


def test_the_page_shows_texts_as_texts(inputs: Path, tmp_path: Path) -> None:
    (inputs / "a.jsonl").write_text(json.dumps({"text": "<script>alert(1)</script>"}) + "\n" + GOOD)
    (inputs / "<b>.jsonl").write_text("broken <i>\n")
    curate(tmp_path, [{"keep": {"signals": {"rps_doc_word_count": [2, 9]}}}], [{"name": "s", "path": str(inputs)}])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "<i>" not in page and "&lt;b&gt;.jsonl" in page


def test_a_stage_that_fails_on_a_document_loses_only_that_document(inputs: Path, tmp_path: Path, monkeypatch) -> None:
    from megatron.curation.stages import STAGES
    from megatron.curation.stages.contract import StageKind

    def build(options):
        def work(document):
            if document.text == "bad":
                raise KeyError("bad")

        return work

    monkeypatch.setitem(STAGES, "pii", StageKind(STAGES["pii"].options, work=build))
    (inputs / "a.jsonl").write_text('{"text": "bad"}\n' + GOOD)
    curate(tmp_path, [{"pii": {}}], [{"name": "s", "path": str(inputs)}])
    (found,) = lines(tmp_path / "out" / "quarantine")
    assert (found["file"], found["reason"]) == ("s/a.jsonl:1", "stage 01_pii raised KeyError")
    assert kept(tmp_path / "out") == ["s/a.jsonl:2"]
