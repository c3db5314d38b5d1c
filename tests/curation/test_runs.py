"""Whole runs: the same bytes for any number of workers and after any kill. Token files that lead back to documents."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

pytest.importorskip("datatrove")

from megatron.curation.recipe import read_recipe  # noqa: E402
from megatron.curation.run import run  # noqa: E402
from megatron.data.errors import DataError  # noqa: E402
from tests.curation.recipes import curate, kept, lines, recipe, tree, written  # noqa: E402
from tests.paths import ROOT  # noqa: E402

STDLIB = ROOT / "configs" / "curation" / "python_stdlib.yml"
STAGES = [
    {"signals": {"names": ["rps_doc_word_count"]}},
    {"keep": {"signals": {"rps_doc_word_count": [3, 1000]}}},
    {"pii": {}},
    {"exact": {}},
    {"minhash": {"n": 2, "bands": 8, "rows": 2}},
    {"keep": {"signals": {"rps_doc_num_sentences": [2, 1000]}}},
]


def sources(folder: Path) -> list[dict]:
    """Two sources of two files each, with something for each stage to remove."""
    for source in ("one", "two"):
        for file in ("a.jsonl", "b.jsonl"):
            own = [f"{source} {file} has text {each}. It is a text of its own {each * each}." for each in range(5)]
            written(
                folder, source, [*own, "the same everywhere. Twice.", "short", "mail me@example.org now. Yes."], file
            )
    return [{"name": each, "path": str(folder / each), "priority": int(each == "one")} for each in ("one", "two")]


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_number_of_workers_changes_no_byte(workers: int, tmp_path: Path) -> None:
    made = sources(tmp_path)
    curate(tmp_path, STAGES, made, shard_bytes=1)
    os.rename(tmp_path / "out", tmp_path / "one_worker")
    report = curate(tmp_path, STAGES, made, shard_bytes=1, workers=workers)
    assert (
        tree(tmp_path / "out") == tree(tmp_path / "one_worker")
        and len(list((tmp_path / "out/documents").iterdir())) == 4
    )
    removed = {
        stage: sum(sum(each.values()) for each in reasons.values()) for stage, reasons in report["removed"].items()
    }
    assert removed["02_keep"] == 4 and removed["04_exact"] == 6  # 'short', and three of four copies of two texts
    everything = sum(removed.values()) + sum(report["kept"].values())
    assert everything == sum(report["documents"].values()) == 32
    assert len(lines(tmp_path / "out/removed")) == sum(removed.values())
    assert all("me@example.org" not in each["text"] for each in lines(tmp_path / "out/documents"))


def killed_at(number: int, file: Path) -> None:
    """A run that is killed just before its number-th file takes its name."""
    replace, left = os.replace, number

    def counted(*names, **options):
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(*names, **options)

    os.replace = counted
    run(read_recipe(file), quiet=True)
    os._exit(0)  # nothing of the test's own process ends here


@pytest.mark.tour
def test_a_run_that_is_killed_anywhere_ends_with_the_same_bytes(tmp_path: Path) -> None:
    made = sources(tmp_path)
    curate(tmp_path, STAGES, made)
    os.rename(tmp_path / "out", tmp_path / "whole")
    expected, number, survived = tree(tmp_path / "whole"), 0, False
    while not survived:
        made_again = recipe(tmp_path, STAGES, made)
        child = multiprocessing.get_context("fork").Process(target=killed_at, args=(number, tmp_path / "recipe.yml"))
        child.start()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        survived, number = child.exitcode == 0, number + 1
        run(made_again, quiet=True)
        assert tree(tmp_path / "out") == expected
        shutil.rmtree(tmp_path / "out")
    assert number > len(expected)


def test_a_folder_takes_one_recipe_and_the_same_inputs(tmp_path: Path) -> None:
    made = sources(tmp_path)
    curate(tmp_path, STAGES[:2], made)
    before = tree(tmp_path / "out")
    curate(tmp_path, STAGES[:2], made, workers=2)  # nothing is left to do
    assert tree(tmp_path / "out") == before
    with pytest.raises(DataError, match="the recipe must be the same"):
        curate(tmp_path, STAGES[:1], made)
    written(tmp_path, "one", ["another text here"], "a.jsonl")
    with pytest.raises(DataError, match="the input files must be the same"):
        curate(tmp_path, STAGES[:2], made)


@pytest.mark.tour
def test_the_standard_library_becomes_a_token_file_that_leads_back_to_it(tmp_path: Path) -> None:
    """Real texts, end to end by the command line: each document of the token file has the id of a source file."""
    words = [
        sys.executable,
        str(ROOT / "tools/data/curate.py"),
        str(STDLIB),
        "--output",
        str(tmp_path / "out"),
        "--json",
    ]
    report = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    documents = lines(tmp_path / "out/documents")
    assert report["kept"]["stdlib"] == len(documents) > 300
    removed = lines(tmp_path / "out/removed")
    assert {each["stage"] for each in removed} >= {"01_keep", "04_minhash"}
    library = Path(os.__file__).parent
    for each in [*documents[::50], *removed[::10]]:
        source = (library / each["id"].removeprefix("stdlib/")).read_text(encoding="utf-8-sig")
        assert each["text"] == source or "@" in source or "example" in each["text"]
    files = sorted(map(str, (tmp_path / "out/documents").iterdir()))
    made = [
        sys.executable,
        str(ROOT / "tools/data/tokenize.py"),
        "--input",
        *files,
        "--output",
        str(tmp_path / "tokens"),
    ]
    subprocess.run([*made, "--tokenizer-type", "bytes", "--quiet", "--workers", "1"], check=True, capture_output=True)
    from megatron.data.corpus.encode import ORIGIN
    from megatron.data.token_file import TokenFile

    origin, tokens = np.fromfile(tmp_path / "tokens.origin", ORIGIN), TokenFile(tmp_path / "tokens")
    assert len(origin) == len(tokens) == len(documents)
    stored = [zstandard.ZstdDecompressor().stream_reader(Path(each).read_bytes()).read() for each in files]
    for number in range(0, len(documents), 40):
        begin = int(tokens.offsets[number]) // tokens.dtype.itemsize
        ids = tokens.flat(begin, int(tokens.sizes[number]) - 1)
        assert bytes(ids.astype(np.uint8)).decode() == documents[number]["text"]
        row = origin[number]
        record = json.loads(stored[row["input"]][row["start"] : row["start"] + row["length"]])
        assert record["id"] == documents[number]["id"]


def test_sources_behind_urls(tmp_path: Path) -> None:
    """fsspec's file:// for the output, its glob for the input."""
    written(tmp_path, "in", ["first text"], "a.jsonl"), written(tmp_path, "in", ["second text"], "b.jsonl")
    source = [{"name": "s", "path": f"file://{tmp_path}/in/*.jsonl"}]
    curate(tmp_path, [], source, output=f"file://{tmp_path}/out")
    assert kept(tmp_path / "out") == ["s/a.jsonl:1", "s/b.jsonl:1"]


def test_a_training_run_imports_none_of_it() -> None:
    code = "import sys, megatron.training.run; print([each for each in sys.modules if 'curation' in each])"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert found.strip().splitlines()[-1] == "[]"


def test_curation_imports_no_torch() -> None:
    code = "import sys, megatron.curation.run, megatron.curation.stages; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert found.strip().splitlines()[-1] == "False"
