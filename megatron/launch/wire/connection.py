"""The launcher's side of one started command (a local agent, an ssh, an srun) and of the agents behind it."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from dataclasses import dataclass, field

from .protocol import MessagePipe


@dataclass(frozen=True)
class Command:
    """Something to start that brings agents up.

    Attributes:
        arguments: the argument list, the same for every job on these hosts.
        hosts: indices of the hosts whose agents it starts.
        index: the host's index, which its agent gets, or None where one input goes to several agents, which know
            theirs.
        dials: whether the agents call back over a socket, with credentials, instead of using the command's input and
            output.
        credentials_file: where the credentials go. By default in an environment variable of the command.
        environment: variables set for the command itself, over the launcher's.
    """

    arguments: tuple[str, ...]
    hosts: tuple[int, ...]
    index: int | None = None
    dials: bool = False
    credentials_file: str = ""
    environment: dict[str, str] = field(default_factory=dict)


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
        source, errors, target = self.process.stdout, self.process.stderr, self.process.stdin
        assert source is not None and errors is not None  # they are pipes, and so is the input, if it does not dial
        self.errors = MessagePipe(errors.fileno(), os.open(os.devnull, os.O_WRONLY), ())
        output = os.open(os.devnull, os.O_WRONLY) if target is None else target.fileno()
        self.link = MessagePipe(source.fileno(), output, command.hosts)

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
