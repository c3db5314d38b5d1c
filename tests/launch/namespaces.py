"""Hosts made of Linux namespaces on this machine, each with its own address and sshd, for tests that need several.

A host lives as long as its first process, which dies with the tests. No namespace has a name and every mount is inside
one, so nothing can be left behind. The bridge between the hosts is in a namespace of its own: they reach each other,
and nothing else.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PORT = 2222
# First process of a host: $1 is its name, $2 the cluster's folder.
_INIT = """
set -e
hostname "$1"
mount --make-rprivate /
mkdir -p "$2/tmp-$1"
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/tmp-$1" /var/tmp
mount --bind "$2/etc-$1/hosts" /etc/hosts
mount --bind "$2/etc-$1/ssh" /etc/ssh
until [ -e "$2/connected-$1" ]; do sleep 0.02; done
/usr/sbin/sshd -D -e -f /etc/ssh/sshd_config 2>"$2/sshd-$1.log" &
wait $!
"""
_PROGRAMS = ("ip", "unshare", "nsenter", "/usr/sbin/sshd", "ssh", "ssh-keygen", "ps", "hostname", "mount")


def why_not(*programs: str) -> str | None:
    """Why such hosts cannot be made here, or do not have some programs. None if they can and have."""
    if os.geteuid() != 0:
        return "needs root, to make hosts of namespaces"
    if missing := [each for each in (*_PROGRAMS, *programs) if not shutil.which(each)]:
        return f"needs {', '.join(missing)} (tests/launch/debian-packages)"
    links = "ip link add br0 type bridge && ip link add name eth0 type veth peer name eth1 && mount -t tmpfs tmpfs /run"
    probe = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "sh", "-c", links]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=200)
    return f"namespaces with a network: {done.stderr.strip()}" if done.returncode else None


def die_with_the_tests() -> None:
    """Runs in a child before its program: it must not outlive tests that are killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def wait_for(what: Callable[[], bool], seconds: float, otherwise: Callable[[], object]) -> None:
    """Wait until something is true.

    Raises:
        AssertionError: it did not come true in time. The message has the result of `otherwise`.
    """
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:.0f} s: {otherwise()}")
        time.sleep(0.02)


