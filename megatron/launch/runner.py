"""Runners: ways of starting one agent on each host.

A runner builds commands and starts nothing. One inside is a file of `runners/` that has a `Runner(...)`,
and a line in `megatron/config/registry.py`. One of a user's package is the same, named by its extension or by its
import path: `launch.runner: my_lab.flux:RUNNER`. The launcher imports it, so it must not need torch.

With `launch.container` agents, and with them the ranks, run in a container. The launcher itself stays outside. The
folder of the code and the run's working directory have the same paths inside."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.problems import UserError
from megatron.config.registry import RUNNER, Registry, RegistryError
from megatron.installation import root

from .wire.protocol import Command
from .wire.specification import Host, Specification

if TYPE_CHECKING:
    from ..config.sections.layout import LaunchSection


@dataclass(frozen=True)
class Runner:
    """A way of starting agents.

    Attributes:
        commands: the commands that start them, from the job and the launch section. They must be the same for every job
            on the same hosts: agents get the job over their input. The job has the order of the hosts, which a restart
            may change. Where a scheduler numbers agents in another order, commands must have the name of their host
            (`--host`) and not its index. None for a runner with `wrap`.
        wrap: the job with another program between the agents and the ranks. Such a runner stands on another one, which
            starts the agents.
        program: must be installed where the launcher runs.
        here: it starts ranks on this machine only, and takes no hostfile.
        needs_hostfile: it only knows the hosts of a hostfile.
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
        raise UserError(f"launch.runner = {name!r} must be a megatron.launch.runner.Runner: either commands or wrap")
    return found


def inside(agent: list[str], directory: str, launch: LaunchSection) -> list[str]:
    """An agent's command, in the container if there is one. pyxis is an addition to srun: see `srun_options`."""
    tool, _, image = (launch.container or "").partition(":")
    mounts = _mounts(directory, launch)
    if tool == "apptainer":
        gpus = [] if launch.device == "cpu" else ["--rocm" if launch.batch.gpus == "amd" else "--nv"]
        binds = [word for mount in mounts for word in ("--bind", mount)]
        return ["apptainer", "exec", *gpus, *binds, "--pwd", directory, image, *agent]
    if tool == "enroot":
        return ["enroot", "start", *(word for mount in mounts for word in ("--mount", mount)), image, *agent]
    return agent


def srun_options(directory: str, launch: LaunchSection) -> list[str]:
    """Options of srun where pyxis makes the container."""
    tool, _, image = (launch.container or "").partition(":")
    if tool != "pyxis":
        return []
    mounts = ",".join(_mounts(directory, launch))
    return [f"--container-image={image}", f"--container-mounts={mounts}", f"--container-workdir={directory}"]


def _mounts(directory: str, launch: LaunchSection) -> list[str]:
    own = [f"{folder}:{folder}" for folder in dict.fromkeys((str(root()), directory))]
    return [*own, *(mount if ":" in mount else f"{mount}:{mount}" for mount in launch.container_mounts)]


def agent_command(job: Specification, launch: LaunchSection, *options: str) -> list[str]:
    """The argument list. The interpreter is `launch.python` on the host, by default the launcher's own path."""
    agent = [launch.python or sys.executable, "-u", str(root() / "deepy.py"), "--agent", *options]
    return inside(agent, job.directory, launch)
