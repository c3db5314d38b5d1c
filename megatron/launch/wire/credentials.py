"""Agents that call the launcher, where the starting command cannot carry their input (pdsh, mpirun).

The launcher listens (listener.py). The credentials have its address and a secret. Both sides prove that they know it
without sending it. The credentials are in an environment variable, or in a file of mode 0600 on a shared disk, never in
an argument.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from pathlib import Path

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
