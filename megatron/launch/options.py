"""The names of the launcher's own options."""

from __future__ import annotations

from megatron.config.registry import INSIDE, RUNNER

# Options that are short for a key of the configuration.
KEYS = {
    "ranks": ("N", "launch.ranks: processes on each host"),
    "hostfile": ("FILE", "launch.hostfile: hosts, one `name slots=N` per line"),
    "include": ("HOSTS", "launch.include: hosts and slots to use, `a@b:0,1`"),
    "exclude": ("HOSTS", "launch.exclude: hosts and slots to leave out"),
    "runner": ("NAME", f"launch.runner: {', '.join(('auto', *INSIDE[RUNNER]))}, or one of an extension"),
    "master-address": ("ADDRESS", "launch.master_address: address of rank 0"),
    "master-port": ("PORT", "launch.master_port: port of rank 0"),
    "interface": ("NAME", "launch.interface: network interface for collectives"),
    "restarts": ("N", "launch.restarts: starts after failures"),
    "console": ("WHO", "launch.console: first (rank 0 speaks) or all"),
}
NAMES = (*KEYS, "dry-run", "sbatch", "submit", "print", "logs")
