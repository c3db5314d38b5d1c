"""Ends, halts and second lives of decoupled peers: each is in the ledger, so that a replay has its bits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.problems import UserError
from megatron.features.peers.decoupled import DecoupledHook
from megatron.features.peers.decoupled_rounds import DecoupledRounds
from megatron.features.peers.folder import SharedFolder
from megatron.features.peers.line import JUMPS
from megatron.features.peers.part import OuterState
from tests.features.peers.small import Killed, SmallPeer, together
from tests.features.peers.test_decoupled import STEPS, common, company, lines, replayed

PACES = {"a": 0.0, "b": 0.0}


def same_as_replayed(folder: Path, peers: dict[str, SmallPeer]) -> None:
    """Each peer of a replay ends with the bits of the same peer of the run."""
    again = company(
        folder.parent / "again", dict.fromkeys(peers, 0.0), replay=str(folder / "shared"), timeout=5.0, patience=10.0
    )
    together([each.run for each in again.values()])
    for name, peer in peers.items():
        assert again[name].stop_reason is None, again[name].stop_reason
        assert again[name].part.round == peer.part.round, name
        assert all(torch.equal(again[name].weights[key], peer.weights[key]) for key in peer.weights), name


def wait(until: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not until():
        assert time.monotonic() < end
        time.sleep(0.005)


def mute(peer: SmallPeer) -> None:
    peer.part.jumps = [[0, 0]] * (JUMPS + 1)


def spoil(peer: SmallPeer) -> None:
    peer.weights["layers.0.w"].fill_(float("nan"))


@pytest.mark.parametrize("fault", [mute, spoil])
def test_a_peer_that_cannot_contribute_ends_all_the_same(tmp_path, fault):
    """It has sent nothing, so it has no line to wait for."""
    a = company(tmp_path / "run", PACES, quorum=1, timeout=0.3, patience=3.0)["a"]
    a.run(lambda peer: fault(peer) if peer.completed == 1 else None)
    assert a.completed == STEPS and a.stop_reason is None
    assert any("no contribution, since" in each for each in a.logs)


def test_an_excluded_peer_ends_although_no_other_one_is_left(tmp_path, monkeypatch):
    """No line has its contributions, so it has none to wait for."""
    folder, fits = tmp_path / "run", OuterState.fits
    peers = company(folder, {"a": 0.03, "b": 0.0}, quorum=1, strikes=1, timeout=1.0, patience=3.0)

    def strange(self: OuterState, tensors: Any, round: int) -> bool:
        return fits(self, tensors, round) and not any(bool((each == 7.0).all()) for each in tensors.values())

    monkeypatch.setattr(OuterState, "fits", strange)
    made = peers["b"].part.contribution

    def bad(round: int, local: Any) -> dict[str, torch.Tensor]:
        return {name: torch.full_like(each, 7.0) for name, each in made(round, local).items()}

    monkeypatch.setattr(peers["b"].part, "contribution", bad)

    def dies(peer: SmallPeer) -> None:
        if peer.part.round == 1:
            raise Killed

    def run_a() -> None:
        with pytest.raises(Killed):
            peers["a"].run(dies)

    together([run_a, peers["b"].run])
    assert lines(folder)[-1]["strikes"] == {"b": 1}
    assert peers["b"].stop_reason is None and peers["b"].completed == STEPS


def test_a_peer_whose_contribution_is_refused_ends_although_no_other_one_is_left(tmp_path, monkeypatch):
    """It is not excluded, since no line has its strike."""
    monkeypatch.setattr(OuterState, "fits", lambda self, tensors, round: round < 2)
    a = company(tmp_path / "run", PACES, quorum=1, timeout=0.5, patience=3.0)["a"]
    a.run()
    assert a.completed == STEPS and a.stop_reason is None
    assert a.part.round == len(lines(tmp_path / "run")) == 2


def test_a_peer_that_has_announced_its_end_sends_nothing_more(tmp_path, monkeypatch):
    """The others may have ended by then. Here a could send one after b's last round."""
    folder, contribute, ends = tmp_path / "run", DecoupledRounds.contribute, threading.Event()
    keys = {"quorum": 1, "timeout": 0.5, "patience": 10.0}
    a, b = company(folder, PACES, **keys).values()
    b.completed, b.part.received, b.part.sent = STEPS - 2, [STEPS - 2] * 2, STEPS - 2
    finished = folder / f"shared/announced/{STEPS // 2:08d}/a"
    late: list[int] = []

    def slow(self: DecoupledRounds, round: int, *rest: Any, **facts: Any) -> bool:
        if self.name == "a" and finished.exists():
            late.append(round)
            ends.wait(20)
        return contribute(self, round, *rest, **facts)

    monkeypatch.setattr(DecoupledRounds, "contribute", slow)

    def run_b() -> None:
        b.run(lambda peer: wait(finished.exists) if peer.completed == STEPS - 1 else None)
        ends.set()

    together([lambda: a.run(lambda peer: spoil(peer) if peer.completed == 1 else None), run_b])
    assert a.stop_reason is b.stop_reason is None and not late
    assert a.part.round == b.part.round == len(lines(folder))


