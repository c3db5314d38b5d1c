"""`deepy.py --status RUN` and `--stacks RUN`: a running job is asked, over a socket that only its own user can use.

The launcher listens on a Unix socket without a file (Linux's abstract names), and notes its name in the run's folder,
`launcher.json`. The caller must be the same user. Nothing listens on the network, so the question is asked on the
launcher's machine.
"""

from __future__ import annotations

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.config.file_access import parse_json, read_plain, replace_file
from megatron.config.problems import UserError, counted

from .diagnosis import Rank, diagnose
from .watch import RankWatch, stacks, table

FILE = "launcher.json"
QUESTIONS = ("status", "stacks")
Answer = Callable[[str, Callable[[str], None]], None]
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

    def __init__(self, answer: Answer, selector: selectors.BaseSelector, folder: Path | None) -> None:
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


def of_ranks(watch: RankWatch) -> Answer:
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


def instead_of_ranks(what: str) -> Answer:
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
                raise UserError(
                    f"the launcher of {run} runs on {host}: ask there{_there(note, run, question)}"
                ) from None
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
