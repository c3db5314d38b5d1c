"""The launcher's watch over the ranks: asks the agents where they are, and says and acts when the run hangs.

`deepy.py --status RUN` and `--stacks RUN` ask a running job, over a socket that only its own user can use. The launcher
listens on a Unix socket without a file (Linux's abstract names), and notes its name in the run's folder,
`launcher.json`. Nothing listens on the network, so the question is asked on the launcher's machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import shlex
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.file_access import parse_json, read_plain, replace_file
from megatron.config.problems import UserError, counted

from ..agent.ranks import ENDED
from ..report.console import HANG, Failure, log
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


FILE = "launcher.json"
QUESTIONS = ("status", "stacks")
Reply = Callable[[str, Callable[[str], None]], None]
_NAME = re.compile("deepy-[0-9a-f]{32}")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
ANSWER_TAKES = 30.0
LONGEST = 1 << 16  # bytes of the note


class InquirySocket:
    """Where a running launcher can be asked.

    Args:
        answer: gets a question, and the function for the answer, now or later.
        selector: of the launcher's loop.
        folder: the run's directory on this machine. Without one no question can be asked.
    """

    def __init__(self, answer: Reply, selector: selectors.BaseSelector, folder: Path | None) -> None:
        self._answer, self._selector = answer, selector
        self._socket: socket.socket | None = None
        if folder is None:
            return
        self._file = folder / FILE
        name = f"deepy-{secrets.token_hex(16)}"  # see `_NAME`
        note = {"host": socket.gethostname(), "process": os.getpid(), "socket": name, "started": time.time()}
        note |= {"slurm_job": job} if (job := os.environ.get("SLURM_JOB_ID")) else {}
        self._note = json.dumps(note) + "\n"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, self._note)
        except OSError:  # a folder that is on other machines, or a full disk: the run continues without
            return
        self._socket = here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        here.bind(f"\0{name}")
        here.listen(8)
        here.setblocking(False)
        selector.register(here, selectors.EVENT_READ, lambda: self._called(here))

    def _called(self, here: socket.socket) -> None:
        try:
            caller, _ = here.accept()
        except OSError:
            return
        if not _same_user(caller):
            caller.close()
            return
        caller.setblocking(False)
        self._selector.register(caller, selectors.EVENT_READ, lambda: self._asked(caller))

    def _asked(self, caller: socket.socket) -> None:
        self._selector.unregister(caller)
        try:
            question = caller.recv(64).decode(errors="replace").strip()
        except OSError:
            question = ""
        if question not in QUESTIONS:
            caller.close()
            return
        self._answer(question, lambda text: _send(caller, text))

    def close(self) -> None:
        """Answer no further question."""
        if self._socket is None:
            return
        self._selector.unregister(self._socket)
        self._socket.close()
        try:
            if self._file.read_text() == self._note:  # not that of another launcher
                self._file.unlink()
        except OSError:
            pass


def of_ranks(watch: RankWatch) -> Reply:
    """Answers for as long as ranks run: all agents are asked first."""
    begin = time.monotonic()

    def text(question: str, ranks: list[Rank]) -> str:
        if question == "stacks":
            return stacks(ranks)
        found, job = diagnose(ranks), watch.launcher.job
        minutes, size = (time.monotonic() - begin) / 60, job.world_size
        head = f"{counted(size, 'rank')} on {counted(len(job.hosts), 'host')}"
        head += f", restart {job.attempt}" * bool(job.attempt)
        return (
            f"{head}, started {minutes:.0f} min ago\n{table(ranks)}{'the run hangs: ' * found.late}{found.sentence}\n"
        )

    def answer(question: str, tell: Callable[[str], None]) -> None:
        watch.ask("main" if question == "stacks" else "", lambda ranks: tell(text(question, ranks)))

    return answer


def instead_of_ranks(what: str) -> Reply:
    """Answers where none is running, with what the launcher does meanwhile."""
    begin = time.monotonic()
    return lambda question, tell: tell(f"no rank is running: {what}, since {time.monotonic() - begin:.0f} s\n")


def pause(seconds: float, folder: Path, why: str) -> None:
    """Pause, and answer questions about the reason and the end of the pause."""
    end = time.monotonic() + seconds

    def answer(question: str, tell: Callable[[str], None]) -> None:
        tell(f"no rank is running: {why}, continuing in {max(end - time.monotonic(), 0):.0f} s\n")

    with selectors.DefaultSelector() as selector:
        window = InquirySocket(answer, selector, folder)
        try:
            while (left := end - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    key.data()
        finally:
            window.close()


def _same_user(other: socket.socket) -> bool:
    credentials = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.geteuid()


def _send(caller: socket.socket, text: str) -> None:
    """In a thread, so that a caller who does not read blocks no other."""

    def send() -> None:
        with caller:
            try:
                caller.settimeout(ANSWER_TAKES)
                caller.sendall(text.encode("utf-8", "replace"))
            except OSError:  # the caller has gone
                pass

    threading.Thread(target=send, daemon=True).start()


def _there(note: dict[str, Any], run: Path, question: str) -> str:
    """The command that asks from within the Slurm job of a launcher, "" for a launcher outside of Slurm."""
    job = str(note.get("slurm_job", ""))
    if not job.isdecimal():
        return ""
    step = ["srun", "--overlap", f"--jobid={job}", "--nodes=1", "--ntasks=1", f"--nodelist={note['host']}"]
    return f": {shlex.join([*step, sys.executable, sys.argv[0], f'--{question}', str(run)])}"


def ask(run: Path, question: str) -> str:
    """The answer of a run's launcher.

    Args:
        run: the run's directory.
        question: "status" or "stacks".

    Raises:
        UserError: no launcher of this run is running here.
    """
    try:
        note = parse_json(read_plain(run / FILE, LONGEST))
        host, process, name = str(note["host"]), int(note["process"]), str(note["socket"])
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a launcher's socket")
    except (FileNotFoundError, NotADirectoryError):
        what = "has no launcher at work" if run.is_dir() else "is not a folder"
        raise UserError(
            f"{run} {what}: give the directory of a run (run.dir) that deepy.py has started and that has not ended"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{run / FILE} cannot be read: {error!r}. Remove it if no launcher is running") from None
    gone = f"the launcher of {run} (process {process} on {host}) is gone"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(ANSWER_TAKES)
        try:
            line.connect(f"\0{name}")
        except OSError:
            if host != socket.gethostname():
                raise UserError(f"the launcher of {run} is on {host}: ask there{_there(note, run, question)}") from None
            raise UserError(gone) from None
        if not _same_user(line):
            raise UserError(f"the launcher of {run} belongs to another user: only the one who started it can ask")
        try:
            line.sendall(f"{question}\n".encode())
            answer = b"".join(iter(lambda: line.recv(1 << 16), b"")).decode("utf-8", "replace")
        except TimeoutError:
            raise UserError(f"the launcher of {run} (process {process} on {host}) does not answer") from None
        except OSError:
            raise UserError(gone) from None
    if not answer:  # it ends just now
        raise UserError(gone)
    return answer
