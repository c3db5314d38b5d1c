"""Contributions from peer to peer: the folder has small notes, and files come from any peer that has read them."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import shutil
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config.problems import UserError
from megatron.features.peers.direct import DirectFolder, OwnFiles
from megatron.features.peers.folder import SharedFolder, Unreadable
from megatron.features.peers.messages import Refused, seal
from megatron.features.peers.options import SERVER, PeersSection
from megatron.features.peers.rounds import Rounds
from megatron.features.peers.signing import Signer
from megatron.features.peers.sockets import NONCE, FolderServer, ServedFolder, receive, send
from tests.features.peers.companies import free, secret, serving
from tests.features.peers.small import SmallPeer, together
from tests.features.peers.test_sockets import frames

KEY = secrets.token_bytes(32)
NAME = "contributions/00000000/a"


class Company:
    """Folders of three peers that have joined."""

    def __init__(self, tmp_path: Path, url: str) -> None:
        self.files, self.folders = dict[str, OwnFiles](), dict[str, DirectFolder]()
        signer = Signer(KEY, None)
        for name in "abc":
            values: Any = {"every": 2, "name": name, "members": ["a", "b", "c"], "folder": url, "listen": free()}
            own = PeersSection(**values)
            self.files[name] = OwnFiles(own, signer, tmp_path / name)
            rounds = Rounds(own, signer, DirectFolder(SharedFolder(url), own, signer, self.files[name]))
            rounds.join({})
            self.folders[name] = rounds.folder  # type: ignore[assignment]

    def close(self) -> None:
        for each in self.files.values():
            each.close()


@pytest.fixture
def company(tmp_path):
    made = Company(tmp_path, str(tmp_path / "shared"))
    yield made
    made.close()


def test_a_file_comes_from_its_author_and_then_from_a_reader(company, tmp_path):
    a, b, c = company.folders.values()
    content = secrets.token_bytes(3 << 20)
    assert a.create(NAME, content) and a.create(NAME, content) and not a.create(NAME, b"other")
    assert (tmp_path / "shared" / NAME).stat().st_size < 200 and c.names("contributions/00000000") == ["a"]
    assert b.read_up_to(NAME, len(content)) == content and b.read_up_to("contributions/00000000/b", 9) is None
    with pytest.raises(Unreadable, match="more than 9"):
        c.read_up_to(NAME, 9)
    company.files.pop("a").close()
    assert c.read_up_to(NAME, len(content)) == content  # of b
    a.delete(NAME), b.delete("contributions/00000000/b")
    assert not (tmp_path / "b/contributions/00000000").exists()


def test_another_content_than_the_noted_one_is_not_taken(company, tmp_path):
    a, b, _ = company.folders.values()
    a.create(NAME, b"right")
    (tmp_path / "a" / NAME).write_bytes(b"wrong")
    with pytest.raises(OSError, match="cannot be read from a peer"):
        b.read_up_to(NAME, 100)
    (tmp_path / "a" / NAME).write_bytes(b"right")
    assert b.read_up_to(NAME, 100) == b"right"


@pytest.mark.parametrize(
    "note", [b"", b"[" * 5000, b"[]", b'{"sha256": 1, "bytes": 2}', b'{"sha256": "a", "bytes": -1}']
)
def test_notes_that_are_none(company, tmp_path, note):
    (tmp_path / "shared" / NAME).parent.mkdir(parents=True)
    (tmp_path / "shared" / NAME).write_bytes(note)
    with pytest.raises(Unreadable):
        company.folders["b"].read_up_to(NAME, 100)


def test_no_member_changes_files_of_another(company, tmp_path):
    a, b, _ = company.folders.values()
    a.create(NAME, b"right")
    b.read_up_to(NAME, 100)
    line = b._peers["a"][1]
    for change in (lambda: line.write(NAME, b"x"), lambda: line.delete(NAME), lambda: line.create("states/1", b"x")):
        with pytest.raises(OSError, match="refused by the server"):
            change()
    with pytest.raises(OSError):
        line.read("../shared/run.json")
    assert (tmp_path / "a" / NAME).read_bytes() == b"right" and not (tmp_path / "a/states").exists()


def test_garbage_never_stops_a_peer(company):
    a, b, _ = company.folders.values()
    draw, address = random.Random(7), company.files["a"]._server.server_address
    for number in range(100):
        with contextlib.suppress(OSError), socket.create_connection(address, 5) as stranger:
            stranger.sendall(frames(draw, stranger.recv(NONCE)))
        if number % 20 == 0:
            name = f"contributions/{number:08d}/a"
            assert a.create(name, b"good") and b.read_up_to(name, 9) == b"good"


@pytest.mark.parametrize("address", ["a..b:7000", "[:7000", "h:99999", "h:0", "\n:1", 7, None], ids=str)
def test_an_address_that_is_none_is_as_a_silent_peer(company, address):
    """An unknown error would keep the others from deciding any round."""
    a, b, c = company.folders.values()
    a.create(NAME, b"right")
    life = Rounds(a._own, Signer(KEY, None), a).seal("life", 0, life="x", address=address)
    a._base.write("lives/a", life)
    with pytest.raises(OSError, match="cannot be read from a peer"):
        b.read_up_to(NAME, 100)


class Hostile(threading.Thread):
    """A member that answers requests as it likes.

    Args:
        reply: called with a connection and the facts of its second request.
    """

    def __init__(self, reply: Callable[[socket.socket, dict[str, Any]], None]) -> None:
        super().__init__(daemon=True)
        self.reply, self.server, self.signer = reply, socket.create_server(("127.0.0.1", 0)), Signer(KEY, None)
        self.url = f"tcp://127.0.0.1:{self.server.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, nonce = self.server.accept()[0], secrets.token_bytes(NONCE)
                with line, contextlib.suppress(OSError, Refused):
                    line.sendall(nonce)
                    for number in range(2):
                        facts, _ = receive(line, self.signer, 100, 5.0, kind="request", nonce=nonce.hex())
                        if number == 0:
                            send(line, self.signer, b"", **self.bound(facts))
                    self.reply(line, facts)

    def bound(self, facts: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "reply", "peer": "a", **{key: facts[key] for key in ("run", "nonce", "number", "word")}}


def test_a_reply_larger_than_the_limit_is_not_read():
    made = Hostile(lambda line, facts: send(line, made.signer, bytes(1 << 20), found=True, **made.bound(facts)))
    with pytest.raises(OSError, match="a payload of 1048576 bytes"):
        ServedFolder(made.url, made.signer, "peers", "b", "a").read_up_to(NAME, 1000)
    made.server.close()


def test_a_reply_that_drips_ends_after_a_timeout():
    def drip(line: socket.socket, facts: dict[str, Any]) -> None:
        message = seal(made.signer, {**made.bound(facts), "found": True}, bytes(100))
        line.sendall(struct.pack(">I", len(message) - 101) + message[:-100])
        for _ in range(100):
            time.sleep(0.1)
            line.sendall(b"\0")

    made, begin = Hostile(drip), time.monotonic()
    with pytest.raises(OSError):
        ServedFolder(made.url, made.signer, "peers", "b", "a", 0.3).read_up_to(NAME, 1000)
    assert time.monotonic() - begin < 3
    made.server.close()


@pytest.mark.parametrize("backlog", [0, 8])
def test_a_lost_host_costs_one_timeout(backlog):
    """Its packets are lost, before or after the connection is made."""
    with socket.socket() as lost, contextlib.ExitStack() as stack:
        lost.bind(("127.0.0.1", 0))
        lost.listen(backlog)
        while backlog == 0 and _reached(lost.getsockname(), stack):
            pass
        url, begin = f"tcp://127.0.0.1:{lost.getsockname()[1]}", time.monotonic()
        with pytest.raises(OSError, match="timed out"):
            ServedFolder(url, Signer(KEY, None), "peers", "b", "a", 0.3).read_up_to(NAME, 1000)
        assert 0.2 < time.monotonic() - begin < 5


def _reached(address: tuple[str, int], stack: contextlib.ExitStack) -> bool:
    try:
        stack.enter_context(socket.create_connection(address, 0.2))
    except TimeoutError:
        return False
    return True


def test_a_lost_disk_in_an_open_round(company, tmp_path):
    """A contribution that no other peer has read is late. One that a line names is there again after a restart."""
    form: Any = SimpleNamespace(expected=lambda round: {"w": ((4,), torch.float32)}, fits=lambda *_: True)
    a, b, c = (Rounds(each._own, Signer(KEY, None), each) for each in company.folders.values())
    for each in (a, b):
        for round in range(3):
            each.contribute(round, {"w": torch.ones(4)}, base="x", jumps=[])
    later = time.monotonic() + 601.0
    b.contribution(1, "a", form)
    written = a.decide(2, "x", form, later)
    shutil.rmtree(tmp_path / "a/contributions")
    assert b.decide(0, "x", form) is None  # it may still come
    line = b.decide(0, "x", form, later)
    assert line is not None and line.names == ["b"] and line.absent == {"a": "silent", "c": "silent"}
    assert line.strikes == {}
    line = c.decide(1, "x", form, later)  # b has read it
    assert line is not None and line.names == ["a", "b"]
    assert written is not None and written.names == ["a", "b"]
    with pytest.raises(OSError, match="cannot be read from a peer"):
        b.named(written, form)
    again = Rounds(company.folders["a"]._own, Signer(KEY, None), company.folders["a"])
    assert again.contribute(2, {"w": torch.ones(4)}, base="x", jumps=[])
    b.folder._rest.clear()  # type: ignore[attr-defined]
    assert len(b.named(written, form)) == 2


def test_members_read_contributions_and_states_only(company, tmp_path):
    """The folder is in the run's directory, where a key may be too."""
    a, b, _ = company.folders.values()
    a.create(NAME, b"right")
    b.read_up_to(NAME, 100)
    (tmp_path / "a/key").write_bytes(b"secret")
    for name in ("key", "lease"):
        with pytest.raises(OSError, match="refused by the server"):
            b._peers["a"][1].read_up_to(name, 100)


