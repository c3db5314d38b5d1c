"""What a run has uploaded: which checkpoints elsewhere are its own, and which of them it still stands by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Copy:
    """A checkpoint elsewhere.

    Attributes:
        url: of the checkpoint itself.
        manifest: checksum of its manifest. Two runs use the same names, but never have the same manifest.
    """

    url: str
    manifest: str


class Copies:
    """The copies that one run has made. Names at a URL cannot tell whose they are, so the run keeps its own account.

    Attributes:
        own: step -> copy of the state that the run had after it. Copies of steps that the run went back from are not
            among them.
        urls: of all copies that the run ever made, those as well.
    """

    def __init__(self, record: Callable[[int, Copy], None] | None = None) -> None:
        """`record` is called, from whatever thread, with each copy that is new."""
        self.own: dict[int, Copy] = {}
        self.urls: set[str] = set()
        self._record = record

    def add(self, step: int, copy: Copy) -> None:
        """The copy is there in full."""
        known = self.own.get(step) == copy
        self.own[step] = copy
        self.urls.add(copy.url)
        if self._record is not None and not known:
            self._record(step, copy)

    def go_back(self, step: int) -> None:
        """The run goes on from this step (-1: from its beginning): later ones are of a branch that it leaves."""
        self.own = {each: copy for each, copy in self.own.items() if each <= step}

    def within(self, url: str) -> list[int]:
        """Steps of its own copies in a folder elsewhere, oldest first."""
        return sorted(step for step, copy in self.own.items() if copy.url.rpartition("/")[0] == url.rstrip("/"))
