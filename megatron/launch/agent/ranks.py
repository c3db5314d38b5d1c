"""One rank as its agent sees it: how it is started, where it is, what it says, how it ends."""

import ctypes
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from fcntl import ioctl
from typing import Any

import psutil

from megatron.report.append import AppendFile

from ..report.console import FORWARDED_SIGNALS
from ..wire.protocol import Lines, encode_text
from .rank_probe import Sight

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# The agent's own place by mpirun and srun. It is not that of its ranks, but DeepSpeed believes it.
_THE_AGENTS_PLACE = tuple("OMPI_ PMIX_ PMI_ MPI_LOCAL HYDI_ PALS_ SLURM_PROCID SLURM_LOCALID JOB_CREDENTIALS".split())
TAIL_LINES, TAIL_BYTES = 400, 65536
LONGEST_OUTPUT = 1 << 20  # bytes of a line that does not end, such as a progress bar, before it is shown as it is
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
TRACEBACK = re.compile(
    rb"^(\[rank\d+\]: )?Traceback \(most recent call last\)", re.MULTILINE
)  # torch puts its rank before it


def become_subreaper() -> None:
    """Make this process the parent of every orphan among its descendants, so that it can end them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> list[int]:
    """Process ids of this process's children, adopted ones included."""
    return [each.pid for each in psutil.Process().children()]


class OutputStream:
    """One output stream of a rank, as it is read.

    Attributes:
        number: 1 or 2.
        source: the descriptor that the agent reads.
        held: text kept back because a traceback has begun. It is shown if the rank lives on.
    """

    def __init__(self, number: int, source: int) -> None:
        self.number, self.source = number, source
        self.lines = Lines(LONGEST_OUTPUT)
        self.held: list[bytes] = []
        self.held_since = 0.0
        os.set_blocking(source, False)

    def read(self) -> bytes | None:
        """The data to read, empty if there is none now, None at the end."""
        try:
            return os.read(self.source, 65536) or None
        except BlockingIOError:
            return b""
        except OSError:  # the other side of a terminal is closed
            return None