def test_an_end_whose_announcement_has_no_reply_is_an_end(tmp_path, monkeypatch):
    """Its message has arrived, so the next starts and a replay end there, although b makes this round meanwhile."""
    folder, write, cut = tmp_path / "run", SharedFolder.write, []
    a, b = company(folder, {"a": 0.0, "b": 0.05}, timeout=0.4, patience=30.0).values()
    finished = f"announced/{STEPS // 2:08d}/a"

    def fails(self: SharedFolder, name: str, content: bytes) -> None:
        write(self, name, content)
        if name == finished and b'"end"' in content and not cut:
            cut.append(a.part.round)
            wait(lambda: (folder / f"shared/rounds/{cut[0]:08d}.json").exists())
            raise OSError("cut off")

    monkeypatch.setattr(SharedFolder, "write", fails)
    path = folder / "shared" / finished
    together([a.run, lambda: b.run(lambda peer: wait(lambda: cut) if path.exists() else None)])
    assert a.stop_reason is b.stop_reason is None and cut == [a.part.round]
    same_as_replayed(folder, {"a": a, "b": b})


def test_a_peer_that_ends_early_also_does_so_in_the_replay(tmp_path):
    """b is halted for longer than the timeout, while a waits for the last rounds. Then b makes them."""
    folder, ended = tmp_path / "run", threading.Event()
    a, b = company(folder, {"a": 0.0, "b": 0.05}, timeout=0.4).values()

    def run_a() -> None:
        a.run()
        ended.set()

    finished = folder / f"shared/announced/{STEPS // 2:08d}/a"
    together([run_a, lambda: b.run(lambda peer: ended.wait(60) if finished.exists() else None)])
    assert a.stop_reason is b.stop_reason is None
    assert any("the run ends with the common weights of round" in each for each in a.logs)
    assert a.part.round < b.part.round == len(lines(folder))
    same_as_replayed(folder, {"a": a, "b": b})


def test_an_early_end_holds_after_a_restart(tmp_path):
    """a is killed after its end is in the ledger, and before its last checkpoint."""
    folder, ended, saved = tmp_path / "run", threading.Event(), []
    a, b = company(folder, {"a": 0.0, "b": 0.05}, timeout=0.4).values()

    def keep(peer: SmallPeer) -> None:
        if peer.completed == 5:
            saved.append(peer.saved())

    def run_a() -> None:
        a.run(keep)
        ended.set()

    finished = folder / f"shared/announced/{STEPS // 2:08d}/a"
    together([run_a, lambda: b.run(lambda peer: ended.wait(60) if finished.exists() else None)])
    again = company(folder, PACES, timeout=0.4)["a"]
    again.resume(saved[0])
    again.run()
    assert a.part.round == again.part.round < b.part.round
    assert all(torch.equal(a.weights[name], again.weights[name]) for name in a.weights)


def test_a_peer_that_was_halted_looks_again_before_it_ends(tmp_path, monkeypatch):
    """a is halted at its end, for longer than the timeout. Meanwhile b makes the last rounds."""
    folder, line = tmp_path / "run", DecoupledRounds.line
    a, b = company(folder, {"a": 0.0, "b": 0.05}, timeout=0.4, patience=30.0).values()
    over = threading.Event()

    def halted(self: DecoupledRounds, round: int) -> Any:
        if self.name == "a" and self.finished("a"):
            over.wait(60)
        return line(self, round)

    def run_b() -> None:
        b.run(lambda peer: wait(lambda: a.completed == STEPS) if peer.completed == 4 else None)
        over.set()

    monkeypatch.setattr(DecoupledRounds, "line", halted)
    together([a.run, run_b])
    assert not any("the run ends with the common weights of round" in each for each in a.logs)
    common({"a": a, "b": b})


