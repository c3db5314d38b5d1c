"""Merging and splitting, the cache with many processes, and well-known corpora."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.config.sections.data import TokenizerSection
from megatron.data.corpus import files
from megatron.data.corpus.encode import Treatment
from megatron.data.corpus.inputs import find_inputs
from megatron.data.corpus.job import TokenizeJob, run
from megatron.data.corpus.registry import corpora, prepare, stdlib_texts
from megatron.data.errors import DataError
from megatron.data.manifest import read_manifest
from megatron.data.order import cache
from megatron.data.order.pythia import PythiaOrder
from megatron.data.token_file import TokenFile
from tests.data.make import write_documents, write_sizes
from tests.data.reference import sample_index


def tokenized(folder: Path, name: str, texts: list[str]) -> Path:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run(
        TokenizeJob(
            find_inputs([str(folder / f"{name}.jsonl")]), folder / name, TokenizerSection(type="bytes"), Treatment()
        )
    )
    return folder / name


def contents(prefix: Path) -> list[list[int]]:
    file = TokenFile(prefix)
    file.verify()
    return [file[document].tolist() for document in range(len(file))]


def test_merging_equals_tokenizing_together(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_TOKENS", 7)
    one, two = tokenized(tmp_path, "a", ["one", "two " * 9]), tokenized(tmp_path, "b", ["three"])
    manifest = files.merge([str(one), str(two)], tmp_path / "both", "1")
    together = find_inputs([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    run(TokenizeJob(together, tmp_path / "whole", TokenizerSection(type="bytes"), Treatment()))
    for ending in (".bin", ".idx", ".origin"):
        assert Path(f"{tmp_path / 'both'}{ending}").read_bytes() == Path(f"{tmp_path / 'whole'}{ending}").read_bytes()
    assert manifest == read_manifest(tmp_path / "both") and [each["documents"] for each in manifest.inputs] == [2, 1]
    with pytest.raises(DataError, match="token file exists"):
        files.merge([str(one)], tmp_path / "both", "1")
    with pytest.raises(DataError, match="tokens are int32"):
        write_documents(tmp_path / "c", [[1]], np.int32)
        files.merge([str(one), str(tmp_path / "c")], tmp_path / "d", "1")
    assert not (tmp_path / "d.bin").exists()


@pytest.mark.parametrize("seed", [None, 3])
def test_splitting_keeps_every_document_once(tmp_path, seed):
    whole = tokenized(tmp_path, "a", [f"text {number}" for number in range(40)])
    counts = files.split(str(whole), {"train": 8, "validation": 1, "test": 1}, tmp_path / "a", "1", seed=seed)
    assert counts == {"train": 32, "validation": 4, "test": 4}
    parts = {name: contents(tmp_path / f"a_{name}") for name in counts}
    everything = contents(whole)
    assert sorted(sum(parts.values(), [])) == sorted(everything)
    assert (sum(parts.values(), []) == everything) == (seed is None)
    origin, lines = files.read_origin(tmp_path / "a_test"), (tmp_path / "a.jsonl").read_bytes()
    for row, tokens in zip(origin, parts["test"]):
        record = json.loads(lines[row["start"] : row["start"] + row["length"]])
        assert record["text"].encode() == bytes(tokens[:-1])


def test_splitting_into_many(tmp_path):
    write_sizes(tmp_path / "a", list(range(30)))
    assert files.split(str(tmp_path / "a"), dict.fromkeys("vwxyz", 1.0), tmp_path / "a", "1") == dict.fromkeys(
        "vwxyz", 6
    )


def order_in_a_process(folder: str, marker: str) -> list[int]:
    """Build the order. The marker counts the builds."""
    from megatron.data.order import pythia

    original = pythia.build_arrays

    def counting(*arguments):
        with open(marker, "a") as file:
            file.write("x")
        time.sleep(0.3)
        return original(*arguments)

    pythia.build_arrays = counting
    order = PythiaOrder(TokenFile(Path(folder) / "a"), 0, 50, 8, 1, samples=100, cache=Path(folder) / "cache")
    return np.concatenate([order.documents, order.pieces]).tolist()


@pytest.mark.parametrize("locks", [True, False])
def test_many_processes_build_once(tmp_path, locks, monkeypatch):
    """With locks one process builds and the others wait. Without, all build and one result stays."""
    write_sizes(tmp_path / "a", [5] * 50)
    if not locks:
        import fcntl

        def refuse(*arguments):
            raise OSError(37, "No locks available")

        monkeypatch.setattr(fcntl, "flock", refuse)
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        found = pool.starmap(order_in_a_process, [(str(tmp_path), str(tmp_path / "marker"))] * 4, chunksize=1)
    assert all(each == found[0] for each in found)
    assert len((tmp_path / "marker").read_text()) == 1 or not locks
    entries = [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(entries) == 1 and entries[0].startswith("pythia-")
    plain = PythiaOrder(TokenFile(tmp_path / "a"), 0, 50, 8, 1, samples=100)
    assert found[0] == np.concatenate([plain.documents, plain.pieces]).tolist()


def test_the_cache_goes_by_content(tmp_path):
    """The same name with other sizes is another order. Another name with the same sizes is the same one."""

    def entries():
        return sorted(path.name for path in (tmp_path / "cache").glob("pythia-*") if path.is_dir())

    def build(name):
        file = TokenFile(tmp_path / name)
        facts = cache.examine_once(file, tmp_path / "cache")
        return PythiaOrder(file, 0, 6, 4, 1, samples=5, fingerprint=facts["fingerprint"], cache=tmp_path / "cache")

    write_sizes(tmp_path / "a", [5, 3, 8, 2, 7, 4])
    build("a")
    first = entries()
    write_sizes(tmp_path / "b", [5, 3, 8, 2, 7, 4], seed=9)
    build("b")
    assert entries() == first
    write_sizes(tmp_path / "a", [5, 3, 8, 2, 4, 7])
    order = build("a")
    assert len(entries()) == 2
    assert (
        sample_index(order).tolist()
        == sample_index(PythiaOrder(TokenFile(tmp_path / "a"), 0, 6, 4, 1, samples=5)).tolist()
    )


@pytest.mark.parametrize("name", ["pieces.npy", "arrays.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b'{"pieces": 3}', None])
def test_a_damaged_cache_is_built_again(tmp_path, name, content):
    file = write_sizes(tmp_path / "a", [5] * 50)

    def spans():
        order = PythiaOrder(file, 0, 50, 8, 1, samples=10, cache=tmp_path / "cache")
        return [list(order.spans(number)) for number in range(10)]

    expected = spans()
    victim = next((tmp_path / "cache").glob(f"pythia-*/{name}"))
    victim.write_bytes(victim.read_bytes()[:-4] if content is None else content)
    with pytest.warns(UserWarning, match="damaged .* It is built again"):
        assert spans() == expected
    assert spans() == expected


def test_examining_is_remembered_until_the_file_changes(tmp_path, monkeypatch):
    file = write_documents(tmp_path / "a", [[1, 2], [3]])
    facts = cache.examine_once(file, tmp_path / "cache")
    assert (facts["smallest"], facts["largest"]) == (0, 3)
    with monkeypatch.context() as patch:
        patch.setattr(TokenFile, "verify", lambda self: pytest.fail("looked again"))
        assert cache.examine_once(file, tmp_path / "cache") == facts
    time.sleep(0.02)
    assert cache.examine_once(write_documents(tmp_path / "a", [[1, 2], [9]]), tmp_path / "cache")["largest"] == 9


def test_standard_library_corpus(tmp_path):
    made = prepare("stdlib", tmp_path, 0.1, limit=120)
    records = [json.loads(line) for part in made["files"].values() for line in open(part["path"], encoding="utf-8")]
    assert len(records) == 120 and not made["kept"]
    names = [each["name"] for each in stdlib_texts_of(120)]
    assert sorted(each["name"] for each in records) == sorted(names)
    assert 0 < made["files"]["validation"]["documents"] < 40
    assert prepare("stdlib", tmp_path, 0.1, limit=120)["kept"]
    Path(made["files"]["train"]["path"]).write_text("")
    again = prepare("stdlib", tmp_path, 0.1, limit=120)
    assert not again["kept"] and again["files"] == made["files"]


def test_a_part_without_documents_is_refused(tmp_path):
    with pytest.raises(DataError, match="none of its 5 documents belongs to validation"):
        prepare("stdlib", tmp_path, 1e-9, limit=5)
    assert not list(tmp_path.iterdir())
    assert prepare("stdlib", tmp_path, 0.0, limit=5)["files"]["validation"]["documents"] == 0


@pytest.mark.parametrize("name", ["stdlib_train.jsonl", "stdlib.json"])
def test_files_of_others_are_not_replaced(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(DataError, match="did not write it|no record|not a record"):
        prepare("stdlib", tmp_path, 0.1, limit=3)
    assert (tmp_path / name).read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def stdlib_texts_of(count: int) -> list[dict]:
    texts = stdlib_texts()
    return [next(texts) for _ in range(count)]


def test_corpora_are_named(tmp_path):
    assert {"stdlib", "enwik8", "pile", "slimpajama", "fineweb-edu"} <= set(corpora())
    with pytest.raises(DataError, match="not known"):
        prepare("nope", tmp_path)


def test_enwik8_is_checked_and_cut(tmp_path, monkeypatch):
    """Served by this test: the content's hash is compared, and the cuts do not fall inside of characters."""
    import hashlib
    import io
    import zipfile

    from megatron.data.corpus import registry

    content = ("ä" * 50).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("enwik8", content)

    class Answer(io.BytesIO):
        def __enter__(self):
            return self

        def __exit__(self, *arguments):
            return None

    monkeypatch.setattr(registry.urllib.request, "urlopen", lambda url, timeout: Answer(packed.getvalue()))
    real = registry.ARCHIVES["enwik8"]
    with pytest.raises(DataError, match="SHA-1 differs"):
        prepare("enwik8", tmp_path)
    monkeypatch.setitem(
        registry.ARCHIVES,
        "enwik8",
        registry.Archive(
            real.url, real.member, (("train", 51), ("test", 100)), real.about, hashlib.sha1(content).hexdigest()
        ),
    )
    made = prepare("enwik8", tmp_path)
    texts = {
        part: json.loads(open(file["path"], encoding="utf-8").read())["text"] for part, file in made["files"].items()
    }
    assert texts == {"train": "ä" * 26, "test": "ä" * 24}


@pytest.mark.parametrize("checked", [1 << 30, 1 << 10])
def test_a_flipped_bit_in_a_cached_order_is_found(tmp_path, checked, monkeypatch):
    """The size of the file is the same. Of a file beyond the limit evenly spaced blocks are compared."""
    monkeypatch.setattr(cache, "BLOCK", 1 << 8)
    monkeypatch.setattr(cache, "CHECKED", checked)
    built = []

    def build():
        built.append(1)
        return {"order": np.arange(1000)}

    cache.cached(tmp_path, "x", (1,), build)
    (file,) = tmp_path.glob("x-*/order.npy")
    cache.cached(tmp_path, "x", (1,), build)
    assert len(built) == 1
    content = bytearray(file.read_bytes())
    content[20 if checked < 1 << 20 else 777] ^= 4
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="does not have its checksum|cannot be read|damaged"):
        again = cache.cached(tmp_path, "x", (1,), build)
    assert len(built) == 2 and np.array_equal(again["order"], np.arange(1000))
