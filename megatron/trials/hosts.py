"""Hosts made of network namespaces on this machine, for trials with networks that can be cut: needs root.

Each has a name, an address and a link to a bridge, which is in a namespace of its own, so the hosts reach each other
and nothing else. Files, memory and processes are those of this machine. A host is a process that does nothing; it dies
with whoever made it, and the namespace with it. Agents enter the namespaces by themselves (`RUNNER`), so that what the
launcher hears of them does not go through the links: those are the ranks' alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron.launch.runner import Runner
from megatron.launch.runners.agent_command import agent_command
from megatron.launch.wire.connection import Command
from megatron.launch.wire.specification import Specification

if TYPE_CHECKING:
    from megatron.config.sections.layout import LaunchSection

VARIABLE = "DEEPY_TRIAL_HOSTS"  # name=process, ... of a trial's hosts, for the runner
WORD = "megatron.trials.hosts:RUNNER"  # what `launch.runner` says
_PATIENCE = 60.0  # seconds for a namespace to be there


class TrialHosts:
    """So many hosts, host1 ... hostN. A context manager.

    Raises:
        OSError: they cannot be made here.
    """

    def __init__(self, number: int) -> None:
        self.names = [f"host{index + 1}" for index in range(number)]
        self._made: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> TrialHosts:
        try:
            switch = self._namespace("switch", "ip link add br0 type bridge && ip link set br0 up")
            for index, name in enumerate(self.names):
                host = self._namespace(name, f"hostname {name} && ip link set lo up")
                link = ("link", "add", "name", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(host))
                _ip(switch, *link)
                _ip(switch, "link", "set", f"to-{name}", "master", "br0", "up")
                _ip(host, "addr", "add", f"10.88.{index // 250}.{index % 250 + 1}/16", "dev", "eth0")
                _ip(host, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._made.values():
            process.kill()
            process.wait()
        self._made.clear()

    @property
    def variables(self) -> dict[str, str]:
        """What the launcher needs in its environment."""
        return {VARIABLE: ",".join(f"{name}={process.pid}" for name, process in self._made.items())}

    def hostfile(self, slots: int) -> str:
        return "".join(f"{name} slots={slots}\n" for name in self.names)

    def cut(self, name: str) -> None:
        """Pull the cable of a host."""
        _ip(self._made["switch"].pid, "link", "set", f"to-{name}", "down")

    def join(self, name: str) -> None:
        """Put it back."""
        _ip(self._made["switch"].pid, "link", "set", f"to-{name}", "up")

    def slow(self, name: str, kilobits: int) -> None:
        """What is sent to a host comes with so many kbit/s."""
        limit = ("root", "tbf", "burst", "80kb", "latency", "2s", "rate", f"{kilobits}kbit")
        _inside(self._made["switch"].pid, "tc", "qdisc", "add", "dev", f"to-{name}", *limit)

    def fast(self, name: str) -> None:
        """As before `slow`."""
        _inside(self._made["switch"].pid, "tc", "qdisc", "del", "dev", f"to-{name}", "root")

    def _namespace(self, name: str, setup: str) -> int:
        """The process that holds a namespace, once it is set up: it says so by becoming `sleep`."""
        command = ["unshare", "--net", "--uts", "sh", "-c", f"{setup} && exec sleep infinity"]
        process = self._made[name] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=_die_with_the_parent
        )
        end = time.monotonic() + _PATIENCE
        while _words(process.pid)[:1] != ["sleep"]:
            if process.poll() is not None or time.monotonic() > end:
                process.kill()
                assert process.stderr is not None
                raise OSError(f"no namespace for {name}: {process.stderr.read().decode(errors='replace').strip()}")
            time.sleep(0.01)
        return process.pid


def commands(job: Specification, launch: LaunchSection) -> list[Command]:
    """An agent in each namespace."""
    places, agent = _places(os.environ), agent_command(job, launch)
    return [
        Command(("nsenter", "-t", places[host.name], "-n", "-u", *agent), (index,), index=index)
        for index, host in enumerate(job.hosts)
    ]


def _places(environment: Mapping[str, str]) -> dict[str, str]:
    pairs = (each.partition("=") for each in environment[VARIABLE].split(","))
    return {name: process for name, _, process in pairs}


RUNNER = Runner(commands, program="nsenter", needs_hostfile=True)


def _words(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().split("\0")
    except OSError:
        return []


def _ip(pid: int, *words: str) -> None:
    _inside(pid, "ip", *words)


def _inside(pid: int, *words: str) -> None:
    """Run a command in the network of a process.

    Raises:
        OSError: it fails.
    """
    done = subprocess.run(("nsenter", "-t", str(pid), "-n", *words), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def _die_with_the_parent() -> None:
    """Runs in a child before its program: PR_SET_PDEATHSIG."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
