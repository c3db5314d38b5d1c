"""What a command does when nobody reads its output any more, as in `tools/data/batch.py RUN | head`: it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from megatron.extras import missing

READER_LEFT = 128 + signal.SIGPIPE  # the status of a program that the system ends for this


class _ReaderLeft(BaseException):
    """No error of the command's: it passes by whoever catches those."""


class _Output:
    """A text stream that tells a closed pipe from a failure of a disk."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            raise _ReaderLeft from None

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise _ReaderLeft from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def piped(main: Callable[[], int | None]) -> int | None:
    """Run a command's `main`; it ends without a word, with status 141, once the reader of its output has gone.

    An optional package that is not installed is a message and status 2.
    """
    before = sys.stdout
    sys.stdout = _Output(before)
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except ModuleNotFoundError as error:
        if (text := missing(error.name)) is None:
            raise
        print(f"error: {text}", file=sys.stderr)
        return 2
    except _ReaderLeft:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, before.fileno())  # what is still in the buffer goes there when Python ends
        os.close(nowhere)
        return READER_LEFT
    finally:
        sys.stdout = before
