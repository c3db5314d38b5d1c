"""A command ends when its output is no longer read, as in `deepy data batch RUN | head`."""

import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

from megatron.extras import missing

LIVE = r"\r(\x1b\[2?K)?"  # how a line of progress begins, on standard error
READER_LEFT = 128 + signal.SIGPIPE  # the status of a program that the system ends for this


# Characters that move a terminal's cursor, change its title or reverse the order of letters. Bold is harmless.
_CONTROL = re.compile(
    "\x1b(?!\\[[01]m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    """`text` for a terminal, where a file, a model or a name may be its author: control characters as \\u001b."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _ReaderLeft(BaseException):
    """No error of the command's: it passes by whoever catches those."""


class _Output:
    """A text stream that shows control characters as text, and distinguishes a closed pipe from a failed disk."""

    def __init__(self, stream: Any, live: str = "") -> None:
        self._stream, self._live = stream, re.compile(live)

    def write(self, text: str) -> int:
        begin = self._live.match(text)
        end = begin.end() if begin else 0
        try:
            return self._stream.write(text[:end] + visible(text[end:]))
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
    """Run a command's `main`. It ends without a word, with status 141, once the reader of its output has gone.

    An optional package that is not installed is a message and status 2."""
    before, errors = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Output(before), _Output(errors, LIVE)
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
        sys.stdout, sys.stderr = before, errors
