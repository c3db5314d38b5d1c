"""Tokenising: the original's bytes, every kind of input, bad lines, any number of workers, and kills."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard

from megatron import __version__
from megatron.config.sections.data import TokenizerSection
from megatron.data.corpus import inputs
from megatron.data.corpus.encode import (
    Treatment,
    build_encoder,
    choose_encoder,
    difference,
    differing,
    mixed,
    unsafe_characters,
    with_tokenizer,
)
from megatron.data.corpus.files import read_origin
from megatron.data.corpus.inputs import Input, find_inputs, read_chunks
from megatron.data.corpus.job import TokenizeJob, run
from megatron.data.errors import DataError
from megatron.data.manifest import read_manifest
from megatron.data.token_file import TokenFile
from megatron.data.tokenizer import build_tokenizer
from tests.paths import ROOT, shared

FOLDER = shared("data/golden_pythia")
TOKENIZER = shared("data/20B_tokenizer.json")
needs_golden = pytest.mark.skipif(FOLDER is None or TOKENIZER is None, reason="the golden files are not here")
BYTES = TokenizerSection(type="bytes")
TEXTS = ["first", "zweites Stück", "三\n\nzeilen", "🙂", " leading", "x" * 3000, "tab\tend "]


def job(inputs: list, output: Path, **options) -> TokenizeJob:
    known = {"tokenizer": BYTES, "treatment": Treatment(), **options}
    return TokenizeJob(find_inputs([str(each) for each in inputs]), output, **known)


def texts(prefix: Path) -> list[str]:
    """The documents of a pair of bytes, each without its end-of-document token."""
    file = TokenFile(prefix)
    assert all(file[document][-1] == 256 for document in range(len(file)))
    return [bytes(file[document][:-1].astype(np.uint8)).decode() for document in range(len(file))]


def lines(values: list) -> bytes:
    return b"".join(json.dumps({"text": value}, ensure_ascii=False).encode() + b"\n" for value in values)


@needs_golden
@pytest.mark.parametrize("name", "ab")
@pytest.mark.parametrize("workers, encoder", [(1, "auto"), (2, "tokenizer")])
def test_bytes_of_the_original(tmp_path, name, workers, encoder):
    work = job(
        [FOLDER / f"corpus_{name}.jsonl.gz"],
        tmp_path / "out",
        tokenizer=TokenizerSection(path=str(TOKENIZER)),
        workers=workers,
        encoder=encoder,
    )
    outcome = run(work)
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"out{ending}").read_bytes() == (
            FOLDER / f"golden_{name}_text_document{ending}"
        ).read_bytes()
    assert outcome.manifest == read_manifest(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.idx", "out.json", "out.origin"]


def compressed(content: bytes, ending: str) -> bytes:
    return {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(ending, lambda each: each)(content)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_lines(tmp_path, ending):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(compressed(lines(TEXTS), ending))
    run(job([path], tmp_path / "out"))
    assert texts(tmp_path / "out") == TEXTS
    origin, content = read_origin(tmp_path / "out"), lines(TEXTS)
    for row, text in zip(origin, TEXTS):
        assert json.loads(content[row["start"] : row["start"] + row["length"]])["text"] == text


def test_other_kinds(tmp_path):
    """Tables, arrays, texts, archives: each gives the same documents."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    table = arrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    with arrow.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    with arrow.OSFile(str(tmp_path / "c.arrow"), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "d.json.zst").write_bytes(compressed(json.dumps([{"text": text} for text in TEXTS]).encode(), ".zst"))
    dat = b"".join(len(text.encode()).to_bytes(8, "big") + text.encode() for text in TEXTS)
    (tmp_path / "e.dat.zst").write_bytes(compressed(dat, ".zst"))
    with tarfile.open(tmp_path / "f.tar", "w") as archive:
        for name, content in (("one.jsonl.zst", compressed(lines(TEXTS[:3]), ".zst")), ("two.jsonl", lines(TEXTS[3:]))):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    for name in ("a.parquet", "b.arrow", "c.arrow", "d.json.zst", "e.dat.zst", "f.tar"):
        run(job([tmp_path / name], tmp_path / f"out_{name[0]}"))
        assert texts(tmp_path / f"out_{name[0]}") == TEXTS, name
    folder = tmp_path / "folder"
    folder.mkdir()
    for index, text in enumerate(TEXTS):
        (folder / f"{index}.txt").write_text(text, encoding="utf-8")
    run(job([folder], tmp_path / "out_t"))
    assert texts(tmp_path / "out_t") == TEXTS
    dataset = Input("json", "dataset", {"data_files": str(tmp_path / "x.jsonl"), "split": "train"})
    (tmp_path / "x.jsonl").write_bytes(lines(TEXTS))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    run(TokenizeJob([dataset], tmp_path / "out_h", BYTES, Treatment()))
    assert texts(tmp_path / "out_h") == TEXTS


