"""One small file per way of starting agents on hosts. A runner only builds commands: it starts nothing."""

from __future__ import annotations

from . import local, mpich, openmpi, pdsh, slurm, ssh

RUNNERS = {
    "local": local.commands,
    "ssh": ssh.commands,
    "pdsh": pdsh.commands,
    "openmpi": openmpi.commands,
    "mpich": mpich.commands,
    "slurm": slurm.commands,
}
