"""Several peers at the same time, each on ranks of its own, for tests."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import FragmentSpec, open_checkpoint
from megatron.features.peers.signing import Signer
from megatron.features.peers.sockets import FolderServer
from megatron.testing.ranks import RankPool
from megatron.testing.runs import train_on_this_rank
from megatron.training.hook import Hook
from megatron.training.trainer import Trainer

VALUES = {
    "model": {"layers": "(attention/mlp) x2", "hidden_size": 16, "vocab_size": 64, "attention": {"heads": 2}},
    "training": {"steps": 8, "sequence_length": 16, "global_batch_size": 2, "micro_batch_size": 1},
    "optimizer": {"lr": 1e-2},
    "schedule": {"type": "constant", "warmup_steps": 0},
    "data": {"synthetic": "copy"},
    "logging": {"console": "quiet", "curve": False, "predictions": False},
    "evaluation": {"at_end": False},
}


class Act(Hook):
    """Before a step, wait for a file, or die as by a power cut."""

    def __init__(self, step: int, wait: str = "", kill: bool = False) -> None:
        super().__init__()
        self.step, self.wait, self.kill = step, wait, kill

    def before_step(self, trainer: Trainer, step: int) -> None:
        if step == self.step:
            end = time.monotonic() + 120
            while self.wait and not Path(self.wait).exists() and time.monotonic() < end:
                time.sleep(0.05)
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)


def act(**options: Any) -> dict[str, Any]:
    return {"type": f"{__name__}:Act", "options": options}


@contextlib.contextmanager
def serving(folder: Path, run: str, members: Iterable[str], key: bytes, port: int = 0) -> Iterator[str]:
    """A server of a folder in a thread. Its URL."""
    server = FolderServer(folder, ("127.0.0.1", port), run, set(members), Signer(key, None))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def free() -> str:
    """An address that nothing listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def secret(folder: Path, name: str = "key") -> str:
    path = folder / name
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return str(path)


_idle: list[RankPool] = []  # of earlier companies: a process computes its first run at nearly twice the cost
_choice = threading.Lock()


def lives(pool: RankPool) -> bool:
    return all(each.is_alive() for each in pool.processes)


def pool_of(ranks: int) -> RankPool:
    """An idle pool of this size, or a new one."""
    with _choice:
        for pool in _idle:
            if len(pool.processes) == ranks and lives(pool):
                _idle.remove(pool)
                return pool
    return RankPool(ranks)


@atexit.register
def close_idle() -> None:
    for pool in _idle:
        pool.close()
    _idle.clear()


class Company:
    """Peers whose ranks are kept between runs, and for the next company.

    Args:
        peers: number of ranks of each, by name.
    """

    def __init__(self, folder: Path, peers: dict[str, int], **keys: Any) -> None:
        self.folder, self.peers = folder, peers
        self.keys = {
            "members": list(peers), "signature": "shared_key", "key_file": secret(folder), "timeout": 60.0, **keys,
        }  # fmt: skip
        self.pools: dict[str, RankPool] = {}
        self.train: Callable[..., Any] = train_on_this_rank

    def __enter__(self) -> Company:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        for pool in self.pools.values():
            if failed or pool.worn or not lives(pool):
                pool.close()
            else:
                _idle.append(pool)

    def peer(self, name: str, run: str, *overrides: str, **values: Any) -> list[dict[str, Any]]:
        """Run one peer to its end."""
        keys = {**self.keys, "name": name, "folder": str(self.folder / run / "shared"), **values.pop("peers", {})}
        whole = {**VALUES, "run": {"dir": str(self.folder / run / name)}, **values, "peers": keys}
        pool = self.pools.get(name) or pool_of(self.peers[name])
        self.pools[name] = pool
        try:
            return pool.run(self.train, (whole, list(overrides), self.peers[name]))[0]
        except (RuntimeError, OSError):
            self.pools.pop(name).close()
            raise

    def kill(self, name: str) -> None:
        """Kill a peer's ranks at once."""
        for process in self.pools[name].processes:
            process.kill()

    def run(self, run: str, *overrides: str, own: dict[str, list[str]] | None = None, **values: Any) -> list[Any]:
        """Run all peers together."""
        with ThreadPoolExecutor(len(self.peers)) as threads:
            words = {name: [*overrides, *(own or {}).get(name, ())] for name in self.peers}
            jobs = [threads.submit(self.peer, name, run, *words[name], **values) for name in self.peers]
            return [each.result() for each in jobs]

    def tensors(self, run: str, name: str, step: int) -> dict[tuple[str, str], torch.Tensor]:
        return tensors(self.folder / run / name, step)


def tensors(folder: Path, step: int) -> dict[tuple[str, str], torch.Tensor]:
    checkpoint = open_checkpoint(folder / "checkpoints" / f"step_{step:08d}", verify="checksums")
    return {
        (name, state): checkpoint.read(FragmentSpec.whole(checkpoint.tensors[name], state)).data
        for name, state in checkpoint.stored
    }
