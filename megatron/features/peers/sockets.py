"""The shared folder over TCP: a server that keeps its files, and its clients, which have the methods of `SharedFolder`.

One process serves a folder, and holds its lease, so a run has one ledger. Lines can be created and read, and never
written again. A client may write and delete files of its own name only.

A frame is the number of bytes of a line of JSON (4 bytes, big-endian), the line, and a payload. The line is signed, and
has the payload's length and hash. It is bound to the connection by a nonce of the server, and to its place in it by a
number, so it cannot be used again. A reply repeats a random word of its request. The line is checked before a byte of
the payload is read. Nothing is executed."""

import fcntl
import json
import os
import re
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from .folder import SharedFolder, Unreadable
from .messages import Refused, checked, digest, seal, shown
from .options import SERVER
from .signing import Signer

LINE = 64 << 10  # most bytes of a line of JSON
PAYLOAD = 8 << 30  # most bytes of a payload
NAMES = 64 << 20  # most bytes of a reply that is no file
NONCE = 16
STRANGERS = 256  # connections that have not sent a signed request yet
PATIENCE = 30.0  # seconds for a line, and for each next part of a payload
CHUNK = 1 << 20  # bytes of a payload's part
SLOWEST = 50e6  # bytes per second that a server hashes and keeps, at least
IDLE = 3600.0  # seconds for the next request of a member
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_OWNED = {"contributions", "announced", "wanted", "lives"}
_COMMON = {"states", "probes"}


def send(to: socket.socket, signer: Signer, payload: bytes, **facts: Any) -> None:
    message = memoryview(seal(signer, facts, payload))
    to.settimeout(PATIENCE)  # of each call: a whole payload may take longer over a slow link
    to.sendall(struct.pack(">I", len(message) - len(payload) - 1))
    for at in range(0, len(message), CHUNK):
        to.sendall(message[at : at + CHUNK])


def receive(
    source: socket.socket, signer: Signer, most: int, wait: float, within: float | None = None, **bound: Any
) -> tuple[dict[str, Any], bytes]:
    """Facts and payload of the next frame.

    Args:
        most: bytes of its payload.
        wait: seconds until it begins.
        within: seconds of the whole frame. None: each part of the payload has the time of a line.

    Raises:
        Refused: it is damaged, larger, not signed by the peer that it names, or has other facts.
        OSError: the connection has ended, or is too slow.
    """
    source.settimeout(wait)
    head = _read(source, 1)
    begin = time.monotonic()
    end = begin + PATIENCE
    (size,) = struct.unpack(">I", head + _read(source, 3, end))
    if size > LINE:
        raise Refused(f"a line of {size} bytes")
    facts = checked(signer, _read(source, size + 1, end)[:-1], **bound)
    size = facts.get("bytes")
    if type(size) is not int or not 0 <= size <= most:
        raise Refused(f"a payload of {shown(size)} bytes")
    source.settimeout(PATIENCE)
    payload = _read(source, size, None if within is None else begin + within)
    if facts.get("sha256") != digest(payload):
        raise Refused("damaged: its hash differs")
    return facts, payload


def _read(source: socket.socket, size: int, end: float | None = None) -> bytes:
    """The next bytes. `end`: of the clock of `time.monotonic`. Without it each part has the socket's own time."""
    found = bytearray()
    while len(found) < size:
        if end is not None:  # a stranger that sends a byte now and then must not keep its place
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError("too slow")
            source.settimeout(min(left, PATIENCE))
        part = source.recv(min(size - len(found), CHUNK))
        if not part:
            raise ConnectionError("the connection has ended")
        found += part
    return bytes(found)


