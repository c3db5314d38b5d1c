"""A rank that is done ends with its own status, whatever threads below Python still do."""

from __future__ import annotations

import subprocess
import sys

from tests.paths import ROOT

ENDING = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from megatron.worker.leaving import leave_process

def work():  # always inside of torch, and back for Python's lock, as gloo's threads when they let go of a tensor
    while True:
        torch.ones(1000).sum()

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
atexit.register(print, "registered")
ThreadPoolExecutor(1).submit(lambda: time.sleep(0.3) or print("pool"))
threading.Thread(target=lambda: time.sleep(0.5) or print("thread")).start()
print("done", flush=False)
leave_process(3)
"""


def test_threads_are_waited_for_and_the_status_is_that_of_the_rank() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 3, done.stderr
    assert done.stdout.split() == ["done", "pool", "thread", "registered"] and not done.stderr


def test_scripts_of_ranks_end_so() -> None:
    for name in ("train.py", "evaluate.py", "generate.py", "extract.py"):
        assert "leave_process(guarded(main))" in (ROOT / name).read_text(), name
