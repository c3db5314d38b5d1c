"""Peers that one command starts on this machine (`launch.peers`), each with a launcher of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from megatron.config.features.feature import load_of
from megatron.config.problems import counted
from megatron.installation import root
from megatron.worker import devices

from .job.hosts import HostError
from .job.job_plan import JobPlan, make_plan
from .report.console import log

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1


def together(plan: JobPlan, environment: Mapping[str, str]) -> int:
    """Run all peers to their ends, and return the first status that is not 0. The console shows the first peer, and
    others write to `console.log` in their run directories.

    Args:
        plan: of the configuration with `launch.peers`. It is not started itself.

    Raises:
        HostError, ConfigError: mistakes of the user.
    """
    if plan.choice.runner != "local":
        raise HostError(
            f"launch.peers must go with the runner local, not {plan.choice.runner}: it starts peers on this machine. "
            "On several hosts, start each peer by a command of its own"
        )
    folder = Path(plan.job.directory, plan.resolved.config.run.dir)
    words = load_of("peers", "here:overrides")(plan.resolved.config, folder)
    visible = _devices(plan, environment)
    commands = {name: (*_words(plan, own), *plan.taken.own) for name, own in words.items()}
    first = next(iter(commands))
    make_plan(plan.script, commands[first], [], {**environment, **visible[0]})  # mistakes, before anything starts
    log(f"{counted(len(words), 'peer')} ({', '.join(words)}): the console shows {first}, others have a console.log")
    return _wait(_started(plan, commands, folder, environment, visible))


def _words(plan: JobPlan, own: Sequence[str]) -> tuple[str, ...]:
    return (*plan.taken.files, *plan.taken.overrides, *own)


def _devices(plan: JobPlan, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Variables that show each peer its part of the devices."""
    peers, device = plan.launch.peers or 1, plan.launch.device
    number = 0 if device == "cpu" else devices.count(environment)
    share = number // peers
    if number and share < (plan.launch.ranks or 1):
        raise HostError(
            f"launch.peers * launch.ranks must be at most the {counted(number, 'device')} of this machine: "
            f"{peers} * {plan.launch.ranks or 1}. Use fewer, or launch.device=cpu"
        )
    slots = [tuple(range(place * share, (place + 1) * share)) for place in range(peers)]
    return [devices.visibility(each, environment, device) if number else {} for each in slots]


def _started(
    plan: JobPlan,
    commands: Mapping[str, Sequence[str]],
    folder: Path,
    environment: Mapping[str, str],
    visible: Sequence[Mapping[str, str]],
) -> dict[str, subprocess.Popen[bytes]]:
    started: dict[str, subprocess.Popen[bytes]] = {}
    for own, (name, words) in zip(visible, commands.items(), strict=True):
        console = None
        if started:
            (folder / "peers" / name).mkdir(parents=True, exist_ok=True)
            console = open(folder / "peers" / name / "console.log", "ab")
        started[name] = subprocess.Popen(
            [sys.executable, "-u", str(root() / "deepy.py"), plan.script, *words],
            env={**environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            process_group=0,  # a signal of the terminal comes once, from here
            preexec_fn=_end_with_the_parent,
        )
        if console is not None:
            console.close()
    return started


def _end_with_the_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _wait(started: Mapping[str, subprocess.Popen[bytes]]) -> int:
    """Forward signals until all have ended."""

    def forward(number: int, _: FrameType | None) -> None:
        for process in started.values():
            if process.poll() is None:
                os.kill(process.pid, number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        ends = {name: process.wait() for name, process in started.items()}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    failed = {name: status if status >= 0 else 128 - status for name, status in ends.items() if status}
    for name, status in failed.items():
        log(f"peer {name} ended with status {status}")
    return next(iter(failed.values()), 0)
