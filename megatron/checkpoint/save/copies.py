"""A run's uploads: its own copies in a store, and the ones of its present branch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Copy:
    """A checkpoint in a store, with the checksum of its manifest. Two runs use the same names, but never have the same
    manifest."""

    url: str
    manifest: str


class Copies:
    """The copies that one run has made. Names at a URL do not identify the run, so the run keeps this account.

    Attributes:
        own: step -> copy of the run's state after it. Without steps of branches that the run has left.
        urls: of all copies that the run ever made.
    """

    def __init__(self, record: Callable[[int, Copy], None] | None = None) -> None:
        """`record` is called, from any thread, with each new copy."""
        self.own: dict[int, Copy] = {}
        self.urls: set[str] = set()
        self._record = record

    def add(self, step: int, copy: Copy) -> None:
        """Add a complete copy."""
        known = self.own.get(step) == copy
        self.own[step] = copy
        self.urls.add(copy.url)
        if self._record is not None and not known:
            self._record(step, copy)

    def go_back(self, step: int) -> None:
        """Forget copies of later steps, of a branch that the run leaves. -1: it starts from the beginning."""
        self.own = {each: copy for each, copy in self.own.items() if each <= step}

    def within(self, url: str) -> list[int]:
        """Steps of its own copies in a store's folder, oldest first."""
        return sorted(step for step, copy in self.own.items() if copy.url.rpartition("/")[0] == url.rstrip("/"))
