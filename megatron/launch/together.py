"""Peers that one command starts on this machine (`launch.peers`), each with a launcher of its own."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megatron.config.features.feature import load_of
from megatron.config.problems import counted
from megatron.installation import root
from megatron.worker import devices
from megatron.worker.job import CONFIG_ERROR

from .job.hosts import HostError
from .job.job_plan import JobPlan, make_plan
from .report.console import log

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
_PAUSE = 0.2  # seconds between two checks whether a peer has ended


@dataclass(frozen=True)
class Peer:
    """Command of one peer."""

    words: tuple[str, ...]  # arguments of its script
    variables: dict[str, str]  # added to its environment: its devices and threads
    console: Path | None  # file of its output. None: the console.

    def command(self, script: str) -> list[str]:
        return [sys.executable, "-u", str(root() / "deepy.py"), script, *self.words]


def together(plan: JobPlan, environment: Mapping[str, str]) -> int:
    """Run all peers to their ends, and return the first status that is not 0.

    The console shows the first peer, and others write to `console.log` in their run directories.

    Args:
        plan: of the configuration with `launch.peers`. It is not started itself.

    Raises:
        HostError, ConfigError: mistakes of the user.
    """
    peers, key = _checked(plan, environment)
    try:
        load_of("peers", "here:make_key")(key)
        for each in peers.values():
            if each.console is not None:
                each.console.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"run.dir must be a folder in which peers can write: {error}. Use another run.dir") from error
    first = next(iter(peers))
    log(f"{counted(len(peers), 'peer')} ({', '.join(peers)}): the console shows {first}, others have a console.log")
    started: dict[str, subprocess.Popen[bytes]] = {}
    with _forwarding(started):
        for name, each in peers.items():
            started[name] = _started(each, plan.script, environment)
        return _wait(started)


def describe_peers(plan: JobPlan, environment: Mapping[str, str]) -> str:
    """The commands of all peers, for people. Nothing is started.

    Raises:
        HostError, ConfigError: mistakes of the user.
    """
    peers, _ = _checked(plan, environment)
    lines = [f"{counted(len(peers), 'peer')} on this machine, each with a launcher of its own:"]
    for name, each in peers.items():
        variables = [f"{key}={shlex.quote(value)}" for key, value in each.variables.items()]
        output = "" if each.console is None else f" > {shlex.quote(str(each.console))}"
        lines += ["", f"{name}:", f"  {' '.join([*variables, shlex.join(each.command(plan.script))])}{output}"]
    return "\n".join([*lines, "", "the configuration is valid for these peers", ""])


def _checked(plan: JobPlan, environment: Mapping[str, str]) -> tuple[dict[str, Peer], Path]:
    """All peers by their names, and the file of their key. Mistakes are found before a file is made."""
    if plan.choice.runner != "local":
        raise HostError(
            f"launch.peers must go with the runner local, not {plan.choice.runner}: it starts peers on this machine. "
            "Use launch.runner=local on one host without a hostfile. On several hosts, start each peer by a command of "
            "its own"
        )
    folder = Path(plan.job.directory, plan.resolved.config.run.dir)
    own, key = load_of("peers", "here:overrides")(plan.resolved.config, folder)
    peers: dict[str, Peer] = {}
    for (name, words), variables in zip(own.items(), _variables(plan, environment), strict=True):
        console = folder / "peers" / name / "console.log" if peers else None
        peers[name] = Peer((*_words(plan, words), *plan.taken.own), variables, console)
    with tempfile.TemporaryDirectory() as drafts:
        words = next(iter(own.values()))
        if not key.exists():
            load_of("peers", "here:make_key")(draft := Path(drafts, "key"))
            words = [*words, f"peers.key_file={draft}"]
        first = next(iter(peers.values()))
        make_plan(plan.script, (*_words(plan, words), *plan.taken.own), [], {**environment, **first.variables})
    return peers, key


def _words(plan: JobPlan, own: Sequence[str]) -> tuple[str, ...]:
    return (*plan.taken.files, *plan.taken.overrides, *own)


def _variables(plan: JobPlan, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Variables that show each peer its part of the devices, and divide the cores by all ranks of all peers."""
    peers, device = plan.launch.peers or 1, plan.launch.device
    number = 0 if device == "cpu" else devices.count(environment)
    share = number // peers
    ranks = plan.launch.ranks or max(share, 1)
    if number and share < ranks:
        raise HostError(
            f"launch.peers * launch.ranks must be at most the {counted(number, 'device')} of this machine: "
            f"{peers} * {ranks}. Use fewer, or launch.device=cpu"
        )
    threads = {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(devices.threads_per_rank(peers * ranks)))}
    slots = [tuple(range(place * share, (place + 1) * share)) for place in range(peers)]
    return [{**threads, **(devices.visibility(each, environment, device) if number else {})} for each in slots]


def _started(peer: Peer, script: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    console = None if peer.console is None else open(peer.console, "ab")
    try:
        return subprocess.Popen(
            peer.command(script),
            env={**environment, **peer.variables},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            process_group=0,  # a signal of the terminal comes once, from here
            preexec_fn=_end_with_the_parent,
        )
    finally:
        if console is not None:
            console.close()


def _end_with_the_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextmanager
def _forwarding(started: Mapping[str, subprocess.Popen[bytes]]) -> Iterator[None]:
    """Send signals of this process to all peers that are started. Ignored signals stay ignored (`nohup`)."""

    def forward(number: int, _: FrameType | None) -> None:
        for process in started.values():
            if process.poll() is None:
                os.kill(process.pid, number)

    heard = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(started: Mapping[str, subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, and report each failure at once: the others wait for that peer.

    After a mistake of the user (status 2) no start of that peer would help, so the others are stopped, and save."""
    ends: dict[str, int] = {}
    while len(ends) < len(started):
        for name in (name for name, process in started.items() if name not in ends and process.poll() is not None):
            status = started[name].returncode
            ends[name] = status if status >= 0 else 128 - status
            others = [process for other, process in started.items() if other not in ends]
            stops = ends[name] == CONFIG_ERROR and CONFIG_ERROR not in [*ends.values()][:-1] and bool(others)
            if status:
                log(f"peer {name} ended with status {ends[name]}{': stopping the others' if stops else ''}")
            for process in others if stops else ():
                process.terminate()
        time.sleep(_PAUSE)
    return next((end for end in ends.values() if end), 0)
