"""How a rank that is done ends its process."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def leave_process(status: int) -> NoReturn:
    """As `sys.exit`, but without taking the interpreter apart.

    A thread of gloo may hold the tensors of the last collective for a moment after it has returned, on a busy machine
    until the process ends. If it frees them while the interpreter is being taken apart, it asks for Python's lock, is
    ended for that, and ends the process. This is "terminate called without an active exception", SIGABRT, after a
    complete run. So threads of Python's own are waited for, what was registered for the end is called, and then nothing
    else happens.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does first: executors, and other threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # its reader is gone, or it is closed
            status = status or 1
    os._exit(status)
