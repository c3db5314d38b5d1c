"""Runners: ways of starting one agent on each host.

A runner builds commands and starts nothing. One inside is a file of `runners/` that ends with `RUNNER = Runner(...)`,
and a line in `megatron/config/registry.py`. One of a user's package is the same, named by its extension or by its
import path: `launch.runner: my_lab.flux:RUNNER`. The launcher imports it, so it must not need torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.problems import UserError
from megatron.config.registry import RUNNER, Registry, RegistryError

from .wire.connection import Command
from .wire.specification import Host, Specification

if TYPE_CHECKING:
    from ..config.sections.layout import LaunchSection


@dataclass(frozen=True)
class Runner:
    """A way of starting agents.

    Attributes:
        commands: what starts them, from the job and the launch section. Commands must be the same for every job on the
            same hosts: agents get the job over their input. The order of the hosts is the job's, which a restart may
            change: where a scheduler numbers agents in an order of its own, these must get the name of their host
            (`--host`) and not its index. None for a runner with `wrap`.
        wrap: the job with another program between the agents and the ranks. Such a runner stands on another one, which
            starts the agents.
        program: must be installed where the launcher runs.
        here: it starts ranks on this machine only, and takes no hostfile.
        needs_hostfile: it knows no hosts but those of a hostfile.
        hosts: finds the hosts where there is no hostfile. None: this machine.
        inside: why `auto` takes it in this environment. "" if it does not.
        restarts: it starts failed ranks again by itself.
    """

    commands: Callable[[Specification, LaunchSection], list[Command]] | None = None
    wrap: Callable[[Specification, LaunchSection], Specification] | None = None
    program: str | None = None
    here: bool = False
    needs_hostfile: bool = False
    hosts: Callable[[LaunchSection, Mapping[str, str]], list[Host]] | None = None
    inside: Callable[[Mapping[str, str]], str] = lambda environment: ""
    restarts: bool = False


def runner_of(registry: Registry, name: str) -> Runner:
    """The runner that a name, or an import path, stands for.

    Raises:
        UserError: there is none, or it is something else.
    """
    try:
        found = registry.load(RUNNER, name)
    except RegistryError as error:
        raise UserError(f"launch.runner = {name!r}: {error.rule}\n    fix: {error.fix}") from error
    if not isinstance(found, Runner) or (found.commands is None) == (found.wrap is None):
        raise UserError(
            f"launch.runner = {name!r} must be a megatron.launch.runner.Runner that has either commands or wrap"
        )
    return found
