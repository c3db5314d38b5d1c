"""Hosts made of Linux namespaces on this machine, each with its own address and sshd, for tests that need several.

The bridge between them lives in a namespace of its own, so nothing can be reached from them but each other.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

PORT = 2222
_COUNT = itertools.count()
_INIT = """
set -e
hostname "$1"
mount --make-rprivate /
mkdir -p "$2/tmp-$1"
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/tmp-$1" /var/tmp
/usr/sbin/sshd -D -e -f /etc/ssh/sshd_config 2>"$2/sshd-$1.log" &
wait $!
"""


def why_not(*programs: str) -> str | None:
    """Why such hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [
        each
        for each in ("ip", "unshare", "nsenter", "/usr/sbin/sshd", "ssh-keygen", *programs)
        if not shutil.which(each)
    ]
    if missing:
        return f"needs {', '.join(missing)}"
    probe = subprocess.run(["ip", "netns", "add", f"probe-{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode:
        return f"ip netns: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"probe-{os.getpid()}"], check=True)
    return None


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _die_with_the_tests() -> None:
    """Runs in the child: a host must not outlive tests that are killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


class Cluster:
    """`number` hosts h0, h1, ... and a login host, all in one network of their own. A context manager."""

    def __init__(self, number: int, folder: Path) -> None:
        self.folder, self.prefix = (
            folder,
            f"m{os.getpid() % 65536:x}{next(_COUNT)}",
        )  # interfaces have 15 letters at most
        self.names = [f"h{index}" for index in range(number)]
        self.all = ["login", *self.names]
        self.addresses = {name: f"10.77.0.{9 + index}" for index, name in enumerate(self.all)}
        self.inits: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Cluster:
        self._keys()
        (self.folder / "init.sh").write_text(_INIT)
        switch = self._space("switch")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        try:
            for name in self.all:
                self._host(name, switch)
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.inits):
            self.kill(name)
        for name in [*self.all, "switch"]:
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True)
            shutil.rmtree(f"/etc/netns/{self._space(name)}", ignore_errors=True)

    def _space(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def _keys(self) -> None:
        for name in ("user", "host"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        public = (self.folder / "host.pub").read_text().split()[:2]
        known = [f"[{name}]:{PORT},[{self.addresses[name]}]:{PORT} {' '.join(public)}" for name in self.all]
        (self.folder / "known_hosts").write_text("\n".join(known) + "\n")

    def _host(self, name: str, switch: str) -> None:
        space, port = self._space(name), f"p-{self._space(name)}"
        etc = Path("/etc/netns", space)
        (etc / "ssh").mkdir(parents=True)
        (etc / "hosts").write_text(
            "127.0.0.1 localhost\n"
            + f"127.0.1.1 {name}\n"  # Debian's trap, on purpose
            + "".join(f"{self.addresses[other]} {other}\n" for other in self.all if other != name)
        )
        (etc / "ssh" / "sshd_config").write_text(
            f"Port {PORT}\nListenAddress {self.addresses[name]}\nHostKey {self.folder}/host\n"
            f"AuthorizedKeysFile {self.folder}/user.pub\nUsePAM no\nStrictModes no\nPidFile none\n"
            f"MaxStartups 100:30:200\n"
            f"SetEnv PATH={os.environ['PATH']}\n"
        )
        (etc / "ssh" / "ssh_config").write_text(
            f"Host h* login 10.77.0.*\nPort {PORT}\nIdentityFile {self.folder}/user\nIdentitiesOnly yes\n"
            f"BatchMode yes\n"
            f"StrictHostKeyChecking yes\nGlobalKnownHostsFile {self.folder}/known_hosts\nConnectTimeout 5\n"
        )
        _run("ip", "netns", "add", space)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run(
            "ip",
            "link",
            "add",
            "name",
            "eth0",
            "netns",
            space,
            "type",
            "veth",
            "peer",
            "name",
            port,
            "netns",
            switch,
        )
        _run("ip", "-n", space, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
        # Written once: a shell reads its script while it runs.
        init = ["bash", "-x", str(self.folder / "init.sh"), name, str(self.folder)]
        own = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
        self.inits[name] = subprocess.Popen(
            ["ip", "netns", "exec", space, *own, *init],
            start_new_session=True,
            preexec_fn=_die_with_the_tests,
            stderr=open(self.folder / f"init-{name}.log", "wb"),
        )

    def _wait(self) -> None:
        """Until every sshd listens. Nothing may enter a host earlier: it would see half of its mounts."""
        end = time.monotonic() + 20
        for name in self.all:
            log = self.folder / f"sshd-{name}.log"
            while not (log.exists() and "listening" in log.read_text()):
                if time.monotonic() > end:
                    logs = "".join(path.read_text() for path in self.folder.glob(f"*-{name}.log"))
                    raise RuntimeError(f"{name}: no sshd\n{logs}")
                time.sleep(0.05)

    def init_pid(self, name: str) -> int:
        """The process id, seen from here, of the host's first process."""
        unshare = self.inits[name].pid
        return int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()[0])

    def enter(self, name: str, command: list[str]) -> list[str]:
        """The command that runs `command` on a host, in our current folder."""
        return [
            "nsenter",
            "-t",
            str(self.init_pid(name)),
            "-m",
            "-u",
            "-i",
            "-n",
            "-p",
            f"--wdns={os.getcwd()}",
            *command,
        ]

    def run(self, name: str, command: list[str], timeout: float = 60, **options) -> subprocess.CompletedProcess:
        """Run a command on a host to its end."""
        return subprocess.run(
            self.enter(name, ["timeout", "-k", "5", str(timeout), *command]),
            capture_output=True,
            text=True,
            timeout=timeout + 10,
            **options,
        )

    def processes(self, name: str, pattern: str) -> list[str]:
        """Command lines of a host's processes that contain a text."""
        out = self.run(name, ["ps", "-eo", "pid,args"]).stdout
        return [line for line in out.splitlines() if pattern in line and "ps -eo" not in line]

    def kill(self, name: str) -> None:
        """The host dies, with all its processes."""
        process = self.inits.pop(name)
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in children:
                os.kill(int(pid), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            pass
        process.kill()
        process.wait()

    def cut(self, name: str) -> None:
        """Pull the host's cable."""
        _run("ip", "-n", self._space("switch"), "link", "set", f"p-{self._space(name)}", "down")
