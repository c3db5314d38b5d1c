"""One side of the conversation between launcher and agent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from .protocol import Lines, decode, encode


class MessagePipe:
    """Messages to and from the other side, over a pair of descriptors that never block.

    Args:
        source, target: descriptors to read from and to write to, the same for a socket.
        hosts: on the launcher's side, indices of the hosts whose agents are there.
    """

    def __init__(self, source: int, target: int, hosts: tuple[int, ...] = ()) -> None:
        self.source, self.target, self.hosts = source, target, hosts
        self.outgoing, self.open, self._lines = bytearray(), True, Lines()
        os.set_blocking(source, False)
        os.set_blocking(target, False)

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message, and write what can be written. `flush` writes the rest."""
        self.put(encode(message))

    def put(self, line: bytes) -> None:
        """The same for a message that is encoded."""
        if self.open:
            self.outgoing += line
            self.flush()

    def flush(self) -> None:
        """Write as much as the other side takes."""
        try:
            while self.outgoing:
                del self.outgoing[: os.write(self.target, self.outgoing[:65536])]
        except BlockingIOError:
            pass
        except OSError:  # the other side is gone, as the end of its output shows too
            self.outgoing.clear()

    def receive(self) -> Iterator[dict[str, Any] | bytes]:
        """Messages that have come, and lines that are none. Sets `open` to False at the end."""
        try:
            data = os.read(self.source, 1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.open = False
        for line in self._lines.feed(data) if data else filter(None, [self._lines.rest()]):
            message = decode(line)
            yield line if message is None else message
