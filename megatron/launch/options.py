"""The names of the launcher's own options."""

from __future__ import annotations

import difflib

from megatron.config.registry import INSIDE, RUNNER

# Options that are short for a key of the configuration.
KEYS = {
    "ranks": ("N", "launch.ranks: processes on each host"),
    "hostfile": ("FILE", "launch.hostfile: hosts, one `name slots=N` per line"),
    "include": ("HOSTS", "launch.include: hosts and slots to use, `a@b:0,1`"),
    "exclude": ("HOSTS", "launch.exclude: hosts and slots to exclude"),
    "runner": ("NAME", f"launch.runner: {', '.join(('auto', *INSIDE[RUNNER]))}, or one of an extension"),
    "master-address": ("ADDRESS", "launch.master_address: address of rank 0"),
    "master-port": ("PORT", "launch.master_port: port of rank 0"),
    "interface": ("NAME", "launch.interface: network interface for collectives"),
    "restarts": ("N", "launch.restarts: starts after failures"),
    "console": ("WHO", "launch.console: first (rank 0 speaks) or all"),
}
# Names of options in other launchers.
ELSEWHERE = dict.fromkeys(
    ("gpus", "gpu", "num-gpus", "ngpus", "nproc", "nproc-per-node", "np", "rank", "num-processes", "world-size"),
    "ranks",
) | {"hosts": "hostfile", "num-nodes": "hostfile", "nnodes": "hostfile", "nodes": "hostfile", "dryrun": "dry-run"}
NAMES = (*KEYS, "dry-run", "sbatch", "submit", "print", "logs")


def meant(word: str) -> str:
    """A question for an option that the launcher does not have: did you mean another? Empty if none is near."""
    name = word.lstrip("-").partition("=")[0].replace("_", "-")
    near = [ELSEWHERE[name]] if name in ELSEWHERE else difflib.get_close_matches(name, NAMES, n=1, cutoff=0.75)
    return f": did you mean --{near[0]}?" if near else ""
