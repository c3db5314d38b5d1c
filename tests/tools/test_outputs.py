"""No tool writes over something that it reads, whatever name it is given by."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron.config import load, save_resolved
from megatron.config.file_access import OutputError, keep_inputs, same_file
from tests.data.make import write_sizes
from tests.paths import ROOT
from tests.scripts import script

LINK = {"symbolic link": os.symlink, "hard link": os.link}


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def refused(tool: str, *arguments: object, folder: Path, word: str = "written over") -> None:
    """A tool ends with status 2 and says why, and all files are what they were."""
    before = contents(folder)
    done = script(tool, *arguments, folder=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert word in done.stderr and "fix:" in done.stderr and "Traceback" not in done.stderr
    assert contents(folder).items() >= before.items()


def test_same_file(tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("a")
    for name, link in LINK.items():
        link(tmp_path / "a", tmp_path / name)
        assert same_file(tmp_path / "a", tmp_path / name)
    os.symlink(tmp_path, tmp_path / "folder")
    assert same_file(tmp_path / "folder" / ".." / tmp_path.name / "a", tmp_path / "a")
    assert not same_file(tmp_path / "a", tmp_path / "b") and not same_file(tmp_path / "a", tmp_path / "new")
    assert same_file(tmp_path / "folder" / "new", tmp_path / "new")  # neither exists, but it would be one file
    with pytest.raises(OutputError, match="which is the input .*/a under another name"):
        keep_inputs([tmp_path / "new", tmp_path / "hard link"], [tmp_path / "b", tmp_path / "a"])
    keep_inputs([tmp_path / "new"], [tmp_path / "a", tmp_path / "b"])


@pytest.fixture
def texts(tmp_path) -> Path:
    (tmp_path / "corpus.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    return tmp_path


@pytest.mark.parametrize("more", [[], ["--overwrite"]], ids=["", "overwrite"])
def test_tokenize(texts, more):
    base = ["--tokenizer-type", "bytes", "--output"]
    refused("data/tokenize.py", "--input", "corpus.json", *base, "corpus", *more, folder=texts)
    refused("data/tokenize.py", "--input", ".", *base, texts / "corpus", *more, folder=texts)
    for number, link in enumerate(LINK.values()):
        link(texts / "corpus.json", texts / f"other{number}.json")
        refused("data/tokenize.py", "--input", "corpus.json", *base, f"other{number}", *more, folder=texts)
    vocabulary = texts / "vocabulary"
    vocabulary.mkdir()
    (vocabulary / "tokenizer.json").write_text(json.dumps(["a", "b"]))
    for tokenizer in ("vocabulary/tokenizer.json", "vocabulary"):
        arguments = ["--tokenizer", tokenizer, "--tokenizer-type", "characters", "--output", "vocabulary/tokenizer"]
        word = "written over" if tokenizer.endswith("json") else ""
        refused("data/tokenize.py", "--input", "corpus.json", *arguments, *more, folder=texts, word=word)


def test_a_manifest_replaces_nothing_else(texts):
    """A file that is no manifest is kept, though it is no input."""
    (texts / "notes.json").write_text('{"mine": 1}')
    base = ["--input", "corpus.json", "--tokenizer-type", "bytes", "--output", "notes"]
    refused("data/tokenize.py", *base, folder=texts, word="something else")
    refused("data/tokenize.py", *base, "--overwrite", folder=texts, word="something else")
    write_sizes(texts / "a", [3, 4])
    refused("data/merge.py", "--input", "a", "--output", "notes", "--overwrite", folder=texts, word="something else")


def test_train_tokenizer(texts):
    arguments = ["--kind", "characters", "--overwrite", "--output"]
    refused("data/train_tokenizer.py", "--input", "corpus.json", *arguments, "corpus.json", folder=texts)
    os.link(texts / "corpus.json", texts / "again.json")
    refused("data/train_tokenizer.py", "--input", "corpus.json", *arguments, "again.json", folder=texts)


@pytest.mark.parametrize("name", LINK)
def test_merge_and_split(tmp_path, name):
    for each in ("a", "b", "x_train"):
        write_sizes(tmp_path / each, [3, 4])
    refused("data/merge.py", "--input", "a", "b", "--output", "b", "--overwrite", folder=tmp_path)
    refused("data/merge.py", "--input", "a", "b", "--output", "./b.idx", "--overwrite", folder=tmp_path)
    shares = ["--shares", "train=0.5", "test=0.5", "--output", "x", "--overwrite"]
    refused("data/split.py", "x_train", *shares, folder=tmp_path)
    LINK[name](tmp_path / "b.bin", tmp_path / "c.bin")
    refused("data/merge.py", "--input", "a", "b", "--output", "c", "--overwrite", folder=tmp_path)
    LINK[name](tmp_path / "a.idx", tmp_path / "x_test.idx")
    refused("data/split.py", "a", *shares, folder=tmp_path)


def test_pictures_and_exports(tmp_path):
    write_sizes(tmp_path / "a", [30, 40] * 60)
    os.link(tmp_path / "a.bin", tmp_path / "lengths.png")
    refused("data/inspect.py", "a", "--picture", "lengths.png", folder=tmp_path)
    os.link(tmp_path / "a.bin", tmp_path / "ids.npy")
    overrides = [f"data.train={tmp_path / 'a'}", "data.validation={}", "data.synthetic=none", "model.vocab_size=1024"]
    resolved = load([ROOT / "configs" / "test" / "tiny_neox.yml"], overrides, ranks=1)
    (tmp_path / "run").mkdir()
    save_resolved(resolved, tmp_path / "run" / "config.yml")
    for name in ("ids", "ids.npy"):
        refused("data/batch.py", "run", "--step", 0, "--export", name, folder=tmp_path)
    assert np.fromfile(tmp_path / "a.bin", np.uint16).size == 4200


def test_convert(tmp_path):
    (tmp_path / "flat.yml").write_text((ROOT / "tests" / "config" / "neox" / "20b.yml").read_text())
    refused("config.py", "convert", "flat.yml", "-o", "flat.yml", folder=tmp_path)
    os.symlink(tmp_path / "flat.yml", tmp_path / "native.yml")
    refused("config.py", "convert", "flat.yml", "-o", "native.yml", folder=tmp_path)
