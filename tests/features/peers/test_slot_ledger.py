"""The ledger of slots without ranks: repeated and poisoned gradients, other weights, files that are deleted."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron.config.problems import UserError
from megatron.features.peers.folder import SharedFolder
from megatron.features.peers.options import PeersSection
from megatron.features.peers.signing import Signer
from megatron.features.peers.slot_hook import SlotHook
from megatron.features.peers.slots import ASKS, SlotLedger, StepLine, TooFew
from megatron.features.peers.sockets import ServedFolder

FORM = {"w": ((4,), torch.float32)}
FACTS = {"base": "x", "weight": 8.0, "loss": 1.0, "hash": 3}


def ledger(folder, name: str, **keys) -> SlotLedger:
    values = {
        "every": 1, "algorithm": "gradients", "name": name, "members": ["a", "b", "c"], "folder": str(folder),
        "slots": 3, "quorum": 2, "timeout": 0.0001, "patience": 100.0, "state_every": 2, **keys,
    }  # fmt: skip
    return SlotLedger(PeersSection(**values), Signer(bytes(range(32)), None), SharedFolder(str(folder)))


def gradient(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), value)}


def decided(each: SlotLedger, round: int = 0, base: str = "x") -> StepLine:
    line = each.step_of(round, base, FORM)
    assert isinstance(line, StepLine)
    return line


def test_a_gradient_that_was_sent_before_a_restart_is_kept(tmp_path):
    """Others may have read it. So a peer that does not repeat its own bits names the first ones."""
    for slot, name in enumerate("abc"):
        ledger(tmp_path, name).offer(0, slot, gradient(1.0), **FACTS)
    again = ledger(tmp_path, "a")
    again.offer(0, 0, gradient(1.0 + 1e-6), **FACTS)
    line = decided(again)
    for name in "abc":
        assert ledger(tmp_path, name).gradients(line, FORM)[1] == []


def test_a_gradient_that_nobody_can_use_is_replaced(tmp_path):
    a = ledger(tmp_path, "a")
    a.folder.write("contributions/00000000/0.a", b"cut o")
    a.offer(0, 0, gradient(1.0), **FACTS)
    assert ledger(tmp_path, "b").gradient(0, 0, "a", FORM) is not None


def test_a_gradient_is_named_by_its_weight_too(tmp_path):
    a, b = ledger(tmp_path, "a"), ledger(tmp_path, "b")
    for slot in range(3):
        a.offer(0, slot, gradient(1.0), **FACTS)
    b.announce(0, base="x")
    line = decided(a)
    with pytest.raises(UserError, match="has other bits"):
        b.offer(0, 0, gradient(1.0), **{**FACTS, "weight": 9.0})
    assert b.gradients(line, FORM)[1] == []
    assert line.slots[0] is not None
    line.slots[0]["weight"] = 9.0
    assert ledger(tmp_path, "c").gradients(line, FORM)[1] == [0]


def test_a_peer_with_other_weights_does_not_count_for_the_quorum(tmp_path):
    a, b = ledger(tmp_path, "a", patience=1e-6), ledger(tmp_path, "b")
    for slot in range(3):
        a.offer(0, slot, gradient(1.0), **FACTS)
    b.announce(0, base="other")
    with pytest.raises(TooFew, match="1 of 2 peers"):
        a.step_of(0, "x", FORM)


@pytest.mark.parametrize("second, used", [(1.0, "b"), (101.0, "a")])
def test_a_large_gradient_needs_a_second_peer(tmp_path, second, used):
    """Of other layouts, whose bits differ. A peer whose gradient no other one computes has a strike."""
    a, b = ledger(tmp_path, "a"), ledger(tmp_path, "b")
    a.offer(0, 0, gradient(100.0), **FACTS)
    for slot in (1, 2):
        b.offer(0, slot, gradient(1.0), **FACTS)
    assert not isinstance(a.step_of(0, "x", FORM), StepLine)
    b.offer(0, 0, gradient(second), **FACTS)
    line = decided(b)
    assert line.slots[0] is not None and line.slots[0]["peer"] == used
    assert line.strikes == ({"a": 1} if used == "b" else {}) and ("norm" in line.absent.get("a", "")) == (used == "b")


def test_the_second_peer_of_a_large_gradient_computes_it_at_once(tmp_path):
    """Large gradients are common in data. All slots are there, so no peer waits for `peers.timeout`."""
    peers = [ledger(tmp_path, name, timeout=90.0) for name in "abc"]
    for slot, (peer, norm) in enumerate(zip(peers, (1.0, 100.0, 1.0), strict=True)):
        peer.announce(0, base="x")
        if slot == 2:
            assert all(each.step_of(0, "x", FORM) is None for each in peers)
        peer.offer(0, slot, gradient(norm), **FACTS)
    asked = [each.step_of(0, "x", FORM) for each in peers]
    assert asked == [None, None, [1]]
    peers[2].offer(0, 1, gradient(100.0), **FACTS)
    line = decided(peers[0])
    assert line.slots[1] is not None and line.slots[1]["peer"] == "b" and not line.absent


def test_an_excluded_peer_writes_no_line(tmp_path):
    a, b = ledger(tmp_path, "a", strikes=1), ledger(tmp_path, "b", strikes=1)
    for slot in range(3):
        b.offer(0, slot, gradient(1.0), **FACTS)
    a.folder.write("contributions/00000000/0.a", b"garbage")
    ledger(tmp_path, "c").announce(0, base="x")
    assert decided(b).strikes == {"a": 1}
    for slot in range(3):
        b.offer(1, slot, gradient(1.0), **FACTS)
    ledger(tmp_path, "c").announce(1, base="x")
    assert a.step_of(1, "x", FORM) is None
    assert decided(b, 1).peer == "b"


def test_files_of_an_earlier_start_are_deleted_and_no_dead_peer_keeps_them(tmp_path):
    a, b = ledger(tmp_path, "a"), ledger(tmp_path, "b")
    b.ask()  # and dies
    for round in range(100):
        a.offer(round, 0, gradient(1.0), **FACTS)
        a.announce(round)
        a.done(round)
        kept = len(a.folder.names("contributions"))
        assert kept <= (ASKS + 1) * 2 + 1
        if round in (5, 50):
            a = ledger(tmp_path, "a")
    assert kept == 2 and len(a.folder.names("announced")) == 2 and not a._open


def test_a_damaged_state_does_not_hide_an_older_one(tmp_path):
    a, b = ledger(tmp_path, "a"), ledger(tmp_path, "b")
    a.send_state(4, gradient(1.0), {"round": 4})
    c = ledger(tmp_path, "c")
    c.folder.write("states/00000006/head.c", c.seal("state", 6, b"[" * 100_000, pieces=[]))
    found = b.take_state(3)
    assert found is not None and found[0] == 4 and found[2] == {"round": 4} and b.sent(5) == 1
    a.send_state(8, gradient(1.0), {})
    assert a.folder.names("states") == ["00000008"]


def test_a_promised_state_waits_for_the_one_on_its_way(tmp_path):
    """All ranks copy their parts of a state, or none. So rank 0 decides, and no promise is lost."""
    hook = object.__new__(SlotHook)
    hook.rounds, hook._promised = ledger(tmp_path, "a"), False
    hook._sending = SimpleNamespace(is_alive=lambda: True)  # type: ignore[assignment]
    line = StepLine(0, [], [], {}, {}, "x", True, "a")
    assert not hook._may_serve(line)
    hook._sending = None
    quiet = dataclasses.replace(line, serve=False)
    assert hook._may_serve(quiet) and not hook._may_serve(quiet)
    assert not hook._may_serve(dataclasses.replace(line, peer="b"))


def test_a_server_that_cannot_take_a_gradient_is_refused(tmp_path):
    a = ledger(tmp_path, "a")
    a.check_size(FORM)
    a.folder = ServedFolder("tcp://127.0.0.1:1", a.signer, "peers", "a")
    with pytest.raises(UserError, match="sockets take at most"):
        a.check_size({"w": ((1 << 31,), torch.float32)})
