"""The server of a folder: rights of members, one lease, garbage on its sockets, and garbage from a server."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import struct
import threading
import time

import pytest

from megatron.features.peers import sockets
from megatron.features.peers.folder import Unreadable
from megatron.features.peers.messages import seal
from megatron.features.peers.signing import Signer
from megatron.features.peers.sockets import LINE, NONCE, FolderServer, ServedFolder
from tests.features.peers.companies import secret, serving
from tools.peers import serve

KEY = secrets.token_bytes(32)


def client(url: str, peer: str, key: bytes = KEY) -> ServedFolder:
    return ServedFolder(url, Signer(key, None), "run", peer)


def test_the_contract_of_a_folder(tmp_path):
    with serving(tmp_path, "run", "ab", KEY) as url:
        a, b = client(url, "a"), client(url, "b")
        assert a.create("rounds/1.json", b"line") and not b.create("rounds/1.json", b"other")
        assert not b.create("rounds/1.json", b"x")  # less than is there
        assert b.read("rounds/1.json") == b"line" and b.read_up_to("rounds/2.json", 9) is None
        assert a.names("rounds") == ["1.json"] and a.names("nothing") == [] and a.exists("rounds/1.json")
        with pytest.raises(Unreadable):
            b.read_up_to("rounds/1.json", 3)
        large = secrets.token_bytes(5 << 20)
        a.write("states/1/000000.a", large)
        assert b.read_up_to("states/1/000000.a", len(large)) == large


@pytest.mark.parametrize(
    "operation, name",
    [
        ("write", "rounds/1.json"), ("delete", "rounds/1.json"), ("write", "announced/1/b"), ("delete", "wanted/b"),
        ("write", "contributions/1/0.b"), ("write", "lease"), ("write", "../x"), ("write", "/etc/x"), ("write", "a//b"),
        ("run", "states/1"),
    ],
)  # fmt: skip
def test_what_a_member_may_not_do(tmp_path, operation, name):
    with serving(tmp_path / "served", "run", "ab", KEY) as url:
        a = client(url, "a")
        a.create("rounds/1.json", b"line")
        with pytest.raises(OSError, match="refused by the server"):
            a._ask(operation, name, b"x")
        assert a.read("rounds/1.json") == b"line"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["served"]


def test_strangers(tmp_path):
    with serving(tmp_path, "run", "ab", KEY) as url:
        for other in (
            client(url, "a", secrets.token_bytes(32)),
            client(url, "z"),
            ServedFolder(url, Signer(KEY, None), "no", "a"),
        ):
            with pytest.raises(OSError):
                other.names("rounds")


def test_keys_of_each_member_and_of_the_server(tmp_path):
    pytest.importorskip("nacl", reason="PyNaCl (requirements/peers.txt) is not installed")
    from megatron.features.peers.signing import ed25519_public

    keys = {name: secrets.token_bytes(32) for name in ("a", "b", "server")}
    public = {name: ed25519_public(key) for name, key in keys.items()}
    server = FolderServer(tmp_path, ("127.0.0.1", 0), "run", {"a", "b"}, Signer(keys["server"], public))
    with server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"tcp://127.0.0.1:{server.server_address[1]}"
        a, b = (ServedFolder(url, Signer(keys[name], public), "run", name) for name in "ab")
        assert a.create("rounds/1.json", b"line") and b.read("rounds/1.json") == b"line"
        with pytest.raises(OSError):
            ServedFolder(url, Signer(keys["b"], public), "run", "a").names("rounds")
        false = {**public, "server": public["b"]}  # a server with another key is not believed
        with pytest.raises(OSError):
            ServedFolder(url, Signer(keys["a"], false), "run", "a").names("rounds")
        server.shutdown()


def test_one_folder_has_one_server(tmp_path):
    with serving(tmp_path, "run", "ab", KEY), pytest.raises(OSError, match="served by another process"):
        FolderServer(tmp_path, ("127.0.0.1", 0), "run", {"a"}, Signer(KEY, None))


@pytest.mark.parametrize("members", ["a,b,", "a,server", "a,x.a", "a,../b"])
def test_a_server_refuses_names_that_no_peer_can_have(tmp_path, capsys, members):
    key = secret(tmp_path)
    words = [str(tmp_path / "served"), "--bind", "127.0.0.1:0", "--members", members, "--key", key]
    assert serve.main(words) == 2
    assert "--members must be names" in capsys.readouterr().err


def test_a_server_that_starts_again_continues(tmp_path):
    with serving(tmp_path, "run", "ab", KEY) as url:
        a = client(url, "a")
        a.create("rounds/1.json", b"line")
    with serving(tmp_path, "run", "ab", KEY, int(url.rpartition(":")[2])):
        a._line.close()  # type: ignore[attr-defined]
        assert a.read("rounds/1.json") == b"line"


def frames(draw: random.Random, nonce: bytes) -> bytes:
    """Garbage of several forms: noise, false lengths, a valid request with a changed bit, of another connection."""
    kind = draw.randrange(5)
    if kind == 0:
        return draw.randbytes(draw.randrange(1, 300))
    if kind == 1:
        return struct.pack(">I", draw.choice([0, LINE + 1, 0xFFFFFFFF])) + draw.randbytes(20)
    facts = {"kind": "request", "run": "run", "peer": "a", "number": 0, "operation": "write", "name": "states/9"}
    bound = {**facts, "nonce": (nonce if kind < 4 else bytes(NONCE)).hex()}
    message = bytearray(seal(Signer(KEY, None), bound, b"bad"))
    if kind == 2:
        message[draw.randrange(len(message))] ^= 1 << draw.randrange(8)
    elif kind == 3:  # signed, and its payload is larger than a first request may have
        message = bytearray(seal(Signer(KEY, None), bound, bytes(LINE + 1)))
    return struct.pack(">I", message.index(b"\n") if b"\n" in message else 5) + bytes(message)


def test_garbage_never_stops_a_server(tmp_path):
    draw = random.Random(5)
    with serving(tmp_path, "run", "ab", KEY) as url:
        place = ("127.0.0.1", int(url.rpartition(":")[2]))
        a = client(url, "a")
        for number in range(300):
            with contextlib.suppress(OSError), socket.create_connection(place, 5) as stranger:
                nonce = stranger.recv(NONCE)
                stranger.sendall(frames(draw, nonce))
                if draw.random() < 0.5:
                    stranger.shutdown(socket.SHUT_WR)
            if number % 20 == 0:
                assert a.create(f"rounds/{number}.json", b"line") and a.names("states") == []
        assert a.names("states") == []


def test_a_slow_link_may_take_longer_than_one_part_of_a_payload(monkeypatch):
    monkeypatch.setattr(sockets, "PATIENCE", 0.5)
    monkeypatch.setattr(sockets, "CHUNK", 1 << 16)
    here, there = socket.socketpair()
    for end, kind in ((here, socket.SO_SNDBUF), (there, socket.SO_RCVBUF)):
        end.setsockopt(socket.SOL_SOCKET, kind, 1 << 14)
    found = bytearray()

    def read() -> None:
        while part := there.recv(1 << 15):
            found.extend(part)
            time.sleep(0.02)

    thread = threading.Thread(target=read)
    thread.start()
    with here:
        sockets.send(here, Signer(KEY, None), bytes(2 << 20), peer="a")  # more than a second
    thread.join()
    there.close()
    assert len(found) > 2 << 20


def test_a_stranger_that_sends_a_byte_now_and_then_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(sockets, "PATIENCE", 0.3)
    with serving(tmp_path, "run", "ab", KEY) as url:
        place = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(place, 5) as stranger, pytest.raises(OSError):
            stranger.recv(NONCE)
            stranger.sendall(struct.pack(">I", LINE))
            for _ in range(40):
                stranger.sendall(b"{")
                time.sleep(0.05)


def test_replies_of_an_old_connection_are_not_believed():
    """A false server that repeats all that it has recorded, with the nonce of that time."""
    signer, nonce = Signer(KEY, None), bytes(NONCE)
    facts = {"kind": "reply", "peer": "server", "run": "run", "nonce": nonce.hex(), "made": True, "word": "00" * NONCE}
    old = [seal(signer, {**facts, "number": number}) for number in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):
                with contextlib.suppress(OSError), server.accept()[0] as connection:
                    connection.sendall(nonce)
                    for each in old:
                        connection.sendall(struct.pack(">I", len(each) - 1) + each)
                    connection.recv(1 << 16)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(OSError, match="another word"):
            client(f"tcp://127.0.0.1:{server.getsockname()[1]}", "a").create("rounds/1.json", b"line")
        thread.join(20)


def test_drafts_of_killed_writers_are_deleted_with_their_folder(tmp_path):
    with serving(tmp_path, "run", "ab", KEY) as url:
        a = client(url, "a")
        a.create("contributions/1/0.a", b"x")
        (tmp_path / "contributions/1/0.a.12345678.draft.12345678.tmp").write_bytes(b"x")
        a.delete_empty("contributions/1")
        assert a.names("contributions/1") == ["0.a"]
        a.delete("contributions/1/0.a")
        a.delete_empty("contributions/1")
        assert not (tmp_path / "contributions/1").exists()


def test_garbage_of_a_server_is_an_error_of_the_transport():
    draw = random.Random(6)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(40):
                with contextlib.suppress(OSError), server.accept()[0] as connection:
                    nonce = draw.randbytes(NONCE)
                    connection.sendall(nonce + frames(draw, nonce))
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1 << 16)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        a = client(f"tcp://127.0.0.1:{server.getsockname()[1]}", "a")
        for _ in range(20):
            with pytest.raises(OSError):
                a.names("rounds")
        thread.join(20)
        assert not thread.is_alive()