def test_old_files_do_not_fill_the_disk_of_a_peer(company, tmp_path):
    """The first peer that cleans deletes the notes. The others delete their files too, also files that they read."""
    form: Any = SimpleNamespace(expected=lambda round: {"w": ((4,), torch.float32)}, fits=lambda *_: True)
    peers = [Rounds(each._own, Signer(KEY, None), each) for each in company.folders.values()]
    a, b, c = peers
    for round in range(60):
        for each in (a, b):
            each.contribute(round, {"w": torch.ones(4)}, base="x", jumps=[])
        for each in peers:
            each.contribution(round, "a", form), each.contribution(round, "b", form)
        if (round + 1) % 10 == 0:
            a.publish(round, {"w": torch.ones(4)})
            assert c.newest_state(round + 1, form.expected(0)) is not None
            for each in (b, c, a):
                each.clean(round)
    for name in "abc":
        assert len([*(tmp_path / name).glob("states/*")]) <= 2, name
        assert len([*(tmp_path / name).glob("contributions/*")]) <= 30, name


def test_an_address_that_is_taken(company, tmp_path):
    taken = company.folders["a"]._own
    with pytest.raises(UserError, match="peers.listen = .* must be a free port"):
        OwnFiles(taken, Signer(KEY, None), tmp_path / "other")


