"""kill -9 at random moments of training with a save after every step: the run goes on and ends the same bitwise."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.fragment import FragmentSpec
from megatron.worker.network import free_port
from tests.checkpoint.processes import child
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
Start = Callable[[list[str], dict[str, str]], int]


def forked(words: list[str], variables: dict[str, str]) -> int:
    """train.py's main in a fork of this process, which has imported everything."""

    def work() -> None:
        from train import main

        for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JOB_CONFIG"):
            os.environ.pop(name, None)
        os.environ.update(variables)
        sys.argv = ["train.py", *words]
        if main():
            raise RuntimeError("training did not finish")

    return child(work)


def started(words: list[str], variables: dict[str, str]) -> int:
    """A new interpreter that runs train.py."""
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(ROOT / "train.py"), *words], env=environment).pid


class Run:
    """A run that can be started again and again.

    Args:
        folder: of the configuration and the run.
        ranks: number of processes.
        steps: its length.
        start: how a process is started; gives its id.
    """

    def __init__(self, folder: Path, ranks: int, steps: int, start: Start) -> None:
        self.folder, self.ranks, self.steps, self.start = folder, ranks, steps, start
        self.alive: set[int] = set()
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
            self.alive.add(self.start(words, {name: str(value) for name, value in {**place, **address}.items()}))

    def newest(self) -> int:
        """Step of the newest complete checkpoint, -1 if there is none."""
        found = (self.folder / "run" / "checkpoints").glob("step_????????")
        return max((int(each.name[5:]) for each in found), default=-1)

    def running(self) -> bool:
        """Whether all ranks live; a rank that failed by itself is an error."""
        for pid in list(self.alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.alive.discard(pid)
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
        """Kill one rank, then the others, who cannot go on. Returns whether that was during a save."""
        for pid in choose.sample(sorted(self.alive), len(self.alive)):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.alive.clear()
        return any((self.folder / "run" / "checkpoints").glob("*.tmp-*"))

    def close(self) -> None:
        for pid in self.alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def tensors(run: Run) -> dict[tuple[str, str], torch.Tensor]:
    path = run.folder / "run" / "checkpoints" / f"step_{run.steps:08d}"
    checkpoint = open_checkpoint(path, verify="checksums")
    return {
        (name, state): checkpoint.read(FragmentSpec.whole(checkpoint.tensors[name], state)).data
        for name, state in checkpoint.stored
    }


def survive(folder: Path, *, ranks: int, kills: int, seed: int, start: Start) -> int:
    """Kill a run so many times, let it finish, and compare it with one that nobody killed.

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


def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    import megatron.training.run  # noqa: F401  once here, not in each fork

    survive(tmp_path / "runs", ranks=1, kills=3, seed=1, start=forked)


@pytest.mark.slow
def test_thirty_kills_of_two_ranks(tmp_path: Path) -> None:
    during = survive(tmp_path / "runs", ranks=2, kills=30, seed=2, start=started)
    print(f"{during} of 30 kills hit a save")
    assert 0 < during < 30
