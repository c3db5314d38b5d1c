"""kill -9 at random moments of training with a save after every step: the run continues and ends the same bitwise."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest
import torch

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.format.fragment import FragmentSpec
from megatron.worker.network import free_port
from tests.paths import ROOT

TINY = """
model: {layers: "(attention/mlp) x2", hidden_size: 32, vocab_size: 64, dropout: 0.1, attention: {heads: 2}}
training: {sequence_length: 16, micro_batch_size: 2, global_batch_size: 4}
optimizer: {lr: 1e-2}
data: {synthetic: copy}
tokenizer: {type: none}
zero: {stage: 1}
evaluation: {at_end: false}
checkpoint: {every: 1, keep_last: 3}
logging: {console: quiet, curve: false}
launch: {device: cpu}
"""
LONGEST = 240.0  # seconds until a process must have got on


class Process(Protocol):
    """One rank: what subprocess.Popen has, too."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int | None: ...


Start = Callable[[list[str], dict[str, str]], Process]


def train(words: list[str], variables: dict[str, str]) -> None:
    """train.py's main."""
    from train import main

    torch.set_num_threads(1)
    for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JOB_CONFIG"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    sys.argv = ["train.py", *words]
    if status := main():
        raise SystemExit(status)


class Forked:
    """A fork of a server that has imported everything and has no threads. A fork of this process could find a lock held
    by a thread that does not exist in it, and a new interpreter takes seconds for torch."""

    def __init__(self, words: list[str], variables: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["megatron.training.run", "train"])
        self.process = context.Process(target=train, args=(words, variables))
        self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode


def started(words: list[str], variables: dict[str, str]) -> Process:
    """A new interpreter that runs train.py."""
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(ROOT / "train.py"), *words], env=environment)


class Run:
    """A run that can be started again and again.

    Args:
        folder: of the configuration and the run.
        ranks: number of processes.
        steps: its length.
        start: how a process is started. Gives its id.
    """

    def __init__(self, folder: Path, ranks: int, steps: int, start: Start) -> None:
        self.folder, self.ranks, self.steps, self.start = folder, ranks, steps, start
        self.alive: list[Process] = []
        folder.mkdir(parents=True)
        (folder / "tiny.yml").write_text(TINY)

    def begin(self, *overrides: str) -> None:
        port = free_port("127.0.0.1")
        words = [
            str(self.folder / "tiny.yml"),
            f"run.dir={self.folder}/run",
            f"training.steps={self.steps}",
            *overrides,
        ]
        for rank in range(self.ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks}
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self.alive.append(self.start(words, {name: str(value) for name, value in {**place, **address}.items()}))

    def newest(self) -> int:
        """Step of the newest complete checkpoint, -1 if there is none."""
        found = (self.folder / "run" / "checkpoints").glob("step_????????")
        return max((int(each.name[5:]) for each in found), default=-1)

    def running(self) -> bool:
        """Whether all ranks live. A rank that failed by itself is an error."""
        for process in list(self.alive):
            status = process.poll()
            if status is not None:
                self.alive.remove(process)
                assert status == 0, f"a rank ended with status {status}"
        return len(self.alive) == self.ranks

    def wait(self, until: Callable[[], bool]) -> bool:
        """Whether it came so far, and did not end before."""
        limit = time.monotonic() + LONGEST
        while self.running():
            if until():
                return True
            assert time.monotonic() < limit, f"no progress since step {self.newest()}"
            time.sleep(0.001)
        return False

    def finish(self) -> None:
        limit = time.monotonic() + LONGEST
        while self.alive:
            self.running()
            assert time.monotonic() < limit, f"no progress since step {self.newest()}"
            time.sleep(0.01)

    def kill(self, choose: random.Random) -> bool:
        """Kill one rank, then the others, who cannot continue. Returns whether that was during a save."""
        for process in choose.sample(self.alive, len(self.alive)):
            process.kill()
            process.wait()
        self.alive.clear()
        return any((self.folder / "run" / "checkpoints").glob("*.tmp-*"))

    def close(self) -> None:
        for process in self.alive:
            process.kill()
            process.wait()


def tensors(run: Run) -> dict[tuple[str, str], torch.Tensor]:
    path = run.folder / "run" / "checkpoints" / f"step_{run.steps:08d}"
    checkpoint = open_checkpoint(path, verify="checksums")
    return {
        (name, state): checkpoint.read(FragmentSpec.whole(checkpoint.tensors[name], state)).data
        for name, state in checkpoint.stored
    }


def survive(folder: Path, *, ranks: int, kills: int, seed: int, start: Start) -> int:
    """Kill a run n times, let it finish, and compare it with an undisturbed one.

    Returns:
        How many of the kills hit a save.
    """
    choose, steps, during = random.Random(seed), 8 * kills, 0
    whole, parts = Run(folder / "whole", ranks, steps, start), Run(folder / "parts", ranks, steps, start)
    try:
        whole.begin(f"checkpoint.every={steps}")
        whole.finish()
        for number in range(kills):
            target = parts.newest() + choose.randint(1, 2)
            parts.begin(f"checkpoint.asynchronous={'true' if number % 2 else 'false'}")
            assert parts.wait(lambda target=target: parts.newest() >= target), "it ended before it was killed"
            time.sleep(choose.uniform(0, 0.1))
            during += parts.kill(choose)
        parts.begin()
        parts.finish()
    finally:
        whole.close(), parts.close()
    expected, found = tensors(whole), tensors(parts)
    assert expected.keys() == found.keys() and {state for _, state in found} >= {"master", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert not [each for each in (parts.folder / "run" / "checkpoints").iterdir() if "tmp-" in each.name]
    shutil.rmtree(folder)
    return during


@pytest.mark.tour
def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    survive(tmp_path / "runs", ranks=1, kills=3, seed=1, start=Forked)


@pytest.mark.slow
def test_thirty_kills_of_two_ranks(tmp_path: Path) -> None:
    during = survive(tmp_path / "runs", ranks=2, kills=30, seed=2, start=started)
    print(f"{during} of 30 kills hit a save")
    assert 0 < during < 30
