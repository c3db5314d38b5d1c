"""Processes that a test may kill."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch


def child(work: Callable[..., Any], *arguments: Any) -> int:
    """Run `work` in a forked process and return its id; it ends with status 0, or 1 after printing what it raised.

    A fork starts at once, where a new interpreter needs seconds for torch, so that many can be killed. It has the
    parent's thread pool in name only, hence one thread.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)
        work(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