class FolderServer(socketserver.ThreadingTCPServer):
    """Serves a local folder to the members of a run.

    Args:
        name: signs the replies.
        read_only: if there are any, members may only read, and only files in these folders.

    Raises:
        OSError: the address cannot be used, or another server has the folder's lease.
    """

    daemon_threads = allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        folder: Path,
        address: tuple[str, int],
        run: str,
        members: set[str],
        signer: Signer,
        name: str = SERVER,
        read_only: tuple[str, ...] = (),
    ) -> None:
        self.run, self.members, self.signer, self.name, self.read_only = run, members, signer, name, read_only
        self.folder, self.strangers = SharedFolder(str(folder)), threading.BoundedSemaphore(STRANGERS)
        folder.mkdir(parents=True, exist_ok=True)
        self._lease: IO[str] = open(folder / "lease", "w")
        try:
            fcntl.flock(self._lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            super().__init__(address, _Connection)
        except BlockingIOError as error:
            self._lease.close()
            raise OSError(f"{folder} is served by another process") from error

    def server_close(self) -> None:
        super().server_close()
        self._lease.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """No error of a connection stops the server."""

    def answer(self, peer: str, facts: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Facts and payload of the reply to a member's request."""
        operation, name = facts.get("operation"), facts.get("name")
        if not isinstance(name, str) or not all(map(_PART.fullmatch, name.split("/"))) or name.count("/") > 3:
            raise Refused(f"the name {shown(name)}")
        if self.read_only:
            may = operation in ("read", "names") and name.split("/")[0] in self.read_only
        else:
            may = operation in ("read", "names") or may_change(peer, str(operation), name)
        if not may:
            raise Refused(f"{shown(operation)} of {shown(name)} by {peer}")
        if operation == "read":
            most = facts.get("limit")
            found = self.folder.read_up_to(name, min(most, PAYLOAD) if type(most) is int else 0)
            return {"found": found is not None}, found or b""
        if operation == "names":
            return {}, json.dumps(self.folder.names(name)).encode()
        if operation == "create":
            return {"made": self.folder.create(name, payload)}, b""
        if operation == "write":
            self.folder.write(name, payload)
        elif operation == "delete":
            self.folder.delete(name)
        elif operation == "delete_empty":
            self.folder.delete_empty(name)
        else:
            raise Refused(f"the operation {shown(operation)}")
        return {}, b""


def may_change(peer: str, operation: str, name: str) -> bool:
    """Whether a member may change a file. The ledger can only grow."""
    first, last = name.split("/")[0], name.split("/")[-1]
    if first == "rounds" or name == "run.json":
        return operation == "create"
    if operation == "delete_empty":
        return first in _OWNED | {"states"}
    return first in _COMMON or (first in _OWNED and (last == peer or last.endswith(f".{peer}")))


class _Connection(socketserver.BaseRequestHandler):
    server: FolderServer

    def handle(self) -> None:
        server, nonce = self.server, secrets.token_bytes(NONCE)
        if not server.strangers.acquire(blocking=False):
            return
        known = False
        try:
            self.request.settimeout(PATIENCE)
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else two sends wait for each other
            self.request.sendall(nonce)
            number = 0
            while True:
                bound = {"kind": "request", "run": server.run, "nonce": nonce.hex(), "number": number}
                most = PAYLOAD if known else LINE  # the first request is small, and shows who it is
                wait = IDLE if known else PATIENCE
                facts, payload = receive(self.request, server.signer, most, wait, None if known else PATIENCE, **bound)
                if facts["peer"] not in server.members:
                    return
                if not known:
                    known = True
                    server.strangers.release()
                self._reply(facts, payload)
                number += 1
        except (Refused, OSError):
            return
        finally:
            if not known:
                server.strangers.release()

    def _reply(self, facts: Mapping[str, Any], payload: bytes) -> None:
        server = self.server
        try:
            reply, content = server.answer(facts["peer"], facts, payload)
        except (Refused, Unreadable, OSError) as error:
            kind = "unreadable" if isinstance(error, Unreadable) else "error"
            reply, content = {kind: f"{type(error).__name__}: {error}"}, b""
        bound = {key: facts.get(key) for key in ("run", "nonce", "number", "word")}
        send(self.request, server.signer, content, kind="reply", peer=server.name, **bound, **reply)


class RemoteFolder(SharedFolder):
    """A folder whose files come from other processes."""

    largest = PAYLOAD

    def read(self, name: str) -> bytes:
        if (found := self.read_up_to(name, PAYLOAD)) is None:
            raise FileNotFoundError(name)
        return found

    def exists(self, name: str) -> bool:
        return name.rpartition("/")[2] in self.names(name.rpartition("/")[0])


class ServedFolder(RemoteFolder):
    """A folder that a `FolderServer` keeps. One thread uses it.

    Args:
        server: the name by which the server signs.
        within: seconds of a reply. None: only its parts have a limit.
    """

    def __init__(
        self, url: str, signer: Signer, run: str, peer: str, server: str = SERVER, within: float | None = None
    ) -> None:
        super().__init__(url)
        object.__setattr__(self, "_line", _Client(url, signer, run, peer, server, within))

    def _ask(self, operation: str, name: str, payload: bytes = b"", **facts: Any) -> tuple[dict[str, Any], bytes]:
        line: _Client = self._line  # type: ignore[attr-defined]
        return line.ask(operation, name, payload, **facts)

    def create(self, name: str, content: bytes) -> bool:
        if self._ask("create", name, content)[0].get("made"):
            return True
        try:  # after a lost reply the second attempt finds the file of the first one
            return self.read_up_to(name, len(content)) == content
        except Unreadable:
            return False

    def creates_once(self, name: str) -> bool:
        return True  # the server's folder is local

    def write(self, name: str, content: bytes) -> None:
        self._ask("write", name, content)

    def read_up_to(self, name: str, limit: int) -> bytes | None:
        facts, content = self._ask("read", name, limit=limit)
        return content if facts.get("found") else None

    def names(self, folder: str) -> list[str]:
        found = json.loads(self._ask("names", folder)[1])
        return sorted(map(str, found)) if isinstance(found, list) else []

    def delete(self, name: str) -> None:
        self._ask("delete", name)

    def delete_empty(self, folder: str) -> None:
        self._ask("delete_empty", folder)


class _Client:
    """A connection that is made again after an error."""

    def __init__(self, url: str, signer: Signer, run: str, peer: str, server: str, within: float | None) -> None:
        place = urlsplit(url)
        self._server, self._within = server, within
        self._address = place.hostname or "", place.port or 0
        self._signer, self._run, self._peer = signer, run, peer
        self._socket: socket.socket | None = None

    def ask(self, operation: str, name: str, payload: bytes, **facts: Any) -> tuple[dict[str, Any], bytes]:
        try:
            return self._once(operation, name, payload, **facts)
        except (OSError, Refused) as error:
            if isinstance(error.__cause__, TimeoutError):  # a lost host costs one attempt
                raise
            return self._once(operation, name, payload, **facts)  # the server may have been started again

    def _once(self, operation: str, name: str, payload: bytes, **facts: Any) -> tuple[dict[str, Any], bytes]:
        try:
            if self._socket is None:
                self._connect()
                self._exchange("names", "probes", b"")  # members introduce themselves by a small request
            reply, content = self._exchange(operation, name, payload, **facts)
        except (OSError, Refused) as error:
            self.close()
            raise OSError(f"{self._address[0]}:{self._address[1]}: {error}") from error
        if "unreadable" in reply:
            raise Unreadable(shown(reply["unreadable"]))
        if "error" in reply:
            raise OSError(f"refused by the server: {shown(reply['error'])}")
        return reply, content

    def _connect(self) -> None:
        self._socket = socket.create_connection(self._address, min(PATIENCE, self._within or PATIENCE))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._nonce, self._number = _read(self._socket, NONCE).hex(), 0

    def _exchange(self, operation: str, name: str, payload: bytes, **facts: Any) -> tuple[dict[str, Any], bytes]:
        assert self._socket is not None
        bound: dict[str, Any] = {
            "run": self._run,
            "nonce": self._nonce,
            "number": self._number,
            "word": secrets.token_hex(NONCE),
        }
        self._number += 1
        asked = {"kind": "request", "peer": self._peer, "operation": operation, "name": name}
        send(self._socket, self._signer, payload, **asked, **bound, **facts)
        most = min(facts.get("limit", NAMES), PAYLOAD)
        wait = PATIENCE + (len(payload) + most) / SLOWEST
        if self._within is not None:
            wait = min(wait, self._within)
        return receive(self._socket, self._signer, most, wait, self._within, kind="reply", peer=self._server, **bound)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def serve(server: FolderServer, ready: Callable[[str, int], None]) -> None:
    """Serve until the process ends."""
    host, port = server.server_address[:2]
    ready(str(host), int(port))
    os.umask(0o077)
    with server:
        server.serve_forever(poll_interval=0.2)
