"""A TCP relay between a peer and the server, which can be cut, and can damage what it passes on."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from urllib.parse import urlsplit


class Relay:
    """Passes on all connections. A context manager.

    Attributes:
        url: of this side.
        target: address of the server.
        is_cut: nothing passes, and no side gets an error, as without a cable.
        damage: number of next parts in which a byte is changed.
        refused: number of connections while the server was not there.
    """

    def __init__(self, url: str, seed: int = 0) -> None:
        place = urlsplit(url)
        self.target, self._draw = (place.hostname, place.port), random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_cut, self.damage, self.refused, self._ended = False, 0, 0, False

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                self._wait()
                try:
                    far = socket.create_connection(self.target)
                except OSError:
                    self.refused += 1
                    near.close()
                    continue
                for one, other in ((near, far), (far, near)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _wait(self) -> None:
        while self.is_cut and not self._ended:
            time.sleep(0.01)

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := one.recv(1 << 16):
                self._wait()
                if self.damage:
                    self.damage -= 1
                    changed = bytearray(part)
                    changed[self._draw.randrange(len(part))] ^= 1 << self._draw.randrange(8)
                    part = bytes(changed)
                other.sendall(part)
        self._wait()
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
