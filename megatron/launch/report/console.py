"""The launcher's output: the ranks' output, how they ended, and the first failure, once, last, with its known cause."""

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO

from megatron.report.console import ERASE, StatusLine, columns_of, wrapped

HOST_LOST = 255
HANG = 76
NO_PROGRESS = 77  # started again and again, and never came further
STOPPED_EARLY = 128 + signal.SIGUSR1  # warned by the scheduler, saved, and not at the end: start it again
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = "stopped by the launcher"  # the reason of a rank that ended because another had failed
LEFT = "it ended with status 0 before its work was done (a call of exit)"  # the same of a rank that left the others
AT_ONCE = 10.0  # seconds within which an end may be noticed late
# What a rank says whose peer has gone.
COMPLAINT = re.compile(
    r"connection (was likely )?(closed|reset|refused)|socket (unexpectedly )?closed|peer closed the "
    r"connection|broken pipe"
    r"|connectFullMesh|ncclRemoteError",
    re.IGNORECASE,
)
# Not SIGABRT, with which NCCL's watchdog ends a rank that has lost a peer.
KILLS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
FORWARDED_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Failure:
    """The bad end of a rank, or the loss of a host."""

    time: float  # seconds since the epoch, by the launcher's clock, when it failed
    host: str  # name of the host
    rank: int | None  # global rank, or None where the host as a whole was lost or could not start
    status: int  # exit status as `wait` gives it: negative for a signal
    reason: str = ""  # why, where no rank says it
    text: str = ""  # the end of the rank's output.
    # The last one that the rank had begun, from 0. -1 before the first, or None where it has no beacon.
    step: int | None = None
    # When it stopped to get on, by the launcher's clock, where that was before it was ended for it (a hang)
    since: float | None = None
    shown: bool = False  # whether the console has shown all that the rank said
    disagreement: str = ""  # what ranks called differently, where the run failed for that


def exit_status(status: int) -> int:
    """A wait status as a shell would give it: 128 + n for signal n."""
    return 128 - status if status < 0 else status


def signal_of(status: int) -> signal.Signals | None:
    """The signal behind a status (-n or 128 + n)."""
    number = -status if status < 0 else status - 128
    try:
        return signal.Signals(number) if number > 0 else None
    except ValueError:
        return None


def describe_status(status: int) -> str:
    """A status in words: "status 1", "SIGKILL (137)"."""
    if status == HANG:
        return f"hang (status {HANG})"
    name = signal_of(status)
    return f"{name.name} ({exit_status(status)})" if name else f"status {status}"


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The failure that came first. A rank's own end beats the loss of its host at the same moment.

    A rank that complains of a lost peer may do so before the peer's agent, on a busy host, has noticed the failure.
    Where a rank was killed or failed for a reason of its own at about that time, its failure came first. An agent sends
    the last words of one rank or few, so a rank without words may have complained, too: there only a kill comes first.
    """
    failures = sorted(failures, key=lambda each: (each.time, each.rank is None, each.rank or 0))
    if not failures:
        return None
    first = failures[0]
    silent = not first.text and not first.reason and first.rank is not None and 0 < first.status != HANG
    if not silent and not COMPLAINT.search(first.text):
        return first
    soon = (each for each in failures if each.time - first.time < AT_ONCE and not (silent and each.status > 0))
    return next((each for each in soon if _is_a_cause(each)), first)


def _is_a_cause(failure: Failure) -> bool:
    if failure.rank is None or failure.reason:
        return failure.reason == LEFT
    said = bool(failure.text) and not COMPLAINT.search(failure.text)
    return -failure.status in KILLS or (failure.status > 0 and said)


def stopped(status: int, sent: Iterable[int]) -> bool:
    """Whether a rank's status only says that it obeyed one of the signals `sent`."""
    return any(status in (-number, 128 + number) for number in sent)