@pytest.mark.parametrize(
    "algorithm, direct", [("diloco", True), ("decoupled", True), ("diloco", False), ("sparseloco", False)]
)
def test_each_contribution_is_received_once_by_each_other_peer(tmp_path, monkeypatch, algorithm, direct):
    """From a server that has all files, or from its author, where the server has the ledger and notes only. Each peer
    waits at its end until the others have its last file."""
    key, weights = secret(tmp_path), {"layers.0.w": torch.zeros(5000, dtype=torch.float64)}
    received, sent = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()  # by server, peer and file
    answer = FolderServer.answer

    def counted(server, peer, facts, payload):
        reply, content = answer(server, peer, facts, payload)
        if facts["name"].startswith("contributions/") and facts["operation"] in ("read", "create"):
            received[server.name, peer, facts["name"]] += len(content)
            sent[server.name, peer, facts["name"]] += len(payload)
        return reply, content

    def inner(each, step) -> None:
        each["layers.0.w"].sub_(0.1 * (each["layers.0.w"] - torch.linspace(0, 1, 5000, dtype=torch.float64)))

    monkeypatch.setattr(FolderServer, "answer", counted)
    members, shared = ["a", "b", "c"], tmp_path / "shared"
    with serving(shared, "peers", members, bytes.fromhex(Path(key).read_text())) as url:
        keys = {
            "every": 2, "members": members, "folder": url, "signature": "shared_key", "key_file": key, "quorum": 3,
            "outer_lr": 0.7, "outer_momentum": 0.9, "timeout": 20.0, "algorithm": algorithm, "patience": 30.0,
        }  # fmt: skip
        own = {name: {"listen": free()} if direct else {} for name in members}
        peers = [SmallPeer({**keys, "name": name, **own[name]}, weights, 6, inner, 0.03) for name in members]
        for each in peers:
            each.config.run.dir = str(tmp_path / str(each.own.name))
        together([each.run for each in peers])
    assert all(torch.equal(each.weights["layers.0.w"], peers[0].weights["layers.0.w"]) for each in peers)
    found = [json.loads(each.read_text())["signed"]["members"] for each in sorted((shared / "rounds").iterdir())]
    assert [len(each) for each in found] == [3] * len(found) and len(found) == 3 or algorithm == "decoupled"
    names = [f"{number:08d}/{each['peer']}" for number, line in enumerate(found) for each in line]
    for name in (f"contributions/{each}" for each in names):
        author = name[-1]
        whole = ((tmp_path / author / "peers" if direct else shared) / name).stat().st_size
        assert sent[SERVER, author, name] == (shared / name).stat().st_size  # with `direct` a note
        assert {peer: received[author if direct else SERVER, peer, name] for peer in members} == {
            peer: 0 if peer == author else whole for peer in members
        }, name
    if direct:
        assert all(each.stat().st_size < 200 for each in (shared / "contributions").glob("*/*"))
        assert (tmp_path / f"a/peers/contributions/{len(found) - 1:08d}/c").stat().st_size > 5000 * 8