class Cluster:
    """Hosts of the given names and one called login, all in one network of their own. A context manager.

    Args:
        folder: for what belongs to the hosts.
    """

    def __init__(self, folder: Path, names: Sequence[str] = ("node1", "node2")) -> None:
        self.folder, self.names = folder, list(names)
        self.all = ["login", *self.names]
        self.addresses = {name: f"10.77.0.{9 + index}" for index, name in enumerate(self.all)}
        self.inits: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Cluster:
        self.folder.mkdir(exist_ok=True)
        try:
            self._keys()
            (self.folder / "init.sh").write_text(_INIT)
            self.switch = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], preexec_fn=die_with_the_tests)
            wait_for(self._own_network, 200, lambda: "no namespace for the switch")
            self._in_switch("link", "add", "br0", "type", "bridge")
            self._in_switch("link", "set", "br0", "up")
            for name in self.all:
                self._host(name)
            for name in self.all:
                self._wait(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.inits):
            self.kill(name)
        if hasattr(self, "switch"):
            self.switch.kill()
            self.switch.wait()

    def _own_network(self) -> bool:
        path = f"/proc/{self.switch.pid}/ns/net"
        return os.path.exists(path) and os.readlink(path) != os.readlink("/proc/self/ns/net")

    def _in_switch(self, *words: str) -> None:
        _run("nsenter", "-t", str(self.switch.pid), "-n", "ip", *words)

    def _keys(self) -> None:
        for name in ("user", "host"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        public = (self.folder / "host.pub").read_text().split()[:2]
        known = [f"[{name}]:{PORT},[{self.addresses[name]}]:{PORT} {' '.join(public)}" for name in self.all]
        (self.folder / "known_hosts").write_text("\n".join(known) + "\n")

    def _files(self, name: str) -> None:
        """Files of /etc that the host has for itself."""
        etc = self.folder / f"etc-{name}"
        (etc / "ssh").mkdir(parents=True)
        others = "".join(f"{self.addresses[other]} {other}\n" for other in self.all if other != name)
        # Debian's trap, on purpose: a host's own name means loopback.
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
        (etc / "ssh" / "sshd_config").write_text(
            f"Port {PORT}\nListenAddress {self.addresses[name]}\nHostKey {self.folder}/host\n"
            f"AuthorizedKeysFile {self.folder}/user.pub\nUsePAM no\nStrictModes no\nPidFile none\n"
            f"MaxStartups 100:30:200\nSetEnv PATH={os.environ['PATH']}\n"
        )
        (etc / "ssh" / "ssh_config").write_text(
            f"Host {' '.join(self.all)} 10.77.0.*\nPort {PORT}\nIdentityFile {self.folder}/user\nIdentitiesOnly yes\n"
            f"BatchMode yes\nStrictHostKeyChecking yes\nGlobalKnownHostsFile "
            f"{self.folder}/known_hosts\nConnectTimeout 5\n"
        )

    def _host(self, name: str) -> None:
        self._files(name)
        own = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
        with open(self.folder / f"init-{name}.log", "wb") as log:
            self.inits[name] = subprocess.Popen(
                ["unshare", *own, "bash", "-x", str(self.folder / "init.sh"), name, str(self.folder)],
                start_new_session=True,
                preexec_fn=die_with_the_tests,
                stderr=log,
            )
        wait_for(lambda: self._children(name), 200, lambda: self._logs(name))
        inside = str(self.init_pid(name))
        self._in_switch("link", "add", "name", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", inside)
        self._in_switch("link", "set", f"to-{name}", "master", "br0", "up")
        for words in (f"addr add {self.addresses[name]}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _run("nsenter", "-t", inside, "-n", "ip", *words.split())
        (self.folder / f"connected-{name}").touch()

    def _wait(self, name: str) -> None:
        """Until its sshd listens. Nothing may enter a host earlier: it would see half of its mounts."""
        log = self.folder / f"sshd-{name}.log"
        wait_for(lambda: log.exists() and "listening" in log.read_text(), 200, lambda: self._logs(name))

    def _logs(self, name: str) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"*-{name}.log"))

    def _children(self, name: str) -> list[str]:
        pid = self.inits[name].pid
        try:
            return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except FileNotFoundError:
            return []

    def init_pid(self, name: str) -> int:
        """The process id, seen from here, of the host's first process."""
        return int(self._children(name)[0])

    def enter(self, name: str, command: Sequence[str], folder: Path | None = None) -> list[str]:
        """The command that runs `command` on a host, by default in our current folder."""
        where = f"--wdns={folder or os.getcwd()}"
        return ["nsenter", "-t", str(self.init_pid(name)), "-m", "-u", "-i", "-n", "-p", where, *command]

    def run(
        self, name: str, command: Sequence[str], timeout: float = 300, folder: Path | None = None, **options
    ) -> subprocess.CompletedProcess:
        """Run a command on a host to its end."""
        limited = self.enter(name, ["timeout", "-k", "5", str(timeout), *command], folder)
        return subprocess.run(limited, capture_output=True, text=True, timeout=timeout + 10, **options)

    def processes(self, name: str, *patterns: str) -> list[str]:
        """Command lines of a host's processes that contain one of the texts."""
        out = self.run(name, ["ps", "-eo", "pid,args"]).stdout
        return [line for line in out.splitlines() if "ps -eo" not in line and any(each in line for each in patterns)]

    def kill(self, name: str) -> None:
        """The host dies, with all its processes."""
        process = self.inits[name]
        for pid in self._children(name):
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.kill()
        process.wait()
        del self.inits[name]

    def cut(self, name: str) -> None:
        """Pull the host's cable."""
        self._in_switch("link", "set", f"to-{name}", "down")


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
