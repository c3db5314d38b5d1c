"""Decoupled DiLoCo: peers of different pace against a simulation of their ledger in numpy, and against its replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from megatron.features.peers.decoupled_rounds import DecoupledRounds, Watch
from megatron.features.peers.line import JUMPS
from megatron.features.peers.outer import merged, norm_of
from tests.features.peers.companies import secret
from tests.features.peers.small import TOKENS, Killed, SmallPeer, together

SHAPES = {"embedding.weight": (3, 4), "head.weight": (2, 5), "layers.0.w": (4, 3), "layers.1.w": (7,)}
FRAGMENTS = [["embedding.weight", "layers.0.w"], ["head.weight", "layers.1.w"]]
STEPS, LR = 24, 0.05
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}
KEYS = {
    "every": 4, "algorithm": "decoupled", "fragments": 2, "delay": 1, "alpha": 0.25, "signature": "shared_key",
    "timeout": 20.0, "state_every": 1000, "quorum": 2, **OUTER,
}  # fmt: skip


def start(name: str) -> np.ndarray:
    return np.random.default_rng(sorted(SHAPES).index(name)).normal(size=SHAPES[name])


def target(peer: str, name: str) -> np.ndarray:
    return np.random.default_rng([ord(peer), sorted(SHAPES).index(name)]).normal(size=SHAPES[name])


def inner(peer: str) -> Callable:
    """An inner step of SGD on the distance to the peer's own weights, with noise that depends on the step."""

    def step(weights, number) -> None:
        for name, each in weights.items():
            each.sub_((each - torch.from_numpy(target(peer, name) * (1 + 0.1 * (number % 3)))) * LR)

    return step


def company(folder: Path, paces: dict[str, float], **keys) -> dict[str, SmallPeer]:
    folder.mkdir(exist_ok=True)
    key = str(folder.parent / "key") if (folder.parent / "key").exists() else secret(folder.parent)
    own = {**KEYS, "members": list(paces), "folder": str(folder / "shared"), "key_file": key, **keys}
    weights = {name: torch.from_numpy(start(name)) for name in SHAPES}
    return {name: SmallPeer({**own, "name": name}, weights, STEPS, inner(name), pace) for name, pace in paces.items()}


def lines(folder: Path) -> list[dict]:
    return [json.loads(each.read_text())["signed"] for each in sorted((folder / "shared/rounds").iterdir())]


def sent(folder: Path, round: int, peer: str) -> dict[str, np.ndarray]:
    content = (folder / f"shared/contributions/{round:08d}/{peer}").read_bytes()
    return load(content.partition(b"\n")[2])


class Simulation:
    """One process that follows the events of a ledger: inner steps, contributions and merges, in numpy."""

    def __init__(self, ledger: list[dict], peers: list[str], alpha: float) -> None:
        self.ledger, self.alpha = ledger, alpha
        self.common = [{name: start(name) for name in SHAPES}]  # before each round
        self.velocity = {name: np.zeros(SHAPES[name]) for name in SHAPES}
        self.local = {peer: {name: start(name) for name in SHAPES} for peer in peers}
        self.at, self.round = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0)
        self.received = {peer: [0, 0] for peer in peers}

    def train(self, peer: str, until: int) -> None:
        for number in range(self.at[peer], until):
            for name, each in self.local[peer].items():
                each -= (each - target(peer, name) * (1 + 0.1 * (number % 3))) * LR
        self.at[peer] = until

    def take(self, peer: str, step: int, to: int) -> None:
        """After a step, apply the rounds below `to`."""
        self.train(peer, step)
        first, alpha = self.round[peer], self.alpha if to == self.round[peer] + 1 else 0.0
        for fragment in {round % 2 for round in range(first, to)}:
            for name in FRAGMENTS[fragment]:
                common, local = self.common[to][name], self.local[peer][name]
                self.local[peer][name] = alpha * local + (1 - alpha) * common
            self.received[peer][fragment] = step
        self.round[peer] = to

    def merge(self, round: int, deltas: list[dict[str, np.ndarray]], weights: list[float]) -> None:
        shares = np.array(weights) / np.sum(weights)
        common = {name: each.copy() for name, each in self.common[-1].items()}
        for name in FRAGMENTS[round % 2]:
            values = [each[name] for each in deltas]
            gradient = sum(share * each for share, each in zip(shares, values))
            if name.startswith("layers."):
                norms = np.array([np.linalg.norm(each) for each in values])
                direction = sum(share * each / norm for share, each, norm in zip(shares, values, norms))
                gradient = float(shares @ norms) * direction / np.linalg.norm(direction)
            self.velocity[name] = OUTER["outer_momentum"] * self.velocity[name] + gradient
            common[name] -= OUTER["outer_lr"] * (gradient + OUTER["outer_momentum"] * self.velocity[name])
        self.common.append(common)

    def run(self, check: Callable[[int, str, dict[str, np.ndarray]], None]) -> dict[str, np.ndarray]:
        """The last common weights.

        Args:
            check: called with round, peer and its deltas.
        """
        for round, line in enumerate(self.ledger):
            deltas, weights = [], []
            for each in line["members"]:
                peer, completed = each["peer"], each["completed"]
                for step, to in each["jumps"]:
                    self.take(peer, step, to)
                self.train(peer, completed)
                assert self.round[peer] == round and each["steps"] == completed - self.received[peer][round % 2]
                deltas.append({name: self.common[-1][name] - self.local[peer][name] for name in FRAGMENTS[round % 2]})
                weights.append((TOKENS * each["steps"]) ** 2 / each["steps"])
                check(round, peer, deltas[-1])
            self.merge(round, deltas, weights)
        return self.common[-1]