@pytest.mark.parametrize(
    "kind, name, content",
    [
        ("lines", "a.jsonl", lines(TEXTS * 40)),
        ("lines", "a.jsonl.gz", gzip.compress(lines(TEXTS * 40))),
        ("dat", "a.dat", b"".join(len(t.encode()).to_bytes(8, "big") + t.encode() for t in TEXTS)),
        ("array", "a.json", json.dumps(TEXTS * 300).encode()),
    ],
)
def test_reading_on_from_any_chunk(tmp_path, kind, name, content, monkeypatch):
    from megatron.data.corpus import inputs

    monkeypatch.setattr(inputs, "BLOCK", 500)
    monkeypatch.setattr(inputs, "ROWS", 128)
    (tmp_path / name).write_bytes(content)
    entry = Input(str(tmp_path / name), kind)
    chunks = list(read_chunks(0, entry))
    assert len(chunks) > 3
    for place in (1, len(chunks) // 2, len(chunks) - 1):
        rest = list(read_chunks(0, entry, chunks[place].start, chunks[place].line))
        assert [(each.start, each.line, each.content) for each in rest] == [
            (each.start, each.line, each.content) for each in chunks[place:]
        ]


BAD = (
    b'{"text": "good"}\n'
    b'{"text": broken\n'
    b"\n"
    b'{"other": 1}\n'
    b'{"text": 5}\n'
    b'{"text": "\\ud800"}\n'
    b'{"text": "\xff"}\n'
    b"[1]\n"
    b'{"text": ""}\n'
    b'{"text": ["two", "paragraphs"]}\n'
    b'{"text": "last"}'
)


def test_bad_lines_are_counted_and_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(BAD)
    outcome = run(job([tmp_path / "a.jsonl"], tmp_path / "out"))
    assert texts(tmp_path / "out") == ["good", "two\n\nparagraphs", "last"]
    assert [line for _, line, _ in outcome.progress.examples] == [2, 4, 5, 6, 7, 8]
    assert outcome.progress.bad == 6 and outcome.progress.empty == 1
    with pytest.raises(DataError, match=r"a.jsonl:2: no JSON"):
        run(job([tmp_path / "a.jsonl"], tmp_path / "fatal", bad="fatal"))


def test_treatment(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"body": "  e\\u0301  "}\n')
    treatment = Treatment(key="body", append_eod=False, normalise="NFC", strip=True)
    run(job([tmp_path / "a.jsonl"], tmp_path / "out", treatment=treatment))
    assert bytes(TokenFile(tmp_path / "out")[0].astype(np.uint8)).decode() == "\u00e9"


def test_refusals(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["x"]))
    run(job([tmp_path / "a.jsonl"], tmp_path / "out"))
    again = run(job([tmp_path / "a.jsonl"], tmp_path / "out"))
    assert again.kept and again.manifest.documents == again.progress.documents == 1
    with pytest.raises(DataError, match="another token file is there"):
        run(job([tmp_path / "a.jsonl"], tmp_path / "out", treatment=Treatment(strip=True)))
    run(job([tmp_path / "a.jsonl"], tmp_path / "out", overwrite=True))
    with pytest.raises(DataError, match="no such file"):
        find_inputs([str(tmp_path / "*.parquet")])
    for name in ("a.xyz", "LICENSE"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.xyz, .*LICENSE: the ending must say what is inside"):
        find_inputs([str(tmp_path / "a.xyz"), str(tmp_path / "LICENSE")])
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(lines(["x" * 5000]))[:-20])
    with pytest.raises(DataError, match="cannot be read to its end"):
        run(job([tmp_path / "cut.jsonl.gz"], tmp_path / "cut"))
    with pytest.raises(DataError, match="no document was found"):
        run(job([tmp_path / "a.jsonl"], tmp_path / "none", treatment=Treatment(key="nothing")))


