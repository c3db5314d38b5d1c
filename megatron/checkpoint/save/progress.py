"""Progress lines of tools."""

import sys
import time
from collections.abc import Callable

PAUSE = 5.0  # seconds between lines


def now_and_then(quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """A function that prints a line to standard error, at most one per `PAUSE`."""
    last = clock()

    def show(text: str) -> None:
        nonlocal last
        if not quiet and clock() - last >= PAUSE:
            last = clock()
            print(text, file=sys.stderr)

    return show
