"""Ranks in the tests of the launcher. The first argument says what. Events go to files named by rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

RANK = os.environ["RANK"]


def note(name: str, content: object = None) -> None:
    """Leave a file NAME.RANK in the folder that NOTES names."""
    path = Path(os.environ["NOTES"], f"{name}.{RANK}")
    path.with_suffix(".part" + RANK).write_text(json.dumps(content))
    path.with_suffix(".part" + RANK).rename(path)


def pid_of(rank: str, name: str = "up") -> int:
    """The process of another rank, once it has left a note."""
    path = Path(os.environ["NOTES"], f"{name}.{rank}")
    while not path.exists():
        time.sleep(0.01)
    return json.loads(path.read_text())


def outlive(rank: str, longer: float = 0.4, name: str = "up") -> None:
    """Wait for another rank's end, and for some seconds more."""
    stat = Path(f"/proc/{pid_of(rank, name)}/stat")
    try:
        while stat.read_text().split(")")[1].split()[0] != "Z":
            time.sleep(0.001)
    except (FileNotFoundError, ProcessLookupError):  # its agent knows already
        pass
    time.sleep(longer)


def describe() -> None:
    """Everything a rank is given."""
    note(
        "given",
        {
            "argv": sys.argv[2:],
            "environment": dict(os.environ),
            "cwd": os.getcwd(),
            "pid": os.getpid(),
            "session": os.getsid(0),
            "cores": sorted(os.sched_getaffinity(0)),
            "mode": oct(os.stat(os.environ["JOB_CONFIG"]).st_mode & 0o777),
            "config": Path(os.environ["JOB_CONFIG"]).read_text(),
        },
    )
    print(f"hello from {RANK}")
    print(f"error of {RANK}", file=sys.stderr)


def _listen() -> list[int]:
    """Signals as they come, with handlers that only take note."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda n, _: received.append(n))
    note("up", os.getpid())
    return received


def trainer() -> None:
    """Runs until a signal says stop. Then "saves" and ends with 128 + n, as a trainer does."""
    received = _listen()
    while not received:
        time.sleep(0.01)
    note("saved", received[0])
    sys.exit(128 + received[0])


def finisher() -> None:
    """Its last step comes when the signal does: nothing is left to do."""
    received = _listen()
    while not received:
        time.sleep(0.01)


def uneven() -> None:
    """Rank 0 saves quickly, rank 1 takes longer than ranks are given when a peer has failed."""
    received = _listen()
    while not received:
        time.sleep(0.01)
    end = time.monotonic() + (6.0 if RANK == "1" else 0.0)
    while time.monotonic() < end:
        time.sleep(0.05)
    note("saved", len(received))
    sys.exit(143)


def stubborn() -> None:
    """Ignores every signal that can be ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    note("up", os.getpid())
    time.sleep(600)


def reacts() -> None:
    """Rank 1 dies by SIGKILL. The others notice and end with 77, as peers of a broken collective do."""
    note("up", os.getpid())
    if RANK == "1":
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    outlive("1", 0.0)
    sys.exit(77)


def complains() -> None:
    """Rank 0 says that its peer has gone, before the peer's end is seen, and ends after it: how a busy host may show
    it.
    """
    if RANK == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(
            "Traceback (most recent call last):\n  RuntimeError: Connection closed by peer", file=sys.stderr, flush=True
        )
        note("up", os.getpid())
        outlive("1")
        sys.exit(1)
    note("up", os.getpid())
    pid_of("0")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def raises() -> None:
    """Rank 2 raises. Rank 0 raises later, because its peer went away. The rest wait."""
    if RANK == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note("up", os.getpid())
    if RANK == "2":
        pid_of("0")
        try:
            raise ValueError("the real cause")
        except ValueError as error:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB") from error
    if RANK == "0":
        outlive("2")
        raise ConnectionError("Connection closed by peer")
    time.sleep(600)


def caught() -> None:
    """A traceback that is printed, and survived."""
    import traceback

    try:
        raise KeyError("harmless")
    except KeyError:
        traceback.print_exc()
    time.sleep(float(sys.argv[2]))


def family() -> None:
    """A rank with a child in its session and another in a session of its own, both deaf to signals."""
    import subprocess

    code = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(600)"
    children = [subprocess.Popen([sys.executable, "-c", code], start_new_session=new) for new in (False, True)]
    note("family", [os.getpid(), *(child.pid for child in children)])
    time.sleep(float(sys.argv[2]))


def looks() -> None:
    """Whether it speaks to a terminal, and how large that is."""
    size = os.get_terminal_size(1) if sys.stdout.isatty() else None
    note("terminal", [sys.stdout.isatty(), sys.stderr.isatty(), size])
    print("10 %\r100 %")


def floods() -> None:
    """Much output, in lines of many lengths, on both streams."""
    for number in range(3000):
        print(f"{number}:" + "x" * (number % 2500), file=sys.stdout if number % 2 else sys.stderr)


def flaky() -> None:
    """Fails on the first two attempts."""
    attempt = int(os.environ.get("JOB_ATTEMPT", "0"))
    note(f"attempt{attempt}", os.environ["MASTER_PORT"])
    sys.exit(3 if attempt < 2 else 0)


def refuses() -> None:
    """One rank says why and ends, without a traceback. The others end well."""
    if RANK == sys.argv[2]:
        print("the reason, in a sentence", file=sys.stderr)
        sys.exit(2)


def exits() -> None:
    """Ends with the status of its rank in the list."""
    sys.exit(int(sys.argv[2].split(",")[int(RANK)]))


def hanger() -> None:
    """Reports its place. In the first attempt rank 1 is stopped in its third step, and rank 0 waits for it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from megatron.worker.beacon import FORWARD, REDUCE, Beacon

    beacon, hangs = Beacon.inherited(), os.environ["JOB_ATTEMPT"] == "0"
    group = beacon.group("all", "the group of all ranks", "0-1")
    for step in range(6):
        beacon.begin(step)
        beacon.at(FORWARD)
        if hangs and step == 3 and RANK == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        beacon.at(REDUCE)
        beacon.enter(group, b"all_reduce", 8)
        if hangs and step == 3:
            note("hangs")
            time.sleep(1000)
        beacon.leave()
        beacon.done()


def stopped_agent() -> None:
    """The rank stops its agent, and continues."""
    os.kill(os.getppid(), signal.SIGSTOP)
    note("stopped")
    time.sleep(1000)


def differs() -> None:
    """In the fourth step rank 1 brings another shape: rank 0 is ended for it, as gloo does, and rank 1 complains."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from megatron.worker.beacon import REDUCE, Beacon

    beacon = Beacon.inherited()
    group = beacon.group("all", "the group of all ranks", "0-1")
    for step in range(4):
        beacon.begin(step)
        beacon.at(REDUCE)
        beacon.enter(group, b"all_reduce", 9 if step == 3 and RANK == "1" else 8)
        if step < 3:
            beacon.leave()
            beacon.done()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 1 has the time to complain
    name = f"inside{os.environ['JOB_ATTEMPT']}"
    note(name, os.getpid())
    if RANK == "0":
        pid_of("1", name)
        os.kill(os.getpid(), signal.SIGABRT)
    beacon.leave()
    outlive("0", 0.0, name)
    raise RuntimeError("Connection closed by peer")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
