"""The agent's answers to the launcher's questions: where its ranks are, which of them are late, their stacks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..wire.protocol import encode_text
from .ranks import RankProcess

STACKS_TAKE = 0.5  # seconds that ranks have to write their stacks
AT_ONCE = 16  # ranks in one message
ENDED = 0  # the number without a question: the last calls of failed ranks


class RankObserver:
    """Inspects an agent's ranks.

    Args:
        index: of the host.
        limits: the numbers of the section `watch`.
    """

    def __init__(self, index: int, ranks: list[RankProcess], limits: dict[str, float]) -> None:
        self._index, self._ranks, self._limits = index, ranks, limits
        self._late: list[int] = []
        self._answers: list[tuple[float, Callable[[], Iterator[bytes]]]] = []

    @property
    def waiting(self) -> bool:
        """Whether an answer is due soon."""
        return bool(self._answers)

    def ask(self, request: int, stacks: str) -> None:
        """Answer a question, with stacks ("main" or "all" threads) or without ("")."""
        asked = set()
        for rank in self._ranks if stacks else ():
            if rank.alive and rank.sight and rank.sight.ask(rank.pid, everything=stacks == "all"):
                asked.add(rank.rank)
        due = time.monotonic() + (STACKS_TAKE if asked else 0.0)
        self._answers.append((due, lambda: self._answer(request, asked)))

    def due(self) -> Iterator[bytes]:
        """Lines to send now."""
        now = time.monotonic()
        ready = [answer for at, answer in self._answers if at <= now]
        self._answers = [each for each in self._answers if each[0] > now]
        for answer in ready:
            yield from answer()
        late = [rank.rank for rank in self._ranks if rank.alive and rank.sight and rank.sight.late(self._limits)]
        if late != self._late:
            self._late = late
            yield from encode_text({"type": "late", "host": self._index, "some": bool(late)}, "")

    def beat(self) -> list[list[list[Any]]]:
        """Short notes for the heartbeat: rank, step, phase and seconds in it, in lists that fit into a message."""
        notes: list[list[Any]] = []
        for rank in self._ranks:
            place = rank.sight.place() if rank.sight and rank.alive else None
            if place is not None:
                notes.append([rank.rank, place.step, place.phase, round(time.monotonic() - place.since, 1)])
        return [notes[at : at + AT_ONCE] for at in range(0, len(notes), AT_ONCE)]

    def farewell(self, rank: RankProcess) -> Iterator[bytes]:
        """Lines about a rank that has ended, without a question: its last call."""
        if rank.sight is not None:
            message = {"type": "place", "host": self._index, "request": ENDED, "rank": rank.rank}
            yield from encode_text(message, json.dumps(rank.sight.last(rank.pid)))

    def _answer(self, request: int, asked: set[int]) -> Iterator[bytes]:
        for rank in self._ranks:
            if rank.sight is None:
                continue
            told = rank.sight.tell(rank.pid, rank.alive, self._limits)
            if rank.rank in asked:
                told["stack"] = rank.sight.stack()
            message = {"type": "place", "host": self._index, "request": request, "rank": rank.rank}
            yield from encode_text(message, json.dumps(told))
        yield from encode_text({"type": "seen", "host": self._index, "request": request}, "")