def test_a_folder_of_real_files(tmp_path):
    """Files that cannot be texts are skipped and named, not refused one by one."""
    folder = tmp_path / "corpus"
    (folder / ".git").mkdir(parents=True)
    contents = {".git/config.txt": b"hidden", "LICENSE": b"free", "logo.png": b"\x89PNG", "package.json": b'{"a": 1}'}
    contents |= {"a.md": b"one", "b.jsonl": lines(["two"]), "bytes.txt": b"\xff\xfe\x00"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    skipped: list[str] = []
    inputs = find_inputs([str(folder)], skipped=skipped)
    assert [Path(name).name for name in skipped] == ["LICENSE", "logo.png"]
    result = run(TokenizeJob(inputs, tmp_path / "out", BYTES, Treatment()))
    assert texts(tmp_path / "out") == ["one", "two"]
    assert sorted(Path(name).name for name, _, _ in result.progress.examples) == ["bytes.txt", "package.json"]
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(folder / "LICENSE", "LICENSE")
    with pytest.raises(DataError, match="must say what is inside"):
        find_inputs([str(tmp_path / "all.tar")])


@pytest.mark.parametrize("wrong", [{"treatment": Treatment(key="text")}, {"bad": "fatal"}])
def test_a_corrected_command_may_follow_a_failed_one(tmp_path, wrong):
    (tmp_path / "a.jsonl").write_bytes(b'{"content": "x"}\n')
    with pytest.raises(DataError, match="no object with the key 'text', only 'content'"):
        run(job([tmp_path / "a.jsonl"], tmp_path / "out", **wrong))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]
    run(job([tmp_path / "a.jsonl"], tmp_path / "out", treatment=Treatment(key="content")))
    assert texts(tmp_path / "out") == ["x"]


def corpus(folder: Path) -> list[str]:
    """Three inputs of different kinds with a few thousand documents."""
    draw = random.Random(5)
    words = ["alpha", "Beta", "γάμμα", "12345", "\n", "🙂", "word ", "  "]
    paths = []
    for index, ending in enumerate(("", ".gz", ".zst")):
        values = ["".join(draw.choices(words, k=draw.randint(1, 400))) for _ in range(1500)]
        path = folder / f"part{index}.jsonl{ending}"
        path.write_bytes(compressed(lines(values), ending))
        paths.append(str(path))
    return paths


def test_any_number_of_workers(tmp_path):
    paths = corpus(tmp_path)
    for workers in (1, 2, 3):
        run(job(paths, tmp_path / f"out{workers}", workers=workers))
    for ending in (".bin", ".idx", ".origin", ".json"):
        assert len({(tmp_path / f"out{workers}{ending}").read_bytes() for workers in (1, 2, 3)}) == 1