def outcome(failures: list[Failure], sent: Iterable[int]) -> tuple[int, Failure | None]:
    """The status of the whole run, and the failure to show.

    Args:
        failures: every bad end.
        sent: signals that the launcher had to forward.

    Returns:
        (0, None) if all went well. (128 + n, None) if ranks ended by signal n that the launcher passed on, or at once
        because it came twice, and nothing else went wrong. Otherwise the first failure's status and that failure.
    """
    sent = tuple(sent)
    harmless = [x for x in failures if sent and x.rank is not None and (x.reason == STOPPED or stopped(x.status, sent))]
    first = first_failure(each for each in failures if each not in harmless)
    if first is None:
        obeyed = first_failure(each for each in harmless if stopped(each.status, sent))
        return (exit_status(obeyed.status) if obeyed else 128 + sent[-1] if harmless else 0), None
    return (HOST_LOST if first.rank is None else exit_status(first.status)), first


# In the order in which they are tried: the particular before the general.
CAUSES = (
    (
        r"CUDA out of memory|HIP out of memory|torch\.(cuda\.)?OutOfMemoryError",
        "the GPU's memory is full: lower training.micro_batch_size, turn on activation checkpointing, raise "
        "zero.stage. If torch reports much memory as reserved but unallocated, launch.environment="
        "{PYTORCH_ALLOC_CONF: 'expandable_segments:True'}",
    ),
    (
        r"DefaultCPUAllocator|Cannot allocate memory|MemoryError",
        "the host's memory is full: fewer ranks or data workers on this host, or a smaller model",
    ),
    (
        r"/dev/shm(?!/deepy-)|unable to (open|mmap|write to) shared memory|shared memory \(shm\)|Bus error",
        "/dev/shm is full or too small: docker run --shm-size=8g, or a larger tmpfs on /dev/shm",
    ),
    (
        r"Host key verification failed",
        "ssh does not know the host's key: connect once by hand (`ssh HOST true`) or add it to known_hosts",
    ),
    (
        r"Permission denied \((publickey|.*password)",
        "ssh has no key that the host accepts: ssh-copy-id HOST, or name the key in ~/.ssh/config",
    ),
    (
        r"Could not resolve hostname|Name or service not known|Temporary failure in name resolution",
        "a host's name means nothing here: check the hostfile and DNS or /etc/hosts",
    ),
    (
        r"Address already in use|EADDRINUSE",
        "the port is taken, by another run or a rest of one: without launch.master_port a free one is chosen",
    ),
    (
        r"^checkpoint\.levels: .*\[Errno",
        "the folder of a level of checkpoint.levels cannot be made on that host: fix the disk, or choose another path",
    ),
    (
        r"No space left on device|Errno 28",
        "a disk is full: checkpoints, logs or the temporary folder. See `df -h` on that host",
    ),
    (r"Disk quota exceeded|Errno 122", "the disk quota is used up"),
    (
        r"Read-only file system|Errno 30|Errno 13\] Permission denied",
        "a folder cannot be written to: choose another run.dir (checkpoints and logs are below it), or fix its rights",
    ),
    (r"Too many open files|Errno 24", "too many open files: raise `ulimit -n` on that host"),
    (
        r"no kernel image is available|CUDA driver version is insufficient|HIP error: invalid device function",
        "this torch build does not fit the GPU or its driver: `deepy doctor` shows both",
    ),
    (
        r"CUDA error: device-side assert",
        "an index was out of range on the GPU, often a token beyond the vocabulary. See CUDA_LAUNCH_BLOCKING=1",
    ),
    (
        r"CUDA error: (uncorrectable ECC|unspecified launch failure|an illegal memory access)|Xid",
        "the GPU or its memory failed: search for Xid in `dmesg` on that host and exclude the host (launch.exclude)",
    ),
    (
        r"invalid device ordinal|No CUDA GPUs are available|No HIP GPUs are available",
        "a rank has no GPU: more ranks than visible GPUs on that host (launch.ranks, slots=, CUDA_VISIBLE_DEVICES)",
    ),
    (
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms|"
        r"timed out.*(all_?reduce|broadcast|barrier|send|recv)|"
        r"wait timeout after|Socket Timeout",
        "a collective waited for a rank that did not come. Find the rank that hangs or has failed (its log is among "
        "the others), or a network that is cut. launch.timeout sets how long to wait",
    ),
    (
        r"ncclSystemError|ncclInternalError|ncclRemoteError|NCCL error|RCCL error",
        "NCCL failed: run again with NCCL_DEBUG=INFO. A wrong network interface (launch.interface) and small "
        "locked-memory limits (`ulimit -l`) are the usual causes",
    ),
    (
        r"(Connection (refused|reset|closed)|Broken pipe).*|connectFullMesh|Connection closed by peer",
        "a peer went away or cannot be reached: if no rank failed earlier, check launch.interface and firewalls",
    ),
    (
        r"ModuleNotFoundError: No module named '([^']+)'",
        "a Python package is missing on that host: pip install the package, or deepy with the extra that has it",
    ),
)
SIGNALS = {
    signal.SIGKILL: "killed from outside: mostly by the kernel for want of memory (see `dmesg`), or the scheduler",
    signal.SIGSEGV: "crashed in compiled code, mostly libraries that do not fit together. See PYTHONFAULTHANDLER=1",
    signal.SIGBUS: "/dev/shm ran out of room (docker --shm-size), or a memory-mapped data file was cut short",
    signal.SIGABRT: "a library gave up (abort): its message is in the rank's log",
    signal.SIGILL: "an instruction that this CPU does not have: a library was built for another machine",
    signal.SIGFPE: "an arithmetic fault in compiled code",
    signal.SIGTERM: "somebody asked it to stop: the scheduler, an operator, or a limit of the machine",
    signal.SIGXCPU: "the CPU time limit (`ulimit -t`) was reached",
    signal.SIGXFSZ: "the file size limit (`ulimit -f`) was reached",
    signal.SIGHUP: "the terminal or the connection it hung on was closed",
    signal.SIGPIPE: "it wrote to something that no process reads any more",
}


