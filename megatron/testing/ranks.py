"""Ranks without a launcher: `on_ranks(ranks, function, *args)` on reused processes of this machine, in a gloo group.

Importing torch and DeepSpeed costs seconds, so one process imports them, and the workers of each world size are forked
from it once. They run the functions they receive, each in a new process group. A worker that fails returns its
traceback. Its world is then discarded, since its peers may be stuck in a collective."""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import itertools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast
from unittest import mock

from megatron.config.kind import kinds_of

TIMEOUT = 400.0
PATIENCE = timedelta(seconds=240)  # of a collective: shorter, so that a waiting rank reports its place
THREADS = 60
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MASTER_ADDR": "127.0.0.1",
    "DS_ACCELERATOR": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_FR_BUFFER_SIZE": "0",  # see `world.join`
}


class RankPool:
    """`size` processes, each the same rank in every job: DeepSpeed numbers modules over a process's life, alike on all
    ranks."""

    def __init__(self, size: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="workers-")
        self.jobs = itertools.count()
        self.worn = False  # too many threads of forgotten groups
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        context = get_context("forkserver")
        kinds = sorted({kind.layer.partition(":")[0] for kind in kinds_of().values()})
        context.set_forkserver_preload([*kinds, "megatron.engine.preload"])  # which freezes them all
        with mock.patch.dict(os.environ, SETTINGS):
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, size, theirs), daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)

    def run(self, function: Callable, args: tuple) -> list[Any]:
        store = f"file://{Path(self.folder.name) / f'store-{next(self.jobs)}'}"
        for pipe in self.pipes:
            pipe.send((store, function, args))
        results: dict[int, Any] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while waiting:
            ready = wait(list(waiting), TIMEOUT)
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer within {TIMEOUT} s")
            for pipe in cast("list[Connection]", ready):
                rank = waiting.pop(pipe)
                try:
                    ok, value, threads = pipe.recv()
                except EOFError:
                    raise RuntimeError(f"rank {rank} died") from None
                if not ok:
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
                self.worn |= threads > THREADS
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


_worlds: dict[int, RankPool] = {}


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of `function(*args)` on each of `ranks` processes. It must be importable and its results picklable.

    Raises:
        RuntimeError: with the traceback of the first rank that failed.
        TimeoutError: a rank does not answer, for example because of a deadlock.
    """
    world = _worlds.get(ranks)
    if world is None:
        world = _worlds[ranks] = RankPool(ranks)
    done = False
    try:
        results = world.run(function, args)
        done = True
        return results
    finally:
        if not done or world.worn:
            world.close()
            del _worlds[ranks]


@atexit.register
def close_all() -> None:
    for world in _worlds.values():
        world.close()
    _worlds.clear()


def _serve(rank: int, size: int, pipe: Connection) -> None:
    os.environ.update(SETTINGS, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    import torch
    import torch.distributed as dist

    from megatron.engine.deepspeed.process import prepare_deepspeed

    faulthandler.enable()
    prepare_deepspeed(torch.device("cpu"))
    torch.set_num_threads(1)
    linear = torch.nn.functional.linear
    while True:
        try:
            store, function, args = pipe.recv()
        except EOFError:
            return
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=PATIENCE)
        try:
            answer = function(*args)
        except BaseException:
            pipe.send((False, traceback.format_exc(), 0))
            continue  # this world is not used again
        dist.barrier()  # no rank reads from a group that another is about to close
        _forget_the_last_engine(linear)
        tasks = "/proc/self/task"
        pipe.send((True, answer, len(os.listdir(tasks)) if os.path.isdir(tasks) else 0))


def _forget_the_last_engine(linear: Callable) -> None:
    """Leave a process as it was before the engine: its groups, DeepSpeed's memory, torch's linear function.

    A gloo group keeps threads that never quite sleep: a hundred forgotten engines slow every later one down twentyfold.
    ZeRO 3 and pipelines leave some behind, and a world with many is discarded. DeepSpeed keeps the axes of the last
    engine in a module. ZeRO 3 replaces torch's linear function, with which selective recomputation gives wrong
    gradients."""
    import torch
    import torch.distributed as dist

    torch.nn.functional.linear = linear
    if deepspeed := sys.modules.get("deepspeed"):
        for engine in [thing for thing in gc.get_objects() if issubclass(type(thing), deepspeed.DeepSpeedEngine)]:
            with contextlib.suppress(Exception):  # an engine that failed half-way
                engine.destroy()  # its hooks on gradients are cycles that no collection finds
        engine = None
        deepspeed.comm.comm.cdb = None
        importlib.reload(deepspeed.utils.groups)
    dist.destroy_process_group()
    gc.collect()
    gc.freeze()  # the rest are modules: a million objects that later searches and collections can skip
