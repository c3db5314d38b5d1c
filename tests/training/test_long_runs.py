"""The memory of a run does not grow with its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.hook import Hook
from tests.paths import ROOT


def private_kib() -> int:
    """Memory that only this process has."""
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(words[1]) for words in lines if words[0] in ("Private_Clean:", "Private_Dirty:"))


class Lowest(Hook):
    """Writes the least private memory of each window of steps: what a step holds for a moment does not count."""

    def __init__(self, folder: str, window: int) -> None:
        self.file, self.window = Path(folder, f"{os.environ['RANK']}.json"), window
        self.lowest: list[int] = []

    def after_step(self, trainer, step, report):
        now = private_kib()
        if step % self.window:
            self.lowest[-1] = min(self.lowest[-1], now)
        else:
            self.lowest.append(now)

    def on_end(self, trainer):
        self.file.write_text(json.dumps(self.lowest))


def lowest(folder: Path, steps: int, window: int) -> list[list[int]]:
    """By rank, KiB in each window of a run of two ranks."""
    hook = f"[{{type: tests.training.test_long_runs:Lowest, options: {{folder: {folder}, window: {window}}}}}]"
    settings = ["launch.device=cpu", f"run.dir={folder}/run", f"training.steps={steps}", f"hooks={hook}"]
    small = ["training.sequence_length=8", "training.global_batch_size=2", "training.micro_batch_size=1"]
    off = ["checkpoint.every=null", "evaluation.every=null", "evaluation.at_end=false", "logging.curve=false"]
    done = subprocess.run(
        [
            *(sys.executable, "deepy.py", "--ranks", "2", "train.py", "configs/test/tiny_llama.yml"),
            *settings,
            *small,
            *off,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.tour
def test_a_step_leaves_no_memory_behind(tmp_path: Path) -> None:
    """Within a MiB in 150 steps: the interpreter fills its lists of free tuples, 2,000 of a length, which takes a
    quarter of that. One entry of 4 KB per collective of a step would be 2.5 MiB by itself."""
    for windows in lowest(tmp_path, steps=300, window=50):
        assert windows[-1] - windows[2] < 1024, windows


@pytest.mark.slow
def test_the_memory_of_a_long_run_is_flat(tmp_path: Path) -> None:
    """Behind step 1000, where such lists are full: less than 256 bytes a step, so 25 MB in 100,000 steps."""
    for windows in lowest(tmp_path, steps=3000, window=250):
        assert (windows[-1] - windows[4]) * 1024 < 256 * 250 * (len(windows) - 5), windows