def hint_for(text: str, status: int) -> str | None:
    """The probable cause and the advice, or None where nothing is known."""
    for pattern, cause in CAUSES:
        if re.search(pattern, text, re.MULTILINE):
            return cause
    number = signal_of(status)
    return None if number is None else SIGNALS.get(number)


_START = "Traceback (most recent call last)"
_CHAINED = re.compile(r"(During handling of the above exception|The above exception was the direct cause)")
_TORCH = re.compile(r"^\[rank\d+\]: ")  # torch says what we say
YELLOW, PLAIN = "\x1b[33m", "\x1b[0m"
LINES = 80
LONGEST = 2000  # characters of a line that may be a status line
STATUS = StatusLine()  # that rank 0 has drawn on this terminal
PATIENCE = 0.5  # seconds


def log(text: str, stream: TextIO | None = None, *, colour: str = "") -> None:
    """Lines of the launcher's own, on standard error: standard output is the script's. Colours are for terminals
    without NO_COLOR."""
    stream = stream or sys.stderr
    terminal = stream.isatty()
    coloured = colour and terminal and not os.environ.get("NO_COLOR")
    lines = [f"deepy: {line}" for line in text.splitlines() or [""]]
    if terminal:
        lines = [wrapped(line, columns_of(stream), indent="deepy:   ") for line in lines]
    shown = "".join(f"{colour}{line}{PLAIN}\n" if coloured else f"{line}\n" for line in lines)
    stream.write(STATUS.above(shown, columns_of(stream)) if terminal else shown)
    stream.flush()


