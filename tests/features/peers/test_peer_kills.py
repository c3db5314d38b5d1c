"""Peers that are killed, halted, cut off and sent garbage at random instants have the bits of the ledger's replay.

PEER_KILLS=2000 python -m pytest -m slow tests/features/peers/test_peer_kills.py -k one_kill -s
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.features.peers.companies import Company, serving
from tests.features.peers.relays import Relay
from tests.features.peers.test_peer_runs import lines, same

KEYS = {"every": 1, "algorithm": "gradients", "slots": 4, "timeout": 0.5, "patience": 60.0, "state_every": 4}
GAP = 4  # steps between two faults
ALL = ("kill", "kill", "halt", "cut", "damage")
KILLS = int(os.environ.get("PEER_KILLS", "100"))


class Storm:
    """Faults of a company, each at a random instant of a step.

    Attributes:
        relays: of each peer to the server.
        faults: number of each kind.
        starts: of the peers.
    """

    def __init__(self, company: Company, shared: Path, steps: int, seed: int, relays: dict[str, Relay]) -> None:
        self.company, self.shared, self.steps, self.draw = company, shared, steps, random.Random(seed)
        self.relays, self.faults, self.starts = relays, Counter[str](), Counter[str]()

    def live(self, name: str) -> None:
        """Run a peer, and start it again when it was killed."""
        while True:
            self.starts[name] += 1
            try:
                words = f"training.steps={self.steps}", "checkpoint.every=10", "checkpoint.keep_last=2"
                self.company.peer(name, "storm", *words, peers={"folder": self.relays[name].url})
                return
            except (RuntimeError, ConnectionError) as error:
                if isinstance(error, RuntimeError) and "died" not in str(error):
                    raise

    def rage(self, faults: int, kinds: Sequence[str]) -> None:
        for number in range(faults):
            while self.decided() < GAP * (number + 1):
                time.sleep(0.02)
            time.sleep(self.draw.uniform(0.0, 0.3))
            name, kind = self.draw.choice([*self.company.peers]), self.draw.choice(kinds)
            if kind in ("kill", "halt"):
                self.strike(name, kind)
                continue
            self.faults[kind] += 1
            relay = self.relays[name]
            if kind == "cut":
                relay.is_cut = True
                threading.Timer(self.draw.uniform(0.1, 2.0), setattr, [relay, "is_cut", False]).start()
            else:
                relay.damage += self.draw.randrange(1, 4)
                with contextlib.suppress(OSError), socket.create_connection(relay.target) as stranger:
                    stranger.sendall(self.draw.randbytes(self.draw.randrange(1, 1 << 12)))

    def strike(self, name: str, kind: str) -> None:
        pool = self.company.pools.get(name)
        if pool is None:
            return
        with contextlib.suppress(ProcessLookupError, ValueError):
            pid = pool.processes[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            self.faults[kind] += 1
            if kind == "halt":
                threading.Timer(self.draw.uniform(0.1, 2.0), _go_on, [pid]).start()

    def decided(self) -> int:
        folder = self.shared / "rounds"
        return len([each for each in os.listdir(folder) if each.endswith(".json")]) if folder.exists() else 0


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def storm(tmp_path: Path, faults: int, seed: int, kinds: Sequence[str] = ALL) -> dict[str, object]:
    """A company of three peers over sockets in a storm. Its account."""
    shared, steps = tmp_path / "storm/shared", GAP * faults + 12
    with Company(tmp_path, {"a": 1, "b": 1, "c": 1}, **KEYS) as company:
        key = bytes.fromhex(Path(company.keys["key_file"]).read_text())
        with serving(shared, "peers", "abc", key) as url, ExitStack() as stack, ThreadPoolExecutor(3) as threads:
            relays = {name: stack.enter_context(Relay(url, seed + place)) for place, name in enumerate(company.peers)}
            rage, begin = Storm(company, shared, steps, seed, relays), time.monotonic()
            peers = [threads.submit(rage.live, name) for name in company.peers]
            rage.rage(faults, kinds)
            for each in peers:
                each.result()
        seconds, found = time.monotonic() - begin, lines(shared)
        company.peer("a", "replay", f"training.steps={steps}", peers={"replay": str(shared)})
        replay = company.tensors("replay", "a", steps)
        for name in company.peers:
            assert same(replay, company.tensors("storm", name, steps)), name
    assert [each["round"] for each in found] == list(range(steps))
    given = [Counter(slot["peer"] for slot in each["slots"]) for each in found]
    jumps = [
        json.loads(each)
        for name in "abc"
        for each in (tmp_path / "storm" / name / "ledger.jsonl").read_text().splitlines()
        if '"event": "peers_jump"' in each
    ]
    return {
        "faults": dict(rage.faults), "starts": dict(rage.starts), "steps": steps, "seconds": round(seconds),
        "lines without a peer": sum(bool(each["absent"]) for each in found), "states taken": len(jumps),
        "peers in a step": dict(Counter(len(each) for each in given)),
    }  # fmt: skip


@pytest.mark.tour
def test_a_few_faults(tmp_path):
    found = storm(tmp_path, faults=5, seed=1)
    assert found["faults"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_a_hundred_faults(tmp_path, seed):
    print(json.dumps(storm(tmp_path, faults=100, seed=seed)))


@pytest.mark.slow
def test_one_kill_after_another(tmp_path):
    print(json.dumps(storm(tmp_path, faults=KILLS, seed=4, kinds=["kill"])))
