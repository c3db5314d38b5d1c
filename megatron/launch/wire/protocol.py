"""Messages between launcher and agents: one JSON object per line, over pipes or a socket.

Launcher to agent: `specification` (first), `bind`, `start`, `look`, `signal`, `size`, `stop`, `kill`, `beat`. Agent to
launcher: `address`, `ready`, `bound`, `output`, `exit`, `tail`, `signalled`, `place`, `seen`, `late`, `done`,
`problem`, `warning`, `beat`. Every message of an agent names its host by index.

Lines of an agent stay under 1000 bytes: srun carries output in messages of 1024 bytes, and a longer line of one
host could be torn by one of another."""

import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

VERSION = 4
LIMIT = 1000  # bytes of one line from an agent, its newline included
LONGEST = 1 << 26  # bytes of any line. The longest one is the specification of a job on many hosts
MARK = b"\x1e"  # starts each line of an agent, which separates it from lines of ssh, srun or mpirun


def encode(message: dict[str, Any]) -> bytes:
    return (
        MARK + json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape") + b"\n"
    )


def encode_text(message: dict[str, Any], text: str) -> Iterator[bytes]:
    """A message with a `text` of any length, cut into lines below the limit."""
    line = encode({**message, "text": text})
    if len(line) <= LIMIT or len(text) <= 1:
        yield line
        return
    middle = len(text) // 2
    yield from encode_text(message, text[:middle])
    yield from encode_text(message, text[middle:])


def decode(line: bytes) -> dict[str, Any] | None:
    """The message of a line without its newline, or None where the line is not one of ours."""
    if not line.startswith(MARK):
        return None
    try:
        message = json.loads(line[len(MARK) :].decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and "type" in message else None


class Lines:
    """Collects bytes as they come and gives them back as whole lines.

    Args:
        longest: bytes of a line without an end that are kept. Longer ones are returned as if they had ended.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._parts: list[bytes] = []
        self._longest, self._size = longest, 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their newlines."""
        self._parts.append(data)
        self._size += len(data)
        if b"\n" in data:
            *lines, rest = b"".join(self._parts).split(b"\n")
            self._parts, self._size = ([rest] if rest else []), len(rest)
        else:
            lines = []
        return [*lines, self.rest()] if self._size > self._longest else lines

    def rest(self) -> bytes:
        """The rest without a newline, which is then dropped."""
        rest = b"".join(self._parts)
        self._parts, self._size = [], 0
        return rest


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


def caught_signals(numbers: Iterable[int]) -> tuple[socket.socket, Callable[[], None]]:
    """A socket on which these signals arrive as bytes, so that no code runs inside a handler. And a function that
    restores the handlers before."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

    def restore() -> None:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
        theirs.close()

    return ours, restore


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
