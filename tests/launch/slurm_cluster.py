"""A real Slurm on hosts made of namespaces: munged, slurmctld on the login host, a slurmd on every other."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.launch.namespaces import Cluster, die_with_the_tests, wait_for

_CONF = """
ClusterName=test
SlurmctldHost=login({login})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
KillWait=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol", "scancel", "sinfo", "squeue")


class Slurm:
    """Daemons in a `Cluster`. A context manager. `environment` makes clients find them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.folder = cluster, cluster.folder / "slurm"
        self.processes: list[subprocess.Popen] = []
        self.conf = self.folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}

    def __enter__(self) -> Slurm:
        (self.folder / "state").mkdir(parents=True)
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={self.cluster.addresses[name]} CPUs=4 RealMemory=8000"
            for name in self.cluster.names
        )
        self.conf.write_text(_CONF.format(login=self.cluster.addresses["login"], folder=self.folder, nodes=nodes))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        try:
            self._munge()
            self._start(self.cluster.enter("login", ["slurmctld", "-D", "-i", "-f", str(self.conf)]))
            for name in self.cluster.names:
                self._start(self.cluster.enter(name, ["slurmd", "-D", "-N", name, "-f", str(self.conf)]))
            wait_for(self._all_idle, 200, self.logs)
            wait_for(self._takes_steps, 200, self.logs)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for name in self.cluster.inits:  # nsenter has forked: what it started is known to its host only
            self.cluster.run(name, ["sh", "-c", "kill -9 $(pgrep '^slurm')"])

    def _munge(self) -> None:
        """One for all hosts: its clients reach it by a file."""
        key, socket = self.folder / "munge.key", self.folder / "munge.sock"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._start(["munged", "--foreground", "--force", f"--socket={socket}", *files])
        wait_for(socket.exists, 200, lambda: "munged does not answer")

    def _all_idle(self) -> bool:
        return self.run("login", ["sinfo", "-h", "-t", "idle", "-o", "%D"]).stdout.strip() == str(
            len(self.cluster.names)
        )

    def _takes_steps(self) -> bool:
        """Whether every host runs a step. On a busy machine a host that calls itself idle has refused its first one."""
        number = str(len(self.cluster.names))
        return self.run("login", ["srun", "-N", number, "--ntasks-per-node=1", "--mpi=none", "true"]).returncode == 0

    def logs(self) -> str:
        """The last lines of every daemon."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("slurm*.log")))

    def _start(self, command: Sequence[str]) -> None:
        self.processes.append(
            subprocess.Popen(
                command,
                env=self.environment,
                start_new_session=True,
                preexec_fn=die_with_the_tests,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    def run(
        self, name: str, command: Sequence[str], timeout: float = 300, folder: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess:
        """Run a client on a host."""
        return self.cluster.run(name, command, timeout, folder, env={**self.environment, **variables})
