"""A file that grows by whole pieces, and survives a full disk.

A log must not end a run: pieces that cannot be written wait in memory, up to a limit, and are written when there is
space again. The user gets a warning at the beginning and at the end."""

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from megatron.config.file_access import open_plain

ROOM = 4 << 20  # most waiting bytes. Then the oldest pieces are dropped
AGAIN = 1.0  # seconds between two attempts while the disk is full


def warn(text: str) -> None:
    sys.stderr.write(f"warning: {text}\n")
    sys.stderr.flush()


class AppendFile:
    """Appends pieces to a file. `write` never raises.

    Args:
        path: of the file. Its folder is made.
        sync: whether a piece is on the disk when `write` returns.
        complain: called when writing fails, and when it works again.
        gap: makes a piece in the place of n lost bytes. None: no such piece.

    Raises:
        OSError: the folder cannot be made or written. A full disk raises nothing.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        sync: bool = False,
        complain: Callable[[str], None] = warn,
        gap: Callable[[int], bytes] | None = None,
    ) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A link in another user's folder could lead to any file of this user.
        self._handle = open_plain(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
        self._sync, self._complain, self._gap = sync, complain, gap
        self._waiting: deque[bytes] = deque()
        self._size = self._lost = 0
        self._failing_since: float | None = None
        self._tried = 0.0

    @property
    def waiting(self) -> int:
        return self._size

    def write(self, piece: bytes) -> None:
        """Append a piece now, or as soon as there is room."""
        self._waiting.append(piece)
        self._size += len(piece)
        while self._size > ROOM and len(self._waiting) > 1:
            gone = len(self._waiting.popleft())
            self._size, self._lost = self._size - gone, self._lost + gone
        if self._failing_since is None or time.monotonic() - self._tried >= AGAIN:
            self._drain()

    def close(self) -> None:
        """Try a last time, and close the file."""
        if self._waiting:
            self._drain()
        if self._waiting:
            self._complain(f"{self.path}: its last {self._size} bytes are lost")
        os.close(self._handle)

    def _drain(self) -> None:
        self._tried = time.monotonic()
        try:
            if self._lost and self._gap:
                self._append(self._gap(self._lost))
            lost, self._lost = self._lost, 0
            while self._waiting:
                self._append(self._waiting[0])
                self._size -= len(self._waiting.popleft())
            if self._sync:
                os.fsync(self._handle)
        except OSError as error:
            if self._failing_since is None:
                self._failing_since = time.monotonic()
                self._complain(f"{self.path} cannot be written ({error.strerror}): the run continues and tries again")
            return
        if self._failing_since is not None:
            passed, self._failing_since = time.monotonic() - self._failing_since, None
            left = f"{lost} bytes are missing" if lost else "nothing is missing"
            self._complain(f"{self.path} is written again after {passed:.0f} s: {left}")

    def _append(self, piece: bytes) -> None:
        before = os.fstat(self._handle).st_size
        view = memoryview(piece)
        try:
            while view:
                view = view[os.write(self._handle, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, before)
            raise
