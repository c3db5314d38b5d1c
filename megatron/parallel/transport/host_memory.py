"""Memory that the ranks of a group on one host share, and their synchronisation.

Each rank has a slab that the others map: an anonymous file (`memfd_create`). It is in no folder, so that it ends with
the processes, and the size of /dev/shm does not limit it. Other ranks open it through /proc, under one user in one
container. A random word in its name identifies it, for a process of another host may have the same number. Ranks meet
by eight bytes through a pipe from each to each. A process that ends closes its pipes, which the others detect at once.
"""

import contextlib
import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

WORD = 8  # bytes of a meeting's message
Share = Callable[[list[int]], list[list[int]]]  # gathers numbers of all ranks of a group


class HostGroup:
    """Shared memory of a group.

    Args:
        rank, size: place of this rank in the group, and number of ranks.
        slab: bytes of each rank's part.
        share: gathers numbers of all ranks. All ranks call it together.

    Attributes:
        slabs: [slab] bytes of each rank.
        reason: why there is no such memory. Empty where the ranks are on several hosts.
    """

    def __init__(self, rank: int, size: int, slab: int, share: Share) -> None:
        self.rank, self.size = rank, size
        self.slabs: list[Tensor] = []
        self.reason = ""
        self._ends: dict[int, tuple[int, int]] = {}  # of each other rank: file descriptors to read and to write
        self._open: set[int] = set()
        self._maps: list[mmap.mmap] = []
        self._broken = ""
        mine: list[int] = []
        word, pipes = 0, dict[int, tuple[int, int]]()
        with self._noted():
            word = int.from_bytes(os.urandom(7), "little")
            pipes = {other: self._pipe() for other in range(size) if other != rank}
            mine = [self._keep(_anonymous(word, slab)), *(pipes.get(other, (0, 0))[1] for other in range(size))]
        told = share([not self.reason, *_host(), os.getpid(), word, *(mine or [0] * (size + 1))])
        one_host = len({tuple(each[1:3]) for each in told}) == 1
        if all(each[0] for each in told) and one_host:
            with self._noted():
                self._reach(told, slab)
                self._ends = {other: (pipes[other][0], self._ends[other][1]) for other in pipes}
        ready = share([bool(self.slabs) and not self.reason])
        if all(each[0] for each in ready):
            for end in (mine[0], *(write for _, write in pipes.values())):  # others have opened them
                self._shut(end)
            return
        self.close()
        self.reason = (self.reason or "another rank could not") if one_host else ""

    @property
    def ready(self) -> bool:
        """Whether there is such memory, equal on all ranks."""
        return bool(self.slabs)

    def meet(self, word: bytes, patience: Callable[[], timedelta]) -> None:
        """Return when all ranks have called it with the same word of eight bytes. Their earlier writes are then
        visible.

        Args:
            patience: gives the timeout.

        Raises:
            RuntimeError: a rank has ended, did not call in time, or called with another word. Later calls raise, too.
        """
        if self._broken:
            raise RuntimeError(self._broken)
        try:
            self._meet(word, patience)
        except BaseException as error:
            self._broken = str(error) or f"a meeting of ranks was broken off by {type(error).__name__}"
            raise

    def _meet(self, word: bytes, patience: Callable[[], timedelta]) -> None:
        for other, (_, write) in self._ends.items():
            try:
                os.write(write, word)
            except BrokenPipeError:
                raise RuntimeError(_gone(other)) from None
        missing, poll, until = {read: other for other, (read, _) in self._ends.items()}, select.poll(), 0.0
        for end in missing:
            poll.register(end, select.POLLIN)
        while missing:
            for end, _ in poll.poll(1000):
                got = os.read(end, WORD)
                if not got:
                    raise RuntimeError(_gone(missing[end]))
                if got != word:
                    raise RuntimeError(
                        f"ranks of a group came to different operations: place {missing[end]} to another one than "
                        f"place {self.rank}"
                    )
                poll.unregister(end)
                del missing[end]
            if missing:
                until = until or time.monotonic() + patience().total_seconds()
                if time.monotonic() > until:
                    raise RuntimeError(
                        f"Timed out waiting {round(patience() / timedelta(milliseconds=1))}ms in memory of the host "
                        f"for the ranks at places {', '.join(map(str, sorted(missing.values())))} of the group"
                    )

    def close(self) -> None:
        """Release memory and pipes."""
        self.slabs, self._ends = [], {}
        for end in list(self._open):
            self._shut(end)
        for each in self._maps:
            with contextlib.suppress(BufferError):  # a tensor still uses it, and will release it
                each.close()
        self._maps = []

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Turn errors of the system into the reason."""
        try:
            yield
        except (OSError, AttributeError, ValueError) as error:  # no such call on other systems than Linux
            self.reason = str(error)

    def _reach(self, told: Sequence[Sequence[int]], slab: int) -> None:
        """Open the other ranks' slabs, and the ends of their pipes to this one."""
        slabs = []
        for other, (_, _, _, process, word, memory, *pipes) in enumerate(told):
            folder = Path(f"/proc/{process}/fd")
            if os.readlink(folder / str(memory)) != f"/memfd:{_name(word)} (deleted)":
                raise OSError(f"process {process} is another one than rank {other} of the group")
            end = self._keep(os.open(folder / str(memory), os.O_RDWR | os.O_CLOEXEC))
            self._maps.append(mmap.mmap(end, slab))
            self._shut(end)  # the map has it
            slabs.append(torch.frombuffer(self._maps[-1], dtype=torch.uint8))
            if other != self.rank:
                write = os.open(folder / str(pipes[self.rank]), os.O_WRONLY | os.O_CLOEXEC)
                self._ends[other] = -1, self._keep(write)
        self.slabs = slabs

    def _pipe(self) -> tuple[int, int]:
        read, write = os.pipe()
        return self._keep(read), self._keep(write)

    def _keep(self, end: int) -> int:
        self._open.add(end)
        return end

    def _shut(self, end: int) -> None:
        self._open.discard(end)
        os.close(end)


def _anonymous(word: int, size: int) -> int:
    """An anonymous file with allocated pages, so that a lack of memory is an error now and not a signal later."""
    end = os.memfd_create(_name(word), os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(end, 0, size)
    except OSError:
        os.close(end)
        raise
    return end


def _name(word: int) -> str:
    return f"deepy-{word:x}"


def _host() -> tuple[int, int]:
    """Numbers of the machine (start and name) and of its process namespace: equal where a rank can find another in
    /proc.

    The name separates hosts, as for checkpoints and tables of algorithms."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        name = blake2b(f"{boot} {socket.gethostname()}".encode(), digest_size=7)
        return int.from_bytes(name.digest(), "little"), os.stat("/proc/self/ns/pid").st_ino
    except (OSError, ValueError):
        return int.from_bytes(os.urandom(7), "little"), 0


def _gone(place: int) -> str:
    return f"Connection closed by peer: the rank at place {place} of the group has ended"
