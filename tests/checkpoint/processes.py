"""Processes that a test may kill."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any

# They are forked from a server of one thread that has done nothing but import: to fork pytest itself, in which torch
# has threads, may hang. A new interpreter needs seconds for its imports, and many processes are killed.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pytest", "tests.checkpoint.model"])  # which imports torch and what is tested


def child(work: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start `work`, which must be picklable, in a process of one thread."""
    process = _CONTEXT.Process(target=_alone, args=(work, arguments), daemon=True)
    process.start()
    return process


def ended(work: Callable[..., Any], *arguments: Any) -> int | None:
    """Run `work` to its end: 0, 1 after printing what it raised, or -n for signal n."""
    process = child(work, *arguments)
    process.join()
    return process.exitcode


def _alone(work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    work(*arguments)
