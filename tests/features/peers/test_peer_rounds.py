"""Rounds in a shared folder without a model: hostile contributions, lateness, quorums, one line from many writers."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config.problems import UserError
from megatron.features.peers.folder import SharedFolder
from megatron.features.peers.messages import Refused, seal, unseal
from megatron.features.peers.options import PeersSection
from megatron.features.peers.rounds import Rounds, TooFew, folder_of
from megatron.features.peers.signing import Signer
from tests.features.peers.companies import serving

KEY = secrets.token_bytes(32)
BASE = "0" * 64
FORM: Any = SimpleNamespace(
    expected=lambda round: {"w": ((4,), torch.float32)}, fits=lambda tensors, round: True
)  # the tensors of a contribution
LATER = 1e9


def peer(url: str, name: str, key: bytes = KEY, **options: Any) -> Rounds:
    own = PeersSection(every=2, name=name, folder=url, **{"members": ["a", "b", "c"], "quorum": 2, **options})
    signer = Signer(key, None)
    return Rounds(own, signer, folder_of(own, signer, url))


@pytest.fixture(params=["local", "store", "sockets"])
def url(request, tmp_path):
    if request.param == "sockets":
        with serving(tmp_path / "served", "peers", "abc", KEY) as found:
            yield found
    else:
        yield str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def offer(rounds: Rounds, round: int = 0, value: float = 1.0, **facts: Any) -> bool:
    return rounds.contribute(round, {"w": torch.full((4,), value)}, **{"base": BASE, "jumps": [], **facts})


def test_a_contribution_is_read_once(tmp_path):
    """To check and to apply it. Another one than the line names is refused."""
    a, b = (peer(str(tmp_path), name, members=["a", "b"]) for name in "ab")
    offer(a), offer(b, value=2.0)
    line = a.decide(0, BASE, FORM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rounds, "contribution", lambda *words, **bound: pytest.fail("read again"))
        values = [float(each["w"][0]) for each in a.named(line, FORM)]
    assert values == [1.0, 2.0] and not a._waiting[0].tensors
    assert [float(each["w"][0]) for each in b.named(line, FORM)] == values  # which has not decided, and reads
    os.remove(tmp_path / "contributions/00000000/b")
    offer(b, value=3.0)
    with pytest.raises(Refused, match="another contribution of b than the line names"):
        b.named(line, FORM)


def test_the_first_line_stands_and_all_read_it(url):
    a, b, c = (peer(url, name) for name in "abc")
    assert all(offer(each) for each in (b, a)) and a.decide(0, BASE, FORM) is None
    assert offer(a) and not offer(a, value=2.0)  # the same bits again, and others
    first = b.decide(0, BASE, FORM, now=time.monotonic() + LATER / 1e6)
    assert first is not None and first.names == ["a", "b"] and first.absent == {"c": "silent"}
    offer(c)
    assert c.decide(0, BASE, FORM) == a.decide(0, BASE, FORM) == first  # c is late: the line does not change
    a.announce(1), b.announce(1), c.announce(1)
    offer(a, 1), offer(b, 1)
    assert a.decide(1, BASE, FORM) is None  # c has announced itself again
    offer(c, 1)
    assert c.decide(1, BASE, FORM).names == ["a", "b", "c"]  # type: ignore[union-attr]


def test_hostile_contributions_are_refused_scored_and_excluded(url):
    a, b, c = (peer(url, name, strikes=2) for name in "abc")
    good = a.seal("contribution", 0, b"x", base=BASE, jumps=[])

    def found(content: bytes, round: int) -> str:
        offer(a, round), offer(b, round)
        c.folder.create(f"contributions/{round:08d}/c", content)
        line = a.decide(round, BASE, FORM)
        assert line is not None and line.names == ["a", "b"], line
        return line.absent.get("c", "")

    assert found(b"\x00" * 100, 0).startswith("damaged")
    assert peer(url, "b").line(0).strikes == {"c": 1}  # type: ignore[union-attr]
    assert found(good, 1).startswith("another ") and a.line(1).strikes == {"c": 2}  # type: ignore[union-attr]
    offer(a, 2), offer(b, 2), offer(c, 2)
    line = b.decide(2, BASE, FORM)
    assert line is not None and line.names == ["a", "b"] and line.strikes == {"c": 2}  # not even read


@pytest.mark.parametrize(
    "content, reason",
    [
        (lambda c: c.seal("contribution", 1, base=BASE, jumps=[]), "another round"),
        (lambda c: c.seal("announced", 0), "another kind"),
        (lambda c: peer(c.own.folder, "c", run="other").seal("contribution", 0), "another run"),
        (lambda c: peer(c.own.folder, "b").seal("contribution", 0), "another peer"),
        (lambda c: peer(c.own.folder, "c", bytes(32)).seal("contribution", 0), "not signed"),
        (lambda c: c.seal("contribution", 0, base="1" * 64, jumps=[]), "another base"),
        (lambda c: c.seal("contribution", 0, b"pickle", base=BASE, jumps=[]), "damaged"),
        (lambda c: c.seal("contribution", 0, base=BASE, jumps=[]) + b"more", "damaged: its hash"),
        (lambda c: b"[" * 100_000 + b"\n", "damaged"),
        (lambda c: b'{"signed": NaN}\n', "damaged"),
        (lambda c: b"x" * (3 << 20), "bytes, more than"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_each_reason(tmp_path, content, reason):
    a, b, c = (peer(str(tmp_path), name) for name in "abc")
    offer(a), offer(b)
    c.folder.create("contributions/00000000/c", content(c))
    line = a.decide(0, BASE, FORM)
    assert line is not None and reason in line.absent["c"] and line.strikes == {"c": 1}


def test_files_without_an_end_are_no_contributions(tmp_path):
    a, b, c = (peer(str(tmp_path), name) for name in "abc")
    for round, make in enumerate((lambda path: path.symlink_to("/dev/zero"), os.mkfifo, os.mkdir)):
        offer(a, round), offer(b, round)
        make(tmp_path / f"contributions/{round:08d}/c")
        line = a.decide(round, BASE, FORM)
        assert line is not None and line.names == ["a", "b"] and "is no plain file" in line.absent["c"]


def test_an_announcement_of_another_name_is_ignored(url):
    a, b = (peer(url, name) for name in "ab")
    offer(a), offer(b)
    a.decide(0, BASE, FORM, now=time.monotonic() + 1000)
    offer(a, 1), offer(b, 1)
    with contextlib.suppress(OSError):  # a server refuses it already
        a.folder.write("announced/00000001/c", a.seal("announced", 1))
    line = a.decide(1, BASE, FORM)
    assert line is not None and line.absent == {}


def test_control_characters_of_others_are_not_shown(tmp_path):
    a, b, c = (peer(str(tmp_path), name) for name in "abc")
    offer(a), offer(b), offer(c, base="\x1b[2J\n")
    line = a.decide(0, BASE, FORM)
    assert line is not None and line.absent["c"].startswith("another base") and line.absent["c"].isprintable()


def test_jumps_of_a_contribution_fit_in_a_line(tmp_path):
    a, b, c = (peer(str(tmp_path), name) for name in "abc")
    offer(a), offer(b), offer(c, jumps=[[1, 1]] * 1001)
    line = a.decide(0, BASE, FORM)
    assert line is not None and line.absent == {"c": "jumps that cannot be"}


def test_a_replay_has_the_strikes_of_its_ledger(tmp_path):
    a, b, c = (peer(str(tmp_path / "first"), name, strikes=2) for name in "abc")
    for round in range(3):
        for each in (a, b, c):
            offer(each, round, value=1e6 if each is c and round < 1 else 1.0)
        assert a.decide(round, BASE, FORM) is not None
    again = peer(str(tmp_path / "again"), "a", strikes=2)
    again.given = a
    for round in range(3):
        for each in "abc":
            offer(peer(str(tmp_path / "again"), each), round, value=1e6 if each == "c" and round < 1 else 1.0)
        line, first = again.decide(round, BASE, FORM), a.line(round)
        assert line is not None and first is not None and line.strikes == first.strikes == {"c": 1}


def test_a_folder_that_creates_a_file_twice_is_refused(tmp_path, monkeypatch):
    a = peer(str(tmp_path), "a")
    monkeypatch.setattr(SharedFolder, "create", lambda self, name, content: self.write(name, content) or True)
    with pytest.raises(UserError, match="must refuse to create a file twice"):
        a.join({})
    assert a.folder.names("probes") == []


@pytest.mark.parametrize(
    "facts",
    [{"absent": {"c": "\n"}}, {"absent": {"z": "late"}}, {"strikes": 3}, {"strikes": {"a": "x"}}, {"base": None}],
    ids=str,
)
def test_lines_of_other_forms(tmp_path, facts):
    a = peer(str(tmp_path), "a")
    members = [{"peer": name, "sha256": BASE, "jumps": []} for name in "ab"]
    line = {"members": members, "absent": {}, "strikes": {}, "base": BASE, **facts}
    a.folder.create("rounds/00000000.json", peer(str(tmp_path), "b").seal("line", 0, **line))
    with pytest.raises(UserError, match="must be a line of this run's ledger"):
        a.line(0)


@pytest.mark.parametrize("value, reason", [(float("nan"), "not finite"), (1e4, "norm 2e+04 above 20")])
def test_poison(tmp_path, value, reason):
    a, b, c = (peer(str(tmp_path), name) for name in "abc")
    offer(a), offer(b), offer(c, value=value)
    line = b.decide(0, BASE, FORM)
    assert line is not None and line.names == ["a", "b"] and reason in line.absent["c"]


def test_other_tensors(tmp_path):
    a, b, c = (peer(str(tmp_path), name) for name in "abc")
    offer(a), offer(b)
    c.contribute(0, {"w": torch.ones(5)}, base=BASE, jumps=[])
    assert a.decide(0, BASE, FORM).absent == {"c": "tensors of other names, shapes or types"}  # type: ignore[union-attr]


def test_too_few_wait_and_stop(tmp_path):
    a = peer(str(tmp_path), "a", timeout=1.0, patience=10.0)
    offer(a)
    now = time.monotonic()
    assert a.decide(0, BASE, FORM, now + 5) is None
    with pytest.raises(TooFew, match=r"1 of 2 contributions \(peers.quorum\)"):
        a.decide(0, BASE, FORM, now + 11)


def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
    """Only the clock that never jumps is read, and only for timeouts."""
    a = peer(str(tmp_path), "a", timeout=1.0, patience=10.0)
    offer(a), offer(peer(str(tmp_path), "b"))
    monkeypatch.setattr(time, "time", iter([1e9, 0.0, 2e9]).__next__)
    now = time.monotonic()
    assert a.decide(0, BASE, FORM, now) is None
    monkeypatch.setattr(time, "time", lambda: 1e18)
    assert a.decide(0, BASE, FORM, now) is None and a.decide(0, BASE, FORM, now + 2) is not None


def test_a_second_process_with_the_name_of_a_peer_ends_the_first(url):
    """It would read the same share of the data. A peer that is started again is the newer one."""
    first, other = peer(url, "a"), peer(url, "b")
    first.join({}), other.join({})
    first.announce(0)
    again = peer(url, "a")
    again.join({})
    again.announce(0), other.announce(0)
    with pytest.raises(UserError, match="peers.name = a must be the name of one process"):
        first.announce(1)


def test_a_false_line_ends_the_run_with_its_name(tmp_path):
    a = peer(str(tmp_path), "a")
    line = {"members": [], "absent": {}, "strikes": {}, "base": BASE}
    a.folder.create("rounds/00000000.json", peer(str(tmp_path), "b").seal("line", 0, **line))
    with pytest.raises(UserError, match=r"rounds/00000000.json must be a line .* members that cannot be"):
        a.decide(0, BASE, FORM)


def test_peers_of_another_run_are_refused(url):
    identity = {"model.hidden_size": 16, "training.seed": 1, "version": "1"}
    peer(url, "a").join(identity)
    peer(url, "b").join(identity)
    with pytest.raises(UserError, match="(?s)model.hidden_size: 32 here, 16 there.*version: '2' here, '1' there"):
        peer(url, "b").join({**identity, "model.hidden_size": 32, "version": "2"})
    refused = "signed by a member .not signed by this peer.|the connection has ended"  # by a server already
    with pytest.raises((UserError, OSError), match=refused):
        peer(url, "b", secrets.token_bytes(32)).join(identity)


def test_states_come_back_and_old_files_go(url):
    a = peer(url, "a", state_every=1)
    form = {"w.outer_weights": ((4,), torch.float32)}
    for round in range(4):
        offer(a, round)
        a.publish(round, {"w.outer_weights": torch.full((4,), float(round))})
    a.folder.write("states/99999999", b"junk")
    a.clean(3)
    assert a.folder.names("states") == ["00000002", "00000003", "99999999"]
    assert a.folder.names("contributions/00000001") == [] and a.folder.names("contributions/00000002") == ["a"]
    found = a.newest_state(3, form)
    assert found is not None and found[0] == 2 and float(found[1]["w.outer_weights"][0]) == 2.0
    assert a.newest_state(2, form) is None


def test_no_bit_of_a_message_can_change():
    signer = Signer(KEY, None)
    message = seal(signer, {"kind": "line", "peer": "a", "round": 1}, b"payload")
    assert unseal(signer, message, kind="line", round=1)[1] == b"payload"
    for place in range(len(message)):
        bad = bytearray(message)
        bad[place] ^= 1
        with pytest.raises(Refused):
            unseal(signer, bytes(bad), kind="line", round=1, peer="a")


def test_ed25519():
    pytest.importorskip("nacl", reason="PyNaCl (requirements/peers.txt) is not installed")
    from megatron.features.peers.signing import ed25519_public

    # RFC 8032, section 7.1, test 1
    secret = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert ed25519_public(secret) == public
    signer = Signer(secret, {"a": public})
    signature = signer.sign("a", b"text")
    assert signer.good("a", b"text", signature) and not signer.good("a", b"texts", signature)
    assert not signer.good("b", b"text", signature) and not signer.good("a", b"text", "00")
    assert json.loads(json.dumps(signature)) == signature


def test_a_process_that_is_refused_does_not_end_the_one_with_its_name(tmp_path):
    first, other = peer(str(tmp_path), "a"), peer(str(tmp_path), "a")
    first.join({"seed": 1})
    with pytest.raises(UserError, match="seed: 2 here, 1 there"):
        other.join({"seed": 2})
    first.announce(0)
    other.join({"seed": 1})
    with pytest.raises(UserError, match="must be the name of one process"):
        first.announce(1)
