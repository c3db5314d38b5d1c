"""Hosts made of network namespaces on this machine, for trials with networks that can be cut. Needs root.

Each has a name, an address and a link to a bridge in a namespace of its own, so that hosts reach only each other.
They share this machine's files, memory and processes. A host is a sleeping process, which dies with its maker, and the
namespace with it. Agents enter the namespaces by themselves (`RUNNER`): their connection to the launcher does not use
the links, only the ranks do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from megatron.launch.runner import Runner, agent_command
from megatron.launch.wire.protocol import Command
from megatron.launch.wire.specification import Specification
from megatron.trials.job import fields

if TYPE_CHECKING:
    from megatron.config.sections.layout import LaunchSection

VARIABLE = "DEEPY_TRIAL_HOSTS"  # name=process, ... of a trial's hosts, for the runner
WORD = "tests.chaos.hosts:RUNNER"  # value of `launch.runner`
_PATIENCE = 60.0  # seconds to set up a namespace


class TrialHosts:
    """n hosts, host1 ... hostN. A context manager.

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

    runner = WORD

    @property
    def variables(self) -> dict[str, str]:
        """Environment of the launcher."""
        return {VARIABLE: ",".join(f"{name}={process.pid}" for name, process in self._made.items())}

    def hostfile(self, slots: int) -> str:
        return "".join(f"{name} slots={slots}\n" for name in self.names)

    def cut(self, name: str) -> None:
        _ip(self._made["switch"].pid, "link", "set", f"to-{name}", "down")

    def join(self, name: str) -> None:
        _ip(self._made["switch"].pid, "link", "set", f"to-{name}", "up")

    def slow(self, name: str, kilobits: int) -> None:
        """Limit the traffic sent to a host, in kbit/s."""
        limit = ("root", "tbf", "burst", "80kb", "latency", "2s", "rate", f"{kilobits}kbit")
        _inside(self._made["switch"].pid, "tc", "qdisc", "add", "dev", f"to-{name}", *limit)

    def fast(self, name: str) -> None:
        """Undo `slow`."""
        _inside(self._made["switch"].pid, "tc", "qdisc", "del", "dev", f"to-{name}", "root")

    def _namespace(self, name: str, setup: str) -> int:
        """Make a namespace. Returns the process that holds it, which becomes `sleep` when it is set up."""
        command = ["unshare", "--net", "--uts", "sh", "-c", f"{setup} && exec sleep infinity"]
        process = self._made[name] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=_die_with_the_parent
        )
        end = time.monotonic() + _PATIENCE
        while fields(process.pid, "cmdline")[:1] != ["sleep"]:
            if process.poll() is not None or time.monotonic() > end:
                process.kill()
                assert process.stderr is not None
                raise OSError(f"no namespace for {name}: {process.stderr.read().decode(errors='replace').strip()}")
            time.sleep(0.01)
        return process.pid


def commands(job: Specification, launch: LaunchSection) -> list[Command]:
    agent = agent_command(job, launch)
    places = dict(each.split("=") for each in os.environ[VARIABLE].split(","))
    return [
        Command(("nsenter", "-t", places[host.name], "-n", "-u", *agent), (index,), index=index)
        for index, host in enumerate(job.hosts)
    ]


RUNNER = Runner(commands, program="nsenter", needs_hostfile=True)


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
    """PR_SET_PDEATHSIG, set in the child before it runs its program."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