def common(peers: dict[str, SmallPeer]) -> dict[str, torch.Tensor]:
    """The common weights, from which all peers end."""
    found = [each.part.states["outer_weights"] for each in peers.values()]
    for peer, state in zip(peers.values(), found):
        for name in SHAPES:
            assert torch.equal(state[name], found[0][name]), name
            assert torch.equal(peer.weights[name], found[0][name]), name
    return found[0]


def replayed(folder: Path, paces: dict[str, float], before: dict[str, torch.Tensor]) -> None:
    """The replay of a ledger has its lines and its bits."""
    again = company(folder.parent / "again", dict.fromkeys(paces, 0.0), replay=str(folder / "shared"))
    together([each.run for each in again.values()])
    found = common(again)
    assert all(torch.equal(found[name], before[name]) for name in SHAPES)
    for one, other in zip(lines(folder), lines(folder.parent / "again"), strict=True):
        assert [one[key] for key in ("members", "absent", "base")] == [
            other[key] for key in ("members", "absent", "base")
        ]


@pytest.mark.parametrize("quorum", [1, 2])
def test_peers_of_different_pace(tmp_path, quorum):
    """c is four times as slow as a. The simulation of the ledger has each contribution and the last weights."""
    paces, folder = {"a": 0.01, "b": 0.015, "c": 0.04}, tmp_path / "run"
    peers = company(folder, paces, quorum=quorum)
    together([each.run for each in peers.values()])
    before, ledger = common(peers), lines(folder)
    assert len(ledger) <= STEPS // 2 and any(len(line["members"]) < 3 for line in ledger)
    assert len({each["steps"] for line in ledger for each in line["members"]}) > 1  # so the weights differ

    def check(round: int, peer: str, deltas: dict[str, np.ndarray]) -> None:
        for name, each in sent(folder, round, peer).items():
            np.testing.assert_allclose(each, deltas[name], rtol=1e-12, atol=1e-13)

    expected = Simulation(ledger, list(paces), KEYS["alpha"]).run(check)
    for name, each in expected.items():
        np.testing.assert_allclose(before[name].numpy(), each, rtol=1e-11, atol=1e-12)
    replayed(folder, paces, before)


def test_a_killed_peer_repeats_its_part_of_the_ledger(tmp_path):
    """b dies at step 13, and starts again from a checkpoint of step 7. Its contributions of the time between count."""
    paces, folder, saved = {"a": 0.02, "b": 0.02}, tmp_path / "run", []
    peers = company(folder, paces)

    def dies(peer: SmallPeer) -> None:
        if peer.completed == 7:
            saved.append(peer.saved())
        if peer.completed == 13:
            raise Killed

    def b() -> None:
        with pytest.raises(Killed):
            peers["b"].run(dies)
        peers["b"] = company(folder, paces)["b"]
        peers["b"].resume(saved[0])
        peers["b"].run()

    together([peers["a"].run, b])
    before = common(peers)
    steps = [each["completed"] for line in lines(folder) for each in line["members"] if each["peer"] == "b"]
    assert steps == sorted(set(steps)) and max(steps) > 13
    replayed(folder, paces, before)


def test_a_peer_that_joins_late_takes_the_common_weights(tmp_path):
    paces, folder = {"a": 0.02, "b": 0.02}, tmp_path / "run"
    peers = company(folder, paces, quorum=1, delay=0)

    def joins() -> None:
        while not (folder / "shared/rounds/00000003.json").exists():
            assert peers["a"].stop_reason is None
        peers["b"].run()

    together([peers["a"].run, joins])
    before = common(peers)
    first = next(each for line in lines(folder) for each in line["members"] if each["peer"] == "b")
    assert first["jumps"][0][0] == 0 and first["jumps"][0][1] >= 4
    replayed(folder, paces, before)


def test_too_few_peers_train_on_and_stop_after_their_patience(tmp_path):
    a = company(tmp_path / "run", {"a": 0.01, "b": 0.01}, timeout=0.05, patience=0.1)["a"]
    a.run()
    assert a.stop_reason is not None and "1 of 2 contributions (peers.quorum) to round 0" in a.stop_reason
    assert 2 <= a.completed < STEPS


