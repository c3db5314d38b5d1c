"""Kills of several workers at any moment, and stores: the output has the same bytes."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import fsspec
import pytest

pytest.importorskip("datatrove")

from megatron.curation.recipe import read_recipe  # noqa: E402
from megatron.curation.run import run  # noqa: E402
from tests.curation.recipes import curate, recipe, tree  # noqa: E402
from tests.curation.test_runs import STAGES, sources  # noqa: E402

ALL = [*STAGES[:3], {"lines": {"least": 3}}, *STAGES[3:]]


def undisturbed(folder: Path, stages: list) -> dict[str, str]:
    """The files of a run by one worker. The recipe stays in recipe.yml."""
    curate(folder, stages, sources(folder), shard_bytes=1)
    shutil.move(folder / "out", folder / "whole")
    return tree(folder / "whole")


def start(file: Path, workers: int) -> multiprocessing.Process:
    # not a fork, which would inherit the address of this process's fork server
    child = multiprocessing.get_context("spawn").Process(target=quietly, args=(file, workers))
    child.start()
    return child


def quietly(file: Path, workers: int) -> None:
    run(read_recipe(file, {"workers": workers}), quiet=True)
    os._exit(0)


def children(of: int) -> list[int]:
    """Processes that run a task: the children of the fork server, which is a child of the run."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            fields = (each / "stat").read_text().rpartition(")")[2].split() if each.name.isdigit() else []
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields and int(fields[1]) == of:
            found.append(int(each.name))
    return found


def files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


@pytest.mark.parametrize(
    ("workers", "stages", "kills", "who"),
    [
        (2, [*STAGES[:2], {"exact": {}}], 1, "run"),
        pytest.param(2, ALL, 4, "worker", marks=pytest.mark.slow),
        pytest.param(4, ALL, 4, "run", marks=pytest.mark.slow),
    ],
)
def test_workers_that_are_killed_at_random_moments(
    workers: int, stages: list, kills: int, who: str, tmp_path: Path
) -> None:
    """The run or one of its workers is killed when there is a random number of files, and the run is started again."""
    expected, draw, landed = undisturbed(tmp_path, stages), random.Random(11), 0
    while landed < kills:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        child, most = start(tmp_path / "recipe.yml", workers), draw.randrange(2, len(expected))
        while child.is_alive() and files(tmp_path / "out") < most:
            time.sleep(0.002)
        victims = [child.pid] if who == "run" else [each for one in children(child.pid) for each in children(one)]
        for each in victims[-1:]:
            os.kill(each, signal.SIGKILL)
        child.join()
        landed += child.exitcode != 0
        child = start(tmp_path / "recipe.yml", workers)
        child.join()
        assert child.exitcode == 0 and tree(tmp_path / "out") == expected


def test_a_store_has_the_bytes_of_a_disk_also_after_it_did_not_answer(tmp_path: Path, monkeypatch) -> None:
    """fsspec's file system in memory stands for an object store: input and output are URLs."""
    from fsspec.implementations.memory import MemoryFileSystem

    expected = undisturbed(tmp_path, ALL)
    store = fsspec.filesystem("memory")
    store.store.clear()
    for name in ("one", "two"):
        store.put(str(tmp_path / name), f"/bucket/{name}", recursive=True)
    given = [
        {"name": each, "path": f"memory://bucket/{each}", "priority": int(each == "one")} for each in ("one", "two")
    ]
    made = recipe(tmp_path, ALL, given, shard_bytes=1, output="memory://bucket/out")
    opened, count = MemoryFileSystem._open, 0

    def failing(self, path, *more, **keys):
        nonlocal count
        count += "/bucket/two/" in path
        if count == 2 and "/bucket/two/" in path:
            raise OSError("503 slow down")
        return opened(self, path, *more, **keys)

    monkeypatch.setattr(MemoryFileSystem, "_open", failing)
    with pytest.raises(RuntimeError, match="503 slow down"):
        run(made, quiet=True)
    assert not store.exists("/bucket/out/report.json")
    run(made, quiet=True)
    store.get("/bucket/out", str(tmp_path / "fetched"), recursive=True)
    found = tree(tmp_path / "fetched")
    apart = {"inputs.json", "report.json", "state.json"}  # which have the addresses of the input
    assert {name: each for name, each in found.items() if name not in apart} == {
        name: each for name, each in expected.items() if name not in apart
    }
