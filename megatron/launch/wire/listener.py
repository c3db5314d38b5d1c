"""Agents that call the launcher, where the starting command cannot carry their input (pdsh, mpirun).

The credentials have the launcher's address and a secret. Both sides prove that they know it without sending it. The
credentials are in an environment variable, or in a file of mode 0600 on a shared disk, never in an argument.

Anybody on the network can call, so no caller may hold up or end the run. Threads of their own serve callers. Each has
one short line and a few seconds for it, and their number is limited. The sockets exist from the launcher's start
until all agents are in, on the addresses that the hosts use, and on no others."""

import hmac
import json
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .protocol import MessagePipe

VARIABLE = "JOB_CREDENTIALS"
PATIENCE = 10.0  # seconds for the exchange of proofs
LONGEST_LINE = 256  # bytes


def proof(secret: str, side: bytes, nonce: bytes) -> bytes:
    """The proof that a process knows the secret."""
    return hmac.new(secret.encode(), side + b":" + nonce, "sha256").hexdigest().encode()


def _read_line(link: socket.socket, until: float) -> bytes:
    """One short line, byte by byte: what follows it belongs to somebody else."""
    data = b""
    while not data.endswith(b"\n"):
        link.settimeout(max(0.01, until - time.monotonic()))
        byte = link.recv(1)
        if not byte or len(data) > LONGEST_LINE or time.monotonic() > until:
            raise ConnectionError("the other side closed the connection, or does not speak our language")
        data += byte
    return data.strip()


def write_file(path: Path, credentials: str) -> Path:
    """Write credentials for agents that share this disk. Only this user can read them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(credentials)
    return path


def connect(where: str, index: int, patience: float = 30.0) -> socket.socket:
    """Call the launcher.

    Args:
        where: name of an environment variable that holds the credentials, or path of the file.
        index: which host this is.

    Raises:
        ConnectionError: no process answers, or one that does not know the secret.
    """
    text = os.environ.get(where) or Path(where).read_text()
    credentials, end = json.loads(text), time.monotonic() + patience
    errors: list[str] = []
    while True:
        for address, port in credentials["addresses"]:
            try:
                return _introduce(socket.create_connection((address, port), timeout=5.0), credentials["secret"], index)
            except OSError as error:
                errors.append(f"{address} port {port}: {error}")
        if time.monotonic() > end:
            raise ConnectionError(f"cannot reach the launcher at {'; '.join(errors[-len(credentials['addresses']) :])}")
        time.sleep(0.5)


def _introduce(link: socket.socket, secret: str, index: int) -> socket.socket:
    """Send our proof, and check the launcher's. Closes the connection if that fails."""
    until, mine = time.monotonic() + PATIENCE, secrets.token_hex(16).encode()
    try:
        who = str(index).encode()
        nonce = _read_line(link, until)
        link.sendall(b" ".join((who, proof(secret, b"agent " + who, nonce), mine)) + b"\n")
        if not hmac.compare_digest(_read_line(link, until), proof(secret, b"launcher", mine)):
            raise ConnectionError("the listener failed authentication")
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except OSError:
        link.close()
        raise
    return link


CALLERS = 64  # without a proof yet. The one that has waited longest makes room for the next


class AgentListener:
    """Listening sockets, the secret, and the threads that answer.

    Args:
        addresses: where to listen.
        port: 0 for any.

    Raises:
        OSError: an address is not this machine's, or the port is taken.

    Attributes:
        ready: a socket that can be read when `admitted` has something new.
    """

    def __init__(self, addresses: Sequence[str] = ("127.0.0.1",), port: int = 0) -> None:
        self.secret = secrets.token_hex(32)
        self.ready, self._bell = socket.socketpair()
        for end in (self.ready, self._bell):
            end.setblocking(False)
        self._admitted: queue.SimpleQueue[tuple[socket.socket, int]] = queue.SimpleQueue()
        self._inside: list[socket.socket] = []
        self._callers: dict[socket.socket, threading.Thread] = {}  # the longest waiting first
        self._stop, self._stopped = socket.socketpair()
        self._listeners = [_listen(address, port) for address in addresses]
        self._thread = threading.Thread(target=self._serve, name="listener", daemon=True)
        self._thread.start()

    def credentials(self) -> str:
        """The data that an agent needs to call."""
        places = [list(listener.getsockname()[:2]) for listener in self._listeners]
        return json.dumps({"addresses": places, "secret": self.secret})

    def admitted(self) -> list[MessagePipe]:
        """Agents that have proved themselves since the last call."""
        with suppress(OSError):  # nothing left to read
            while self.ready.recv(4096):
                pass
        links = []
        while not self._admitted.empty():
            caller, index = self._admitted.get()
            self._inside.append(caller)
            links.append(MessagePipe(caller.fileno(), caller.fileno(), (index,)))
        return links

    def shut(self) -> None:
        """Stop listening. Connected agents stay."""
        if self._thread.is_alive():
            self._stop.send(b"x")
            self._thread.join()

    def close(self) -> None:
        """Stop listening and drop everybody."""
        self.shut()
        while not self._admitted.empty():
            self._admitted.get()[0].close()
        for each in (*self._inside, self.ready, self._bell, self._stop, self._stopped):
            each.close()

    # ---- the threads: one that accepts, and one for each caller without a proof

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for each in (self._stopped, *self._listeners):
                selector.register(each, selectors.EVENT_READ)
            while self._stopped not in (ready := [key.fileobj for key, _ in selector.select()]):
                for listener in self._listeners:
                    if listener in ready:
                        self._answer(listener)
        for listener in self._listeners:
            listener.close()
        for caller in list(self._callers):
            self._send_away(caller)

    def _answer(self, listener: socket.socket) -> None:
        try:
            caller, _ = listener.accept()
        except OSError:  # the caller has gone already, or this process has no descriptor left for it
            time.sleep(0.01)
            return
        for longest in list(self._callers)[: max(len(self._callers) + 1 - CALLERS, 0)]:
            self._send_away(longest)
        self._callers[caller] = threading.Thread(target=self._meet, args=(caller,), daemon=True)
        self._callers[caller].start()

    def _send_away(self, caller: socket.socket) -> None:
        if (thread := self._callers.pop(caller, None)) is not None:  # not admitted at this moment
            with suppress(OSError):  # it has gone
                caller.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _meet(self, caller: socket.socket) -> None:
        index = self._judge(caller)
        if self._callers.pop(caller, None) is None or index is None:
            caller.close()
            return
        self._admitted.put((caller, index))
        with suppress(OSError):  # it has rung often enough
            self._bell.send(b"x")

    def _judge(self, caller: socket.socket) -> int | None:
        """Which host this is, with our own proof sent, or None without a proof."""
        until, mine = time.monotonic() + PATIENCE, secrets.token_hex(16).encode()
        try:
            caller.settimeout(PATIENCE)
            caller.sendall(mine + b"\n")
            index, claimed, nonce = _read_line(caller, until).split(b" ")
            known = hmac.compare_digest(claimed, proof(self.secret, b"agent " + index, mine))
            if not known or not index.isdigit() or len(index) > 9 or not nonce.isalnum():
                return None
            caller.sendall(proof(self.secret, b"launcher", nonce) + b"\n")
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except (OSError, ValueError):
            return None
        return int(index)


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=1024)
    listener.setblocking(False)
    return listener
