"""The launcher's side of one started command (a local agent, an ssh, an srun) and of the agents behind it."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .protocol import Lines, decode, encode


@dataclass(frozen=True)
class Command:
    """Something to start that brings agents up.

    Attributes:
        arguments: the argument list; the same for every job on these hosts.
        hosts: indices of the hosts whose agents it starts.
        index: the host's index, told to its agent; None where one input goes to several agents, which know theirs.
        dials: whether the agents call back over a socket (the ticket) instead of using the command's input and output.
        ticket_file: where the ticket goes; by default an environment variable of the command carries it.
        environment: variables set for the command itself, over the launcher's.
    """

    arguments: tuple[str, ...]
    hosts: tuple[int, ...]
    index: int | None = None
    dials: bool = False
    ticket_file: str = ""
    environment: dict[str, str] = field(default_factory=dict)


class Link:
    """Messages to and from agents over a pair of descriptors that never block."""

    def __init__(self, source: int, target: int, hosts: tuple[int, ...]) -> None:
        self.source, self.target, self.hosts = source, target, hosts
        self.outgoing, self.open, self._lines = bytearray(), True, Lines()
        os.set_blocking(source, False)
        os.set_blocking(target, False)

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; `flush` writes it."""
        if self.open:
            self.outgoing += encode(message)
            self.flush()

    def flush(self) -> None:
        """Write as much as the other side takes."""
        try:
            while self.outgoing:
                del self.outgoing[: os.write(self.target, self.outgoing[:65536])]
        except BlockingIOError:
            pass
        except OSError:  # the other side is gone; its end of output says so too
            self.outgoing.clear()

    def receive(self) -> Iterator[dict[str, Any] | bytes]:
        """Messages that have come, and lines that are none; sets `open` to False at the end."""
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


class Connection:
    """A started command."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.said: deque[str] = deque(maxlen=40)
        self.process = subprocess.Popen(
            command.arguments,
            stdin=subprocess.DEVNULL if command.dials else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **command.environment},
            start_new_session=True,
        )
        self.errors = Link(self.process.stderr.fileno(), os.open(os.devnull, os.O_WRONLY), ())
        target = os.open(os.devnull, os.O_WRONLY) if command.dials else self.process.stdin.fileno()
        self.link = Link(self.process.stdout.fileno(), target, command.hosts)

    @property
    def ended(self) -> bool:
        """Whether the command has ended and everything it said was read."""
        return self.process.poll() is not None and not self.link.open and not self.errors.open

    def close(self, number: int) -> None:
        """Send a signal to the command and what it started here."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass  # it has ended

    def release(self) -> None:
        """Close the descriptors."""
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                try:
                    stream.close()
                except OSError:  # unwritten bytes for a process that is gone
                    pass
        os.close(self.errors.target)
        if self.command.dials:
            os.close(self.link.target)
