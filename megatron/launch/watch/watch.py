"""The launcher's watch over the ranks: asks the agents where they are, and says and acts when the run hangs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.file_access import replace_file
from ..agent.ranks import ENDED
from ..report.console import log
from ..report.status import HANG, Failure
from ..wire.specification import Specification
from .diagnosis import Diagnosis, Rank, diagnose, disagreement, rank_of

if TYPE_CHECKING:
    from ..launcher.launcher import Launcher

PATIENCE = 4.0  # seconds that agents have to answer
AGAIN = 10.0  # seconds between two looks while ranks are late
Answer = Callable[[list[Rank]], None]


class Inquiry:
    """A question to all agents, and what has been answered."""

    def __init__(self, number: int, hosts: set[int], then: Answer) -> None:
        self.number, self.open, self.then = number, hosts, then
        self.until = time.monotonic() + PATIENCE
        self.texts: dict[int, str] = {}


class RankWatch:
    """Watches the ranks of a launcher.

    Args:
        launcher: whose hosts are asked, and which ends the run.
        folder: where the report of a hang goes. None keeps none.
        hang: "report", "stop" or "off".
    """

    def __init__(self, launcher: Launcher, folder: Path | None, hang: str) -> None:
        self.launcher, self.folder, self.hang = launcher, folder, hang
        self.inquiries: dict[int, Inquiry] = {}
        self.number = 0
        self.late: set[int] = set()  # hosts with ranks over their limit
        self.next_look = 0.0
        self.reported: str | None = None  # who was at fault, when that was said
        self.last: dict[int, tuple[int, str, float]] = {}  # step, phase, seconds in it, by the last heartbeat
        self.ended: dict[int, str] = {}  # what ranks called last that have failed

    # ---- asking

    def ask(self, stacks: str, then: Answer) -> None:
        """Ask every agent for the places of its ranks, and call `then` with all ranks once they have, or patience ends.

        Args:
            stacks: "" for none, "main" for main threads, "all" for all threads.
        """
        self.number += 1
        hosts = {index for index, host in enumerate(self.launcher.hosts) if host.phase == "running" and host.link}
        self.inquiries[self.number] = Inquiry(self.number, hosts, then)
        self.launcher.broadcast({"type": "look", "request": self.number, "stacks": stacks})

    def hear(self, index: int, message: dict[str, Any]) -> None:
        """A message of an agent that is for the watch."""
        if message["type"] == "late":
            (self.late.add if message["some"] else self.late.discard)(index)
            return
        if message["type"] == "beat":
            for rank, step, phase, age in message.get("at", ()):
                self.last[int(rank)] = int(step), str(phase), float(age)
            return
        inquiry = self.inquiries.get(message["request"])
        texts = self.ended if message["request"] == ENDED else inquiry.texts if inquiry else {}
        if message["type"] == "place":
            rank = int(message["rank"])
            texts[rank] = texts.get(rank, "") + message["text"]
        elif inquiry:
            inquiry.open.discard(index)

    def tick(self, now: float) -> None:
        """To be called often."""
        for number, inquiry in list(self.inquiries.items()):
            if not inquiry.open or now > inquiry.until:
                del self.inquiries[number]
                inquiry.then(self._ranks(inquiry))
        if self.hang == "off" or self.launcher.stopping or self.launcher.signals:
            return
        if not self.late and self.reported is not None and not self.inquiries:
            log("the run continues: no rank is over its limit any more")
            self.reported = None
        if self.late and not self.inquiries and now > self.next_look:
            self.next_look = now + AGAIN
            self.ask("", self._judge)

    def _ranks(self, inquiry: Inquiry) -> list[Rank]:
        found = []
        for index, rank, host in self._places():
            try:
                found.append(rank_of(json.loads(inquiry.texts[rank]), host))
            except (KeyError, TypeError, ValueError):
                step, phase, age = self.last.get(rank, (-1, "", 0.0))
                silent = "silent" if index in inquiry.open or self.launcher.hosts[index].phase == "lost" else ""
                found.append(Rank(rank, host, state=silent, step=step, phase=phase, age=age))
        return found

    def _places(self) -> Iterator[tuple[int, int, str]]:
        """Of each rank the number of its host, its own, and its host's name."""
        job: Specification = self.launcher.job
        for index, host in enumerate(job.hosts):
            first = job.first_rank(index)
            for rank in range(first, first + len(host.slots)):
                yield index, rank, host.name

    # ---- a failure

    def explained(self, first: Failure) -> Failure:
        """The failure to show. Where ranks did not call the same thing, gloo ends the rank that detects it. Then the
        failure of the rank at fault, if it has failed itself, with all calls."""
        if first.rank is None or first.reason:
            return first
        ranks = []
        for _, rank, host in self._places():
            with contextlib.suppress(KeyError, TypeError, ValueError):
                ranks.append(rank_of(json.loads(self.ended[rank]), host))
        found = disagreement(ranks)
        if found is None:
            return first
        own = [each for each in self.launcher.failures if each.rank in found.culprits and not each.reason]
        return replace(own[0] if own else first, disagreement=found.sentence)

    # ---- a hang

    def _judge(self, ranks: list[Rank]) -> None:
        found = diagnose(ranks)
        if found.late and found.culprits and f"{found.kind} {found.culprits}" != self.reported:
            self.ask("all", self._act)

    def _act(self, ranks: list[Rank]) -> None:
        found = diagnose(ranks)
        if not found.late or self.launcher.stopping:
            return
        self.reported = f"{found.kind} {found.culprits}"
        file = self._write(found, ranks)
        log(f"the run hangs: {found.sentence}" + (f" (stacks of all ranks: {file})" if file else ""))
        if self.hang == "stop":
            guilty = next(each for each in ranks if each.rank == found.culprits[0])
            now, reason = time.time(), f"hang: {found.sentence}"
            self.launcher.end_for(Failure(now, guilty.host, guilty.rank, HANG, reason, since=now - guilty.age))

    def _write(self, found: Diagnosis, ranks: list[Rank]) -> Path | None:
        """The sentence, each rank's place and each rank's stacks, in a file of the run."""
        if self.folder is None:
            return None
        now = datetime.now(UTC)
        file = self.folder / f"hang_{now:%Y%m%d_%H%M%S}.txt"
        try:
            replace_file(file, f"{now:%Y-%m-%d %H:%M:%S} UTC\n{found.sentence}\n\n{table(ranks)}\n{stacks(ranks)}")
        except OSError as error:
            log(f"warning: {file} cannot be written: {error.strerror}")
            return None
        return file


def table(ranks: list[Rank]) -> str:
    """One line per rank."""
    rows = [("rank", "host", "process", "state", "for", "where", "waits in")]
    for each in ranks:
        call = f"{each.waiting.text} ({each.waiting.elements:,} elements)" if each.waiting else ""
        age = f"{each.age:,.1f} s"
        rows.append((str(each.rank), each.host, str(each.pid or ""), each.state, age, each.where, call))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
    return "".join(f"{line}\n" for line in lines)


def stacks(ranks: list[Rank]) -> str:
    """Each rank's stack, or why there is none."""
    said = []
    for each in ranks:
        why = "it is stopped" if each.state == "stopped" else f"its process is {each.state or 'not known'}"
        text = each.stack.rstrip() or f"  no stack: {why if each.phase else 'it has not come to its first line'}"
        said.append(f"rank {each.rank} on {each.host}, in {each.where}\n{text}\n")
    return "\n".join(said)