class RankConsole:
    """Writes ranks' output: whole lines with `[host:rank]` in front, or rank 0's text as it is.

    Rank 0's own text may stop in the middle of a line (`print` without buffering writes the line's end by itself). The
    others' lines wait for that end, but not longer than `PATIENCE`. A status line has no end: they go above it."""

    def __init__(self, plain: bool) -> None:
        self.plain = plain
        self._rests: dict[tuple[int, int], str] = {}
        self._unfinished: set[int] = set()  # streams where rank 0 is in the middle of a line
        self._waiting: dict[int, tuple[float, str]] = {}  # since when, and what
        self._last = ""  # rank 0's last line on standard output, as far as it has come

    def show(self, host: str, rank: int, stream: int, text: str) -> None:
        """Write a piece of output. Without a terminal of its own only whole lines are prefixed and shown."""
        if self.plain and rank == 0:
            head, end, tail = text.rpartition("\n")
            if end:
                self._write(stream, head + end)
                self._unfinished.discard(stream)
                self._release(stream)
            if tail:
                self._write(stream, tail)
            if not self._draws(stream, text) and tail:
                self._unfinished.add(stream)
            return
        text = self._rests.pop((rank, stream), "") + text
        *lines, rest = text.split("\n")
        if rest:
            self._rests[rank, stream] = rest
        shown = "".join(f"[{host}:{rank}] {line}\n" for line in lines)
        if stream in self._unfinished and shown:
            since, before = self._waiting.get(stream, (time.monotonic(), ""))
            self._waiting[stream] = since, before + shown
        else:
            self._write(stream, shown)

    def _draws(self, stream: int, text: str) -> bool:
        """Whether this text of rank 0 ends in a status line, which is then kept below other lines."""
        if stream != 1 or not sys.stdout.isatty():
            return False
        last = (self._last + text)[-LONGEST:]
        self._last = last.rpartition("\n")[2]
        if ERASE in last:
            STATUS.text = self._last.rpartition(ERASE)[2] if ERASE in self._last else ""
        return ERASE in self._last

    def close(self) -> None:
        """Write what waits, and remove a status line that rank 0 did not live to remove."""
        self.settle(0.0)
        self._write(1, STATUS.above("", columns_of(sys.stdout)))

    def settle(self, patience: float = PATIENCE) -> None:
        """Write what has waited longer than `patience` seconds, on a line of its own."""
        for stream, (since, _) in list(self._waiting.items()):
            if time.monotonic() - since >= patience:
                self._release(stream)

    def _release(self, stream: int) -> None:
        _, text = self._waiting.pop(stream, (0.0, ""))
        if text and stream in self._unfinished:
            self._unfinished.discard(stream)
            text = "\n" + text
        self._write(stream, text)

    @staticmethod
    def _write(stream: int, text: str) -> None:
        target = sys.stdout if stream == 1 else sys.stderr
        if text and not text.startswith(ERASE) and target.isatty():  # rank 0's console begins with the code itself
            text = STATUS.above(text, columns_of(target))
        target.buffer.write(text.encode("utf-8", "surrogateescape"))
        target.flush()


def last_traceback(text: str) -> str:
    """The last traceback of a text with the ones it is chained to, or the last lines without one."""
    lines = [_TORCH.sub("", line) for line in text.splitlines()]
    starts = [index for index, line in enumerate(lines) if line.startswith(_START)]
    if not starts:
        return "\n".join(lines[-20:])
    first = len(starts) - 1
    while first > 0 and any(_CHAINED.search(line) for line in lines[starts[first - 1] : starts[first]]):
        first -= 1
    shown = lines[starts[first] :]
    return "\n".join(shown if len(shown) <= LINES else [*shown[: LINES // 2], "    ...", *shown[-LINES // 2 :]])


def report(first: Failure, others: list[Failure], seconds: float, logs: str | None) -> str:
    """The end of a failed run, for people: traceback, who, how, why, where to read more."""
    lines = []
    if first.text.strip() and (not first.shown or _START in first.text):
        where = f"[{first.host}:{first.rank}] " if first.rank is not None else f"[{first.host}] "
        lines += [where + line for line in last_traceback(first.text).splitlines()]
    if first.rank is None:
        lines.append(f"deepy: the run failed: host {first.host} was lost after {seconds:.0f} s: {first.reason}")
    else:
        lines.append(
            f"deepy: the run failed: first failure: rank {first.rank} on {first.host}, "
            f"{describe_status(first.status)}, after {seconds:.0f} s" + (f": {first.reason}" if first.reason else "")
        )
    cause = (
        None if first.rank is not None and first.reason else hint_for(first.text + "\n" + first.reason, first.status)
    )
    if first.disagreement:
        lines.append(f"deepy: cause: {first.disagreement}")
    elif cause:
        lines.append(f"deepy: likely cause: {cause}")
    if others:
        counts = Counter("host lost" if x.rank is None else x.reason or describe_status(x.status) for x in others)
        lines.append("deepy: then ended: " + ", ".join(f"{number} x {what}" for what, number in counts.most_common()))
    if logs and first.rank is not None:
        lines.append(f"deepy: log of that rank: {logs}/rank_{first.rank:04d}.log")
    lines.append(f"deepy: exit status {exit_status(first.status) if first.rank is not None else 255}")
    return "\n".join(lines)
