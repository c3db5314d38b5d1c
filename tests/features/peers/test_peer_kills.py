"""Peers that are killed and halted at random instants, and start again: the bits are those of the ledger's replay."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.features.peers.companies import Company, serving
from tests.features.peers.test_peer_runs import lines, same

KEYS = {"every": 1, "algorithm": "gradients", "slots": 4, "timeout": 0.5, "patience": 60.0, "state_every": 4}
GAP = 4  # steps between two faults


class Storm:
    """Faults of a company, each at a random instant of a step.

    Attributes:
        faults: number of each kind.
        starts: of the peers.
    """

    def __init__(self, company: Company, shared: Path, steps: int, seed: int) -> None:
        self.company, self.shared, self.steps, self.draw = company, shared, steps, random.Random(seed)
        self.faults, self.starts = Counter[str](), Counter[str]()

    def live(self, name: str, url: str) -> None:
        """Run a peer, and start it again when it was killed."""
        while True:
            self.starts[name] += 1
            try:
                words = f"training.steps={self.steps}", "checkpoint.every=10", "checkpoint.keep_last=2"
                self.company.peer(name, "storm", *words, peers={"folder": url})
                return
            except (RuntimeError, ConnectionError) as error:
                if isinstance(error, RuntimeError) and "died" not in str(error):
                    raise

    def rage(self, kills: int) -> None:
        for number in range(kills):
            while self.decided() < GAP * (number + 1):
                time.sleep(0.02)
            time.sleep(self.draw.uniform(0.0, 0.3))
            name, kind = self.draw.choice([*self.company.peers]), self.draw.choice(["kill", "kill", "halt"])
            pool = self.company.pools.get(name)
            if pool is None:
                continue
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


def storm(tmp_path: Path, kills: int, seed: int) -> dict[str, object]:
    """A company of three peers over sockets in a storm. Its account."""
    shared, steps = tmp_path / "storm/shared", GAP * kills + 12
    with Company(tmp_path, {"a": 1, "b": 1, "c": 1}, **KEYS) as company:
        key = bytes.fromhex(Path(company.keys["key_file"]).read_text())
        rage, begin = Storm(company, shared, steps, seed), time.monotonic()
        with serving(shared, "peers", "abc", key) as url, ThreadPoolExecutor(3) as threads:
            peers = [threads.submit(rage.live, name, url) for name in company.peers]
            rage.rage(kills)
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


def test_a_few_faults(tmp_path):
    found = storm(tmp_path, kills=4, seed=1)
    assert found["faults"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_a_hundred_faults(tmp_path, seed):
    print(json.dumps(storm(tmp_path, kills=100, seed=seed)))
