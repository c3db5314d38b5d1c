"""Ranks without a launcher: a function on several processes of this machine, in one gloo group."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT = 300.0
SETTINGS = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(*args)` returns on each of `ranks` new processes; it must be importable.

    Raises:
        RuntimeError: with the traceback of the first rank that failed.
        TimeoutError: a rank does not answer, for example since it waits for one that does something else.
    """
    context, pipes, processes = get_context("spawn"), {}, []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                job = (rank, ranks, str(Path(folder) / "store"), theirs, function, args)
                process = context.Process(target=_serve, args=job, daemon=True)
                process.start()
                theirs.close()
                pipes[ours] = rank
                processes.append(process)
            return _answers(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: dict[Connection, int]) -> list[Any]:
    waiting, answers = dict(pipes), {}
    while waiting:
        ready = wait(list(waiting), TIMEOUT)
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer within {TIMEOUT:.0f} s")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                done, answers[rank] = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if not done:
                raise RuntimeError(f"rank {rank} failed:\n{answers[rank]}")
    return [answers[rank] for rank in sorted(answers)]


def _serve(rank: int, ranks: int, store: str, pipe: Connection, function: Callable[..., Any], args: tuple) -> None:
    sizes = {name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ.update(SETTINGS, **sizes, RANK=str(rank), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        answer = function(*args)
        dist.barrier()  # nobody still reads from a group that another is about to leave
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    else:
        pipe.send((True, answer))
