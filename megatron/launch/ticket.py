"""Agents that call the launcher, where the starting command cannot carry their input (pdsh, mpirun).

The launcher listens; the ticket says where, and holds a secret. Both sides prove that they know it without sending
it. The ticket goes in an environment variable, or in a file of mode 0600 on a shared disk, never in an argument.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from pathlib import Path

from . import network
from .link import Link

VARIABLE = "JOB_TICKET"
PATIENCE = 10.0  # seconds for the exchange of proofs


def _proof(secret: str, side: str, nonce: str) -> str:
    return hmac.new(secret.encode(), f"{side}:{nonce}".encode(), "sha256").hexdigest()


def _read_line(link: socket.socket) -> list[str]:
    """One short line, byte by byte: what follows it belongs to somebody else."""
    data = b""
    while not data.endswith(b"\n"):
        byte = link.recv(1)
        if not byte or len(data) > 1024:
            raise ConnectionError("the other side closed the connection, or does not speak our language")
        data += byte
    return data.decode("ascii", "replace").split()


class Desk:
    """The launcher's listening socket and the secret."""

    def __init__(self, port: int = 0) -> None:
        self.socket = socket.create_server(("", port), backlog=1024)
        self.secret = secrets.token_hex(32)
        self._sockets: list[socket.socket] = []

    def ticket(self, addresses: list[str] | None = None) -> str:
        """What an agent needs to call."""
        known = addresses or [each.address for each in network.addresses() if ":" not in each.address]
        return json.dumps({"addresses": known, "port": self.socket.getsockname()[1], "secret": self.secret})

    def admit(self) -> list[Link]:
        """Take one caller in; empty if it could not prove itself."""
        caller, _ = self.socket.accept()
        caller.settimeout(PATIENCE)
        nonce = secrets.token_hex(16)
        try:
            caller.sendall(f"{nonce}\n".encode())
            index, proof, theirs = _read_line(caller)
            if not hmac.compare_digest(proof, _proof(self.secret, f"agent {index}", nonce)):
                raise ConnectionError("wrong secret")
            caller.sendall(f"{_proof(self.secret, 'launcher', theirs)}\n".encode())
            number = int(index)
        except (OSError, ValueError):
            caller.close()
            return []
        self._sockets.append(caller)
        return [Link(caller.fileno(), caller.fileno(), (number,))]

    def close(self) -> None:
        """Stop listening and drop all callers."""
        for each in (self.socket, *self._sockets):
            each.close()


def write_file(path: Path, ticket: str) -> Path:
    """Write a ticket for agents that share this disk; only this user can read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(ticket)
    return path


def connect(where: str, index: int, patience: float = 30.0) -> socket.socket:
    """Call the launcher.

    Args:
        where: name of an environment variable that holds the ticket, or path of the file.
        index: which host this is.

    Raises:
        ConnectionError: nobody there, or somebody who does not know the secret.
    """
    text = os.environ.get(where) or Path(where).read_text()
    ticket, end = json.loads(text), time.monotonic() + patience
    errors: list[str] = []
    while True:
        for address in ticket["addresses"]:
            try:
                return _introduce(
                    socket.create_connection((address, ticket["port"]), timeout=5.0), ticket["secret"], index
                )
            except OSError as error:
                errors.append(f"{address}: {error}")
        if time.monotonic() > end:
            raise ConnectionError(
                f"cannot reach the launcher at port {ticket['port']}: {'; '.join(errors[-len(ticket['addresses']) :])}"
            )
        time.sleep(0.5)


def _introduce(link: socket.socket, secret: str, index: int) -> socket.socket:
    link.settimeout(PATIENCE)
    (nonce,) = _read_line(link)
    mine = secrets.token_hex(16)
    link.sendall(f"{index} {_proof(secret, f'agent {index}', nonce)} {mine}\n".encode())
    (proof,) = _read_line(link)
    if not hmac.compare_digest(proof, _proof(secret, "launcher", mine)):
        raise ConnectionError("whoever listens there does not know the secret")
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return link
