"""A real Slurm on hosts made of namespaces: munged, slurmctld on the login host, a slurmd on every other."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from .namespaces import Cluster

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
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")


class Slurm:
    """Daemons in a `Cluster`. A context manager; `environment` makes clients find them."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.processes: list[subprocess.Popen] = []
        self.conf = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}

    def __enter__(self) -> Slurm:
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={self.cluster.addresses[name]} CPUs=4 RealMemory=8000"
            for name in self.cluster.names
        )
        self.conf.write_text(_CONF.format(login=self.cluster.addresses["login"], folder=self.folder, nodes=nodes))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = [
            f"--{name}={self.folder}/munge.{end}"
            for name, end in (
                ("key-file", "key"),
                ("socket", "sock"),
                ("pid-file", "pid"),
                ("log-file", "log"),
                ("seed-file", "seed"),
            )
        ]
        self._start(["munged", "--foreground", "--force", *files])
        while not (self.folder / "munge.sock").exists():
            time.sleep(0.05)
        self._start(self.cluster.enter("login", ["slurmctld", "-D", "-i", "-f", str(self.conf)]))
        for name in self.cluster.names:
            self._start(self.cluster.enter(name, ["slurmd", "-D", "-N", name, "-f", str(self.conf)]))
        end = time.monotonic() + 30
        while self.run("login", ["sinfo", "-h", "-t", "idle", "-o", "%D"]).stdout.strip() != str(
            len(self.cluster.names)
        ):
            if time.monotonic() > end:
                raise RuntimeError((self.folder / "slurmctld.log").read_text()[-3000:])
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(self, command: list[str]) -> None:
        self.processes.append(
            subprocess.Popen(
                command,
                env=self.environment,
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    def run(self, name: str, command: list[str], timeout: float = 60) -> subprocess.CompletedProcess:
        """Run a client on a host."""
        return self.cluster.run(name, command, timeout, env=self.environment)