def test_a_peer_that_had_no_steps_left_sends_nothing_in_its_next_life(tmp_path, monkeypatch):
    """The others may have ended since it announced its end. Here its only contribution is decided after its steps."""
    folder, contribute = tmp_path / "run", DecoupledRounds.contribute
    keys = {"quorum": 1, "fragments": 1, "delay": 1}
    first, saved = company(folder, {"a": 0.0}, **keys)["a"], []

    def slow(self: DecoupledRounds, round: int, *rest: Any, **facts: Any) -> bool:
        wait(lambda: first.completed == STEPS)
        return contribute(self, round, *rest, **facts)

    monkeypatch.setattr(DecoupledRounds, "contribute", slow)
    first.run(lambda peer: saved.append(peer.saved()) if peer.completed == 3 else None)
    assert first.part.round == len(lines(folder)) == 1
    again = company(folder, {"a": 0.01}, **keys)["a"]
    again.resume(saved[0])
    again.run()
    assert len(lines(folder)) == again.part.round == 1
    assert all(torch.equal(first.weights[name], again.weights[name]) for name in first.weights)


def test_a_round_that_is_applied_at_the_step_of_its_contribution(tmp_path, monkeypatch):
    """b dies after it has contributed, and starts again at this step when the line is there."""
    folder, started = tmp_path / "run", DecoupledHook._start_watch
    peers, at = company(folder, {"a": 0.01, "b": 0.01}), []

    def dies(peer: SmallPeer) -> None:
        if peer.part.sent == peer.completed and peer.part.round >= 1:
            at.append(peer.saved())
            sent = folder / f"shared/contributions/{peer.part.round:08d}/b"
            wait(sent.exists)  # the watch writes it. Without it no line comes
            raise Killed

    def patient(self: DecoupledHook, trainer: Any) -> None:
        started(self, trainer)
        if self.own.name == "b" and len(at) == 1 and self._flight and self._watch is not None:
            at.append({})
            wait(lambda: self._watch is not None and self._watch.found is not None)

    def b() -> None:
        with pytest.raises(Killed):
            peers["b"].run(dies)
        monkeypatch.setattr(DecoupledHook, "_start_watch", patient)
        wait(lambda: (folder / f"shared/rounds/{at[0]['part']['round']:08d}.json").exists())
        peers["b"] = company(folder, {"a": 0.01, "b": 0.01})["b"]
        peers["b"].resume(at[0])
        peers["b"].run()

    together([peers["a"].run, b])
    step, round = at[0]["completed"], at[0]["part"]["round"]
    of_b = [each for line in lines(folder) for each in line["members"] if each["peer"] == "b"]
    assert [step, round + 1] in next(each["jumps"] for each in of_b if each["completed"] > step)
    common(peers)
    monkeypatch.setattr(DecoupledHook, "_start_watch", started)
    same_as_replayed(folder, peers)


def test_a_contribution_of_an_earlier_life_that_arrives_late_is_repeated(tmp_path):
    """As of a server that was halted with it. The life that does not know it stops, and the next one repeats it."""
    folder = tmp_path / "run"
    paces = {"a": 0.01, "b": 0.01}
    peers = company(folder, paces)

    def arrives(peer: SmallPeer) -> None:
        if peer.completed == 1:
            part, earlier = peer.part, DecoupledRounds.of(peer.own, tmp_path)
            tensors = part.contribution(0, part.gathered(part.names(0)))
            earlier.contribute(0, tensors, base=part.base(0), jumps=[], completed=1, steps=1)

    def b() -> None:
        with pytest.raises(UserError, match="a contribution of b after 1 steps that this process has not made"):
            peers["b"].run(arrives)
        peers["b"] = company(folder, paces)["b"]
        peers["b"].run()

    together([peers["a"].run, b])
    assert next(each for each in lines(folder)[0]["members"] if each["peer"] == "b")["completed"] == 1
    common(peers)
    replayed(folder, paces, common(peers))
