"""What a tool says while it works: a line now and then, however many steps there are."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

PAUSE = 5.0  # seconds between lines


def now_and_then(quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """A function that shows on standard error what it is told, unless it has just said something."""
    last = clock()

    def tell(text: str) -> None:
        nonlocal last
        if not quiet and clock() - last >= PAUSE:
            last = clock()
            print(text, file=sys.stderr)

    return tell