class RankProcess:
    """A rank: one process in a session of its own, that dies with its agent.

    Attributes:
        rank: global rank.
        status: wait status (negative for a signal) once it has ended.
        sight: its beacon, or None for a process that starts ranks itself.
        failed_at: when it began to fail: its last traceback's first line, or its end.
    """

    def __init__(self, rank: int, log: AppendFile | None) -> None:
        self.rank = rank
        self.log = log
        self.sight: Sight | None = None
        self.process: subprocess.Popen | None = None
        self.streams: list[OutputStream] = []
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self.status: int | None = None
        self.failed_at = 0.0
        self._traceback_at: float | None = None

    def start(
        self,
        command: Sequence[str],
        directory: str,
        environment: dict[str, str],
        cores: Sequence[int] | None,
        terminal: Sequence[tuple[int, int] | None],
        inherited: Sequence[int] = (),
    ) -> None:
        """Start the process. `terminal` asks for a terminal of that size in place of a pipe, per stream. The rank gets
        the descriptors `inherited`."""
        sources, targets = zip(*(_channel(size) for size in terminal))
        agent = os.getpid()
        try:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=targets[0],
                stderr=targets[1],
                cwd=directory,
                env=environment,
                start_new_session=True,
                pass_fds=tuple(inherited),
                preexec_fn=lambda: _before_exec(agent, cores),
            )
        finally:
            for target in targets:
                os.close(target)
        self.streams = [OutputStream(number, source) for number, source in enumerate(sources, 1)]
        self.write_log([
            f"--- started as process {self.process.pid}: {' '.join(command)}".encode("utf-8", "surrogateescape")
        ])

    @property
    def pid(self) -> int:
        """The process. ValueError before it is started."""
        return self._started().pid

    def poll(self) -> int | None:
        """The process's wait status once it has ended."""
        return self._started().poll()

    def _started(self) -> subprocess.Popen:
        if self.process is None:
            raise ValueError(f"rank {self.rank} has not been started")
        return self.process

    @property
    def alive(self) -> bool:
        return self.process is not None and self.status is None

    @property
    def step(self) -> int | None:
        """The last step that it has begun, or None where it has no beacon."""
        place = self.sight.place() if self.sight else None
        return None if place is None else place.step

    def signal(self, number: int) -> None:
        """Send a signal to the rank itself, or a kill to everything in its session."""
        if not self.alive:
            return
        try:
            os.killpg(self.pid, number) if number == signal.SIGKILL else os.kill(self.pid, number)
        except ProcessLookupError:
            pass  # it has just ended, and the wait that follows says how

    def resize(self, rows: int, columns: int) -> None:
        """Give the rank's terminals the size of the launcher's."""
        for stream in self.streams if self.alive else ():
            if os.isatty(stream.source):
                ioctl(stream.source, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def keep(self, stream: OutputStream, data: bytes) -> list[bytes]:
        """Put data into the log and the tail, and return the whole lines."""
        lines = [_clean(line) for line in stream.lines.feed(data)]
        if stream.number == 2 and any(TRACEBACK.match(line) for line in lines):
            self._traceback_at = time.time()
        self.write_log(lines)
        self.tail.extend(lines)
        return lines

    def write_log(self, lines: Sequence[bytes]) -> None:
        """Write lines to the log, each with its time."""
        if self.log and lines:
            stamp = datetime.now(UTC).isoformat(timespec="milliseconds")[:-6].encode() + b"Z "
            self.log.write(b"".join(stamp + line + b"\n" for line in lines))

    def finish(self, status: int) -> None:
        """Note the end of the process."""
        self.status = status
        self.failed_at = self._traceback_at if status > 0 and self._traceback_at else time.time()
        for stream in self.streams:
            rest = _clean(stream.lines.rest())
            if rest:
                self.write_log([rest])
                self.tail.append(rest)
            os.close(stream.source)
        self.write_log([f"--- ended with status {status}".encode()])
        if self.log:
            self.log.close()
            self.log = None

    def last_words(self) -> str:
        """The end of what the rank said, within bounds."""
        return b"\n".join(self.tail)[-TAIL_BYTES:].decode("utf-8", "surrogateescape")


def _channel(size: tuple[int, int] | None) -> tuple[int, int]:
    """(our end, the rank's end) of a pipe, or of a terminal of the given rows and columns."""
    if size is None:
        return os.pipe()
    ours, theirs = pty.openpty()
    tty.setraw(theirs)  # no newline translation: the real terminal does that
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    return ours, theirs


def _before_exec(agent: int, cores: Sequence[int] | None) -> None:
    """Runs in the child: die with the agent, take default signal actions, stay on the given cores."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:  # the agent died before the line above
        os._exit(255)
    for number in (*FORWARDED_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if cores:
        os.sched_setaffinity(0, cores)


def _clean(line: bytes) -> bytes:
    """A line as a log keeps it: the last state of a live line, without terminal codes."""
    return _CONTROL.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])


def rank_environment(
    base: dict[str, str], rank: int, local_rank: int, local_ranks: int, world_size: int, master: tuple[str, int | str]
) -> dict[str, str]:
    """The environment of a rank: `base`, and its place in the world. `master` is where rank 0's store listens."""
    return {
        **{name: value for name, value in base.items() if not name.startswith(_THE_AGENTS_PLACE)},
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }


STACKS_TAKE = 0.5  # seconds that ranks have to write their stacks
AT_ONCE = 16  # ranks in one message
ENDED = 0  # the number without a question: the last calls of failed ranks


class RankObserver:
    """Inspects an agent's ranks.

    Args:
        index: of the host.
        limits: the numbers of the section `watch`.
    """

    def __init__(self, index: int, ranks: list[RankProcess], limits: dict[str, float]) -> None:
        self._index, self._ranks, self._limits = index, ranks, limits
        self._late: list[int] = []
        self._answers: list[tuple[float, Callable[[], Iterator[bytes]]]] = []

    @property
    def waiting(self) -> bool:
        """Whether an answer is due soon."""
        return bool(self._answers)

    def ask(self, request: int, stacks: str) -> None:
        """Answer a question, with stacks ("main" or "all" threads) or without ("")."""
        asked = set()
        for rank in self._ranks if stacks else ():
            if rank.alive and rank.sight and rank.sight.ask(rank.pid, everything=stacks == "all"):
                asked.add(rank.rank)
        due = time.monotonic() + (STACKS_TAKE if asked else 0.0)
        self._answers.append((due, lambda: self._answer(request, asked)))

    def due(self) -> Iterator[bytes]:
        """Lines to send now."""
        now = time.monotonic()
        ready = [answer for at, answer in self._answers if at <= now]
        self._answers = [each for each in self._answers if each[0] > now]
        for answer in ready:
            yield from answer()
        late = [rank.rank for rank in self._ranks if rank.alive and rank.sight and rank.sight.late(self._limits)]
        if late != self._late:
            self._late = late
            yield from encode_text({"type": "late", "host": self._index, "some": bool(late)}, "")

    def beat(self) -> list[list[list[Any]]]:
        """Short notes for the heartbeat: rank, step, phase and seconds in it, in lists that fit into a message."""
        notes: list[list[Any]] = []
        for rank in self._ranks:
            place = rank.sight.place() if rank.sight and rank.alive else None
            if place is not None:
                notes.append([rank.rank, place.step, place.phase, round(time.monotonic() - place.since, 1)])
        return [notes[at : at + AT_ONCE] for at in range(0, len(notes), AT_ONCE)]

    def farewell(self, rank: RankProcess) -> Iterator[bytes]:
        """Lines about a rank that has ended, without a question: its last call."""
        if rank.sight is not None:
            message = {"type": "place", "host": self._index, "request": ENDED, "rank": rank.rank}
            yield from encode_text(message, json.dumps(rank.sight.last(rank.pid)))

    def _answer(self, request: int, asked: set[int]) -> Iterator[bytes]:
        for rank in self._ranks:
            if rank.sight is None:
                continue
            told = rank.sight.tell(rank.pid, rank.alive, self._limits)
            if rank.rank in asked:
                told["stack"] = rank.sight.stack()
            message = {"type": "place", "host": self._index, "request": request, "rank": rank.rank}
            yield from encode_text(message, json.dumps(told))
        yield from encode_text({"type": "seen", "host": self._index, "request": request}, "")