def test_the_last_line_is_seen_before_the_end_of_all():
    """A peer without steps sees that all have ended while the last line is there already. It has to apply it."""
    seen: list[bool] = []
    line: Any = SimpleNamespace(round=3)

    def read(_: Any) -> list:
        seen.append(watch.over)
        return []

    rounds: Any = SimpleNamespace(
        last=9, given=None, own=SimpleNamespace(timeout=20.0), announce=lambda round: None,
        finished=lambda name: True, over=lambda: True,
        line=lambda round: line if round == 3 else None, name="a",
    )  # fmt: skip
    watch = Watch(rounds, 3, "x", None, read, [], False)  # type: ignore[arg-type]
    watch.finish()
    watch._look()
    assert seen == [False] and not watch.over and watch.found == (line, [])
    later = Watch(rounds, 4, "x", None, read, [], False)  # type: ignore[arg-type]
    later.finish()
    later._look()
    assert later.over and later.found is None


def test_a_ledger_that_cannot_be_read_for_a_moment_stops_no_peer(tmp_path, monkeypatch):
    """A server that is started again, when a peer returns and when it applies several rounds at once."""
    paces, folder, failures = {"a": 0.02, "b": 0.02}, tmp_path / "run", []
    whole = DecoupledRounds.decided_up_to

    def fails(self: DecoupledRounds, first: int) -> int:
        if self.name == "b" and len(failures) < 3:
            failures.append(first)
            raise OSError("cut off")
        return whole(self, first)

    monkeypatch.setattr(DecoupledRounds, "decided_up_to", fails)
    peers = company(folder, paces, quorum=1)
    together([each.run for each in peers.values()])
    common(peers)
    assert len(failures) == 3


def test_a_peer_that_waits_for_a_silent_one_ends_after_a_timeout_and_says_so(tmp_path):
    a = company(tmp_path / "run", {"a": 0.0, "b": 0.0}, quorum=1, timeout=0.3)["a"]
    a.run()
    assert a.completed == STEPS and a.stop_reason is None
    assert a.part.round == STEPS // 2 or any("the run ends with the common weights of round" in each for each in a.logs)


def test_a_peer_that_is_too_slow_for_all_rounds_has_no_strike(tmp_path):
    """The jumps since its last contribution do not fit into a line."""
    a, b = company(tmp_path / "run", {"a": 0.01, "b": 0.01}, quorum=1, timeout=1.0).values()
    b.part.jumps = [[0, 0]] * (JUMPS + 1)
    together([a.run, b.run])
    found = lines(tmp_path / "run")
    assert all(line["strikes"] == {} and [each["peer"] for each in line["members"]] == ["a"] for line in found)
    assert any("too slow for peers.delay" in each for each in b.logs)


@pytest.mark.parametrize("facts", [(0, 4), (5, 4), (1, 25), (1.0, 4), (True, 4), (None, 4)], ids=str)
def test_steps_that_cannot_be(tmp_path, facts):
    """They are the weights of a merge, so a false one is refused, and a strike."""
    a, b = company(tmp_path / "run", {"a": 0.0, "b": 0.0}).values()
    form: Any = SimpleNamespace(expected=lambda round: {"w": ((4,), torch.float32)}, fits=lambda *_: True)
    ledgers = [DecoupledRounds.of(each.own, tmp_path) for each in (a, b)]
    for each, (steps, completed) in zip(ledgers, ((4, 4), facts)):
        each.total, each.last = STEPS, 12
        each.contribute(0, {"w": torch.ones(4)}, base="x", jumps=[], steps=steps, completed=completed)
        each.announce(0)
    ledgers[1].finished = lambda name: name == "b"  # type: ignore[method-assign]
    line = ledgers[1].decide(0, "x", form)
    assert line is not None and line.names == ["a"] and line.strikes == {"b": 1}
    assert line.absent == {"b": "steps that cannot be"} and ledgers[0].line(0) == line


def test_merges():
    """Of orthogonal differences the mean gets shorter, and the merge of layers does not."""
    one, other = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    mean = merged("embedding.weight", [one, other], [1.0, 3.0])
    torch.testing.assert_close(mean, torch.tensor([0.75, 3.0]))
    radial = merged("layers.0.w", [one, other], [1.0, 3.0])
    torch.testing.assert_close(radial, torch.tensor([1.0, 3.0]) * (0.25 * 3 + 0.75 * 4) / 10**0.5)
    assert torch.equal(merged("layers.0.w", [0 * one, 0 * one], [1.0, 2.0]), 0 * one)
    torch.testing.assert_close(merged("layers.0.w", [one, -one], [1.0, 1.0]), 0 * one)
    nearly = -torch.nextafter(one, 2 * one)  # opposite but for rounding, which must not become a step of full length
    assert merged("layers.0.w", [one, nearly], [1.0, 1.0]).norm() < 1e-6
    for size in (1e-45, 1e-30, 1e38):
        each = merged("layers.0.w", [size * (one / 3), size * (other / -4)], [1e-300, 1.0])
        assert bool(each.isfinite().all()), size
    draw = torch.randn(1001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert norm_of(draw) == pytest.approx(float(draw.norm()), rel=1e-14)