def start(command: list[str], seconds: float) -> bool:
    """Start the command and kill it after a number of seconds. Whether it was done before that."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return False
    assert process.returncode == 0, errors.decode()
    return True


@pytest.mark.tour
@pytest.mark.parametrize("workers, kills", [(1, 5), pytest.param(2, 20, marks=pytest.mark.slow)])
def test_killed_at_random(tmp_path, workers, kills):
    """kill -9 at random moments. The final files are byte for byte the files of an undisturbed run."""
    paths = corpus(tmp_path)
    run(job(paths, tmp_path / "whole", version=__version__))
    command = [
        sys.executable,
        str(ROOT / "tools/data/tokenize.py"),
        "--input",
        *paths,
        "--output",
        str(tmp_path / "killed"),
        "--tokenizer-type",
        "bytes",
        "--workers",
        str(workers),
        "--save-every",
        "0",
        "--quiet",
    ]
    begin = time.monotonic()
    subprocess.run([*command, "--overwrite"], check=True, capture_output=True)
    longest = time.monotonic() - begin
    draw, killed, done = random.Random(workers), 0, True
    while killed < kills or not done:
        if done:
            for path in tmp_path.glob("killed.*"):
                path.unlink()
        done = start(command, draw.uniform(0.05, longest) if killed < kills else 300)
        killed += not done
        if done:
            assert sorted(path.suffix for path in tmp_path.glob("killed.*")) == [".bin", ".idx", ".json", ".origin"]
            for ending in (".bin", ".idx", ".origin", ".json"):
                assert (tmp_path / f"killed{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()


class Cut(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("place", ["append", "save", "progress", "replace"])
def test_cut_off_at_every_write(tmp_path, monkeypatch, place):
    """Stopped at each single write of one kind in turn, and continued from there."""
    from megatron.data.corpus import inputs
    from megatron.data.corpus import job as module

    monkeypatch.setattr(inputs, "BLOCK", 2000)
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS * 6))
    run(job([tmp_path / "a.jsonl"], tmp_path / "whole"))
    target = {
        "append": (module._Parts, "append"),
        "save": (module._Parts, "save"),
        "progress": (module.Progress, "save"),
        "replace": (module.os, "replace"),
    }[place]
    original = getattr(*target)
    for stop in range(40):
        calls = iter(range(10**6))

        def cut(*arguments, calls=calls, stop=stop):
            if next(calls) == stop:
                raise Cut
            return original(*arguments)

        prefix = tmp_path / f"{place}{stop}"
        finished = False
        with monkeypatch.context() as patch:
            patch.setattr(*target, cut)
            try:
                run(job([tmp_path / "a.jsonl"], prefix, save_every=0))
                finished = True
            except Cut:
                pass
        if not finished:
            run(job([tmp_path / "a.jsonl"], prefix, save_every=0))
        for ending in (".bin", ".idx", ".origin", ".json"):
            assert Path(f"{prefix}{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()
        if finished:
            assert stop > 1
            return
    pytest.fail("the job never finished")


def test_another_job_does_not_go_on(tmp_path, monkeypatch):
    from megatron.data.corpus import job as module

    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    with monkeypatch.context() as patch:
        patch.setattr(module, "_complete", lambda *arguments: (_ for _ in ()).throw(Cut()))
        with pytest.raises(Cut):
            run(job([tmp_path / "a.jsonl"], tmp_path / "out"))
    with pytest.raises(DataError, match="unfinished job with other inputs or options"):
        run(job([tmp_path / "a.jsonl"], tmp_path / "out", treatment=Treatment(strip=True)))


def test_encoders_are_told_apart():
    """The comparison finds a difference in a single character, and the mixture avoids it."""
    tokenizer = build_tokenizer(BYTES)
    exact = with_tokenizer(tokenizer)

    def wrong(values: list[str]):
        return exact([value.replace("\u1e9e", "ss") for value in values])

    assert list(differing(exact, wrong, ["a", "\u1e9e", "b", "x\u1e9e"])) == [1, 3]
    assert difference(exact, wrong, ["a\u1e9e"]) == "'a\\u1e9e'"
    unsafe = unsafe_characters(exact, wrong)
    assert unsafe == "\u1e9e"
    assert difference(exact, mixed(wrong, exact, unsafe), ["a", "\u1e9e", "b", "x\u1e9e", ""]) is None
    assert choose_encoder(tokenizer).name == "tokenizer"
    with pytest.raises(DataError, match="gigatoken cannot be used"):
        choose_encoder(tokenizer, "gigatoken")


@needs_golden
@pytest.mark.slow
def test_gigatoken_is_exact():
    """On text of the standard library and on the odd documents of the golden corpora."""
    tokenizer = build_tokenizer(TokenizerSection(path=str(TOKENIZER)))
    choice = choose_encoder(tokenizer)
    assert choice.name == "gigatoken"
    values = [json.loads(line)["text"] for name in "ab" for line in gzip.open(FOLDER / f"corpus_{name}.jsonl.gz")]
    values += [path.read_text(errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:60]]
    assert difference(with_tokenizer(tokenizer), build_encoder(tokenizer, choice), values) is None


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.txt.gz", "bomb.json.gz", "bomb.dat.gz"])
def test_a_small_file_that_decompresses_to_a_large_text_is_refused(tmp_path, name, monkeypatch):
    """Nothing of more than the limit is ever read into memory."""
    monkeypatch.setattr(inputs, "LONGEST", 1 << 22)
    monkeypatch.setattr(inputs, "LARGEST", 1 << 22)
    size = 1 << 27
    head = {"dat": size.to_bytes(8, "big")}.get(name.split(".")[1], b'{"text": "ok"}\n' if "jsonl" in name else b"")
    with gzip.open(tmp_path / name, "wb", compresslevel=9) as file:
        file.write(head)
        for _ in range(size >> 20):
            file.write(b" " * (1 << 20))
    tracemalloc.start()
    (entry,) = find_inputs([str(tmp_path / name)])
    with pytest.raises(DataError, match="has more than 4 MiB once it is decompressed"):
        list(read_chunks(0, entry))
    assert tracemalloc.get_traced_memory()[1] < size / 4
    tracemalloc.stop()
