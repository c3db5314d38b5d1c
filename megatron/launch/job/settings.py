"""Names of the launcher's own options, and the launch section, before anything else can be checked.

The number of ranks follows from the hosts, and the hosts from this section. The rest of the configuration is then
resolved for that number.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pydantic import ValidationError

from ... import config as configuration
from ...config.registry import INSIDE, RUNNER, Registry, registry_of
from ...config.sections.layout import LaunchSection
from ...config.source.extensions import extensions_of
from ...config.source.files import gather, normalise, translate_flat
from ...config.source.layers import merge

AUTO = "auto"


def launch_section(files: Sequence[str], overrides: Sequence[str]) -> LaunchSection:
    """The `launch` keys of some files and overrides.

    Raises:
        ConfigError: these keys are wrong. The error has every mistake of the whole configuration.
    """
    sources, _ = translate_flat(gather(files, overrides))
    merged, _ = merge([normalise(source) for source in sources])
    try:
        return LaunchSection.model_validate(merged.values.get("launch", {}))
    except ValidationError:
        return configuration.load(files, overrides).config.launch


def registry_for(files: Sequence[str], overrides: Sequence[str]) -> Registry:
    """The registry with the extensions of these files and overrides.

    Raises:
        ConfigError: one cannot be used, or the runner is none. The error has every mistake of the configuration.
    """
    sources, _ = translate_flat(gather(files, overrides))
    registry = registry_of(extensions_of(sources))
    runner = launch_section(files, overrides).runner
    if runner != AUTO and runner not in registry.names(RUNNER):
        configuration.load(files, overrides)
    return registry


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
