"""Decoupled peers, each a process, that are halted and killed at random instants have the bits of the ledger's replay.

PEER_SEEDS=60 python -m pytest -m slow tests/features/peers/test_decoupled_storm.py -s
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.problems import UserError
from tests.features.peers.companies import secret
from tests.features.peers.small import SmallPeer, together
from tests.features.peers.test_decoupled import OUTER, SHAPES, STEPS, inner, start

LATE, FAILED = 3, 4  # exit codes: a contribution of an earlier life has arrived late, and another error
SEEDS = int(os.environ.get("PEER_SEEDS", "6"))
CONTEXT = multiprocessing.get_context("forkserver")


def small(keys: dict[str, Any], pace: float) -> SmallPeer:
    return SmallPeer(keys, {name: torch.from_numpy(start(name)) for name in SHAPES}, STEPS, inner(keys["name"]), pace)


def live(keys: dict[str, Any], pace: float, files: Path, every: int) -> None:
    """A life of a peer, from its last checkpoint. Leaves its end in a file."""
    torch.set_num_threads(1)
    peer, path = small(keys, pace), files / f"{keys['name']}.checkpoint"

    def leave(path: Path, content: Any) -> None:
        draft = path.with_suffix(".draft")
        draft.write_bytes(pickle.dumps(content))
        draft.rename(path)

    def save(peer: SmallPeer) -> None:
        if peer.completed % every == 0 or peer.stop_reason is not None:
            leave(path, peer.saved())

    if path.exists():
        peer.resume(pickle.loads(path.read_bytes()))
    try:
        peer.run(save)
    except UserError as error:
        print(error)
        os._exit(LATE if "has not made" in str(error) else FAILED)
    end = {"weights": peer.weights, "round": peer.part.round, "stop": peer.stop_reason, "logs": peer.logs}
    leave(files / f"{keys['name']}.end", end)
    os._exit(0)  # as a peer of a run: no thread continues


class Storm:
    """A company of a seed.

    Attributes:
        ends: what each peer has left.
        faults: number of each kind.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw, self.files = random.Random(seed), folder / "run"
        self.files.mkdir()
        draw, names = self.draw, "abcd"[: self.draw.choice([2, 2, 3, 4])]
        fragments, interval = draw.choice([1, 2, 2, 3]), draw.choice([2, 3, 4])
        self.keys: dict[str, Any] = {
            "every": fragments * interval, "algorithm": "decoupled", "fragments": fragments,
            "delay": draw.randrange(interval), "alpha": draw.choice([0.0, 0.25, 0.5]), "signature": "shared_key",
            "timeout": draw.choice([0.2, 0.5, 1.0]), "patience": 30.0, "state_every": 1000, "members": [*names],
            "quorum": draw.randint(1, len(names)), "folder": str(self.files / "shared"), "key_file": secret(folder),
            **OUTER,
        }  # fmt: skip
        self.paces = {name: draw.choice([0.003, 0.01, 0.03]) for name in names}
        self.late = {name: draw.choice([0.0, 0.0, 0.3]) for name in names}  # seconds until its first start
        self.processes: dict[str, Any] = {}
        self.ends: dict[str, dict[str, Any]] = {}
        self.faults = Counter[str]()

    def live(self, name: str) -> None:
        every = random.Random(f"{name} {self.keys['timeout']}").choice([2, 5, 9])
        time.sleep(self.late[name])
        while True:
            arguments = {**self.keys, "name": name}, self.paces[name], self.files, every
            process = CONTEXT.Process(target=live, args=arguments, daemon=True)
            process.start()
            self.processes[name] = process
            process.join(120)
            assert process.exitcode in (0, LATE, -signal.SIGKILL), f"{name}: {process.exitcode}"
            if process.exitcode == 0:
                self.ends[name] = end = pickle.loads((self.files / f"{name}.end").read_bytes())
                if end["stop"] is None:
                    return
                self.faults["stops"] += 1
            self.faults["late contributions"] += process.exitcode == LATE

    def rage(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and len(self.ends) < len(self.paces):
            time.sleep(self.draw.uniform(0.0, 0.4))
            name, kind = self.draw.choice([*self.paces]), self.draw.choice(["kill", "halt", "halt"])
            process = self.processes.get(name)
            if process is None or process.exitcode is not None:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                self.faults[kind] += 1
                if kind == "halt":
                    threading.Timer(self.draw.choice([0.05, 0.3, 1.5]), _resume, [process.pid]).start()

    def replay(self, folder: Path) -> dict[str, SmallPeer]:
        own = {"folder": str(folder / "shared"), "replay": self.keys["folder"], "timeout": 20.0}
        peers = {name: small({**self.keys, **own, "name": name}, 0.0) for name in self.paces}
        together([each.run for each in peers.values()])
        return peers


def _resume(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def lines(folder: Path) -> list[dict]:
    paths = sorted((folder / "shared/rounds").glob("*.json"))  # and not drafts of killed writers
    found = [json.loads(each.read_text())["signed"] for each in paths]
    return [{key: each[key] for key in ("members", "absent", "base")} for each in found]


def storm(folder: Path, seed: int, seconds: float = 3.0) -> Counter[str]:
    """Run a company in a storm, and compare it with the replay of its ledger. Its account."""
    CONTEXT.set_forkserver_preload([__name__])
    made = Storm(folder, seed)
    with ThreadPoolExecutor(len(made.paces)) as threads:
        peers = [threads.submit(made.live, name) for name in made.paces]
        made.rage(seconds)
        for each in peers:
            each.result()
    found = lines(made.files)
    (folder / "again").mkdir()
    for name, peer in made.replay(folder / "again").items():
        end = made.ends[name]
        assert peer.stop_reason is None, f"{seed} {name}: {peer.stop_reason} {peer.logs}"
        assert peer.part.round == end["round"], f"{seed} {name}: {end['logs']}"
        assert all(torch.equal(peer.weights[key], end["weights"][key]) for key in SHAPES), f"{seed} {name}"
        made.faults["early ends"] += any("the run ends with the common weights" in each for each in end["logs"])
    again, applied = lines(folder / "again"), max(each["round"] for each in made.ends.values())
    assert len(again) >= applied and again[:applied] == found[:applied]
    made.faults["rounds"] += len(found)
    return made.faults


@pytest.mark.parametrize("seed", [0, 1])
def test_a_short_storm(tmp_path, seed):
    assert storm(tmp_path, seed, seconds=1.0)["rounds"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 2 + SEEDS))
def test_a_storm(tmp_path, seed):
    print(seed, dict(storm(tmp_path, seed)))
