"""A rank that is done ends with its own status, whatever threads below Python still do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from megatron.worker.network import listen_on
from tests.paths import ROOT
from tests.scripts import forked

ENDING = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from megatron.worker.job import leave_process

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
    done = forked("-c", ENDING, folder=ROOT)
    assert done.returncode == 3, done.stderr
    assert done.stdout.split() == ["done", "pool", "thread", "registered"] and not done.stderr


def test_scripts_of_ranks_end_so() -> None:
    for name in ("train.py", "evaluate.py", "generate.py", "extract.py", "tools/checkpoint/to_native.py"):
        assert "leave_process(guarded(main))" in (ROOT / name).read_text(), name


LAST_ROUND = """
import sys, time
from megatron.config import load
from megatron.training import world
from megatron.worker.beacon import Beacon, read
from megatron.worker.job import leave_process
from megatron.worker.place import worker_environment

place, beacon, opened = worker_environment(), Beacon(), world.open_store

def open_store(*given, **options):
    assert "the name service (DNS)" in read(bytes(beacon._memory)).detail, "a hang here says what may cause it"
    return opened(*given, **options)

Beacon.inherited, world.open_store = lambda: beacon, open_store
words = ["launch.device=cpu", "launch.timeout=77"]
with world.joined(load(["configs/test/tiny_llama.yml"], words, ranks=2).config, place) as world:
    if world.mesh.rank == 1:  # late, between the news that there is an answer and its reading
        sealed = world.background._store
        store, wait = sealed.store, sealed.store.wait
        sealed.store = type("Late", (), {
            "wait": lambda self, *words: (wait(*words), time.sleep(1.0))[0],
            "__getattr__": lambda self, name: getattr(store, name),
        })()
    assert world.background._timeout.total_seconds() == 77, "of saves too"
    print(world.background.broadcast("all is saved"))
leave_process(0)
"""


def test_the_rank_that_hosts_the_store_leaves_last() -> None:
    """The last act of a run is a round over the store: a rank that reads its answer late still gets it."""
    with listen_on("127.0.0.1", one_host=True) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"} for rank in range(2)]
    with ThreadPoolExecutor(2) as both:
        for done in both.map(lambda more: forked("-c", LAST_ROUND, folder=ROOT, **more), own):
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines()[-1] == "all is saved"
