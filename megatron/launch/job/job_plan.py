"""A run as it will start: the resolved configuration, the hosts, and the job of every agent."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

from megatron import config as configuration
from megatron.config.problems import ConfigError, Problem
from megatron.config.registry import registry_of
from megatron.config.source.arguments import ArgumentError, Arguments, split
from megatron.installation import code_now, code_version, root
from megatron.worker.rendezvous import SECRET

from .. import options
from ..report import forwarding
from ..wire.protocol import Command
from ..wire.specification import Specification
from .hosts import HostError, RunnerChoice, choose_runner, some_hosts
from .settings import launch_section, registry_for

if TYPE_CHECKING:
    from megatron.config import Config

    from ...config.resolution import Resolved
    from ...config.sections.layout import LaunchSection

# Scripts that read a trained model: the run's training data need not be there any more.
WITHOUT_DATA = ("evaluate.py", "generate.py")
# Scripts whose ranks say where they are, once they have their imports.
WATCHED = ("train.py", "align.py", "evaluate.py", "extract.py")


@dataclass(frozen=True)
class JobPlan:
    """Everything that is known before the first process starts."""

    script: str  # path of the script
    taken: Arguments  # its arguments, the launcher's options added as overrides
    resolved: Resolved  # the configuration, resolved for the run's number of ranks
    choice: RunnerChoice  # the runner and the hosts
    job: Specification  # of the agents

    @property
    def words(self) -> tuple[str, ...]:
        """The words after the script on a command line that starts the same run."""
        own = self.taken.own
        return (
            *self.taken.files,
            *self.taken.overrides,
            *(("--", *own) if own and not own[0].startswith("-") else own),
        )

    @property
    def launch(self) -> LaunchSection:
        return self.resolved.config.launch

    @property
    def hang(self) -> str:
        """The reaction to ranks that hang."""
        asked = self.resolved.config.watch.hang
        return ("stop" if self.launch.restarts else "report") if asked == "auto" else asked

    @property
    def logs(self) -> Path:
        return Path(self.job.directory, self.resolved.config.run.dir, "logs")


def make_plan(
    script: str, words: Sequence[str], overrides: Sequence[str], environment: Mapping[str, str], *, later: bool = False
) -> JobPlan:
    """Resolve and check everything about a run.

    Args:
        script: the script that every rank executes.
        words: its arguments: files, overrides, its own options.
        overrides: the launcher's options, as overrides.
        environment: of the launcher.
        later: the run will start in a scheduler's job (`launch.batch`), on hosts that are not known yet.

    Raises:
        ConfigError, HostError, ArgumentError: mistakes of the user.
    """
    taken = script_arguments(script, words)
    taken = replace(taken, overrides=(*taken.overrides, *overrides))
    launch = launch_section(taken.files, taken.overrides)
    registry = registry_for(taken.files, taken.overrides)
    choice = some_hosts(launch) if later else choose_runner(launch, environment, registry)
    plan = _plan(script, taken, choice, environment, here=not later)
    if not later and (alone := _nothing_to_compare(plan)):
        raise ConfigError([*alone, *plan.resolved.warnings])
    return plan


def _nothing_to_compare(plan: JobPlan) -> list[Problem]:
    """A mistake where hosts are to be compared and cannot be."""
    if not plan.launch.compare:
        return []
    if len(plan.choice.hosts) + len(plan.choice.spares) < 2:
        why, way = "must have hosts to compare, and this run has one", "name the others in launch.hostfile"
    elif any(each.dials for each in commands(plan)):
        why = f"must have a runner that reaches each host by itself, which {plan.choice.transport} does not"
        way = "use launch.runner=ssh or slurm"
    else:
        return []
    key = "launch.compare"
    return [Problem(key, why, f"{way}, or remove the key", True, str(plan.resolved.origins[key]))]


def _plan(
    script: str,
    taken: Arguments,
    choice: RunnerChoice,
    environment: Mapping[str, str],
    extra: Sequence[str] = (),
    *,
    here: bool = True,
) -> JobPlan:
    """The plan for hosts that are chosen. `extra` overrides do not belong to what the user asked for. `here` as in
    `config.load`."""
    resolved = configuration.load(
        taken.files,
        [*taken.overrides, *extra],
        ranks=choice.ranks,
        check_inputs=Path(script).name not in WITHOUT_DATA,
        here=here,
    )
    if apart := _pairs_over_hosts(resolved, choice):
        raise ConfigError([*apart, *resolved.warnings])
    resolved = replace(resolved, warnings=(*resolved.warnings, *_over_hosts(resolved, choice)))
    _check_options(script, taken.own, resolved.config)
    return JobPlan(script, taken, resolved, choice, _specification(script, taken.own, resolved, choice, environment))


def _over_hosts(resolved: Resolved, choice: RunnerChoice) -> list[Problem]:
    """A warning where tensor parallel ranks, which are neighbours, are not all on one host."""
    parallel, slots = resolved.config.parallel, [len(host.slots) for host in choice.hosts]
    tensor = parallel.tensor * parallel.columns
    if len(slots) == 1 or all(number % tensor == 0 for number in slots):
        return []
    least, most = min(slots), max(slots)
    each = str(least) if least == most else f"{least} to {most}"
    key, blocks = "parallel.tensor", len(resolved.config.model.blocks)
    sizes = key if parallel.columns == 1 else f"{key} * parallel.columns"
    return [
        Problem(
            key,
            f"tensor parallel ranks should share a host: {tensor} do not divide the {each} ranks of a host. The "
            f"sums over them, several in each of {blocks} blocks and each micro-batch, cross the network",
            f"use {sizes}={gcd(*slots)}, and parallel.pipeline for the rest",
            parallel.tensor,
            str(resolved.origins[key]),
            fatal=False,
        )
    ]


def _pairs_over_hosts(resolved: Resolved, choice: RunnerChoice) -> list[Problem]:
    """A mistake where ranks that the configuration calls a pair would be on two hosts."""
    options, slots = resolved.config.parallel.communication, [len(host.slots) for host in choice.hosts]
    # islands then replace hosts, and a rule has checked them
    if options.pair is None or options.island is not None or len(slots) == 1:
        return []
    if not (wrong := [host for host in choice.hosts if len(host.slots) % options.pair]):
        return []
    key = "parallel.communication.pair"
    return [
        Problem(
            key,
            f"must lie within a host: it must divide the ranks of each, and {wrong[0].name} has {len(wrong[0].slots)}",
            "give the ranks of a host that share the fastest links, or remove the key",
            options.pair,
            str(resolved.origins[key]),
        )
    ]


def _check_options(script: str, own: Sequence[str], config: Config) -> None:
    """Check a script's own options, where the registry has a check.

    Raises:
        ArgumentError: they have mistakes.
    """
    if own and Path(script).resolve() == root() / "train.py":
        hint = options.meant(own[0])
        raise ArgumentError(f"train.py has no option {own[0]}{hint} (and would not read {' '.join(own)})")
    registry = registry_of(tuple(config.model.extensions))
    name = Path(script).stem
    if name in registry.names("check") and (found := registry.load("check", name)(own, config)):
        raise ArgumentError("\n".join(found))


def without_hosts(plan: JobPlan, lost: set[str], environment: Mapping[str, str]) -> JobPlan:
    """The same run on the hosts that are left: fewer data parallel ranks, the same global batch.

    Raises:
        ConfigError: the layout or the batch does not allow that many ranks.
        HostError: no host is left, or rank 0's address was given and its host is lost.
    """
    hosts = tuple(host for host in plan.choice.hosts if host.name not in lost)
    if not hosts:
        raise HostError("no host is left")
    if plan.launch.master_address and plan.choice.hosts[0].name in lost:
        raise HostError("launch.master_address belongs to a host that is lost")
    size = plan.resolved.config.training.global_batch_size
    same_batch = ["training.accumulation=null", f"training.global_batch_size={size}"]
    return _plan(plan.script, plan.taken, replace(plan.choice, hosts=hosts), environment, same_batch)


def with_spares(plan: JobPlan, lost: set[str]) -> tuple[JobPlan, dict[str, str]]:
    """The same run, ranks and layout included, with spare hosts in the places of lost ones, as far as there are any.

    Returns:
        The plan, and by lost host the one that has taken its place.
    """
    spares = [host for host in plan.choice.spares if host.name not in lost]
    hosts, taken = list(plan.choice.hosts), dict[str, str]()
    for index, host in enumerate(hosts):
        fits = [each for each in spares if len(each.slots) >= len(host.slots)]
        given = index == 0 and plan.launch.master_address is not None  # an address that no other host has
        if host.name in lost and fits and not given:
            spares.remove(fits[0])
            hosts[index] = replace(fits[0], slots=fits[0].slots[: len(host.slots)])
            taken[host.name] = fits[0].name
    choice = replace(plan.choice, hosts=tuple(hosts), spares=tuple(spares))
    return replace(plan, choice=choice, job=replace(plan.job, hosts=tuple(hosts))), taken


def script_arguments(script: str, words: Sequence[str]) -> Arguments:
    """A script's arguments, parsed and checked.

    Raises:
        ArgumentError: no script, no configuration, or an option of deepy.py behind the script.
    """
    if not script.endswith(".py") or script.startswith("-"):
        raise ArgumentError(
            f"expected a script (SCRIPT.py), found {script!r}: use one such as train.py, or the installed command deepy"
        )
    if not Path(script).is_file():
        raise ArgumentError(f"there is no script {script}")
    taken = split(words)
    late = [word for word in taken.own if word.startswith("--") and word[2:].partition("=")[0] in options.NAMES]
    if late:
        raise ArgumentError(f"{late[0]} is an option of deepy.py: write it before {script}")
    if not taken.files:
        raise ArgumentError(f"no configuration file: deepy.py {script} a.yml ...")
    return taken


def _specification(
    script: str, own: Sequence[str], resolved: Resolved, choice: RunnerChoice, environment: Mapping[str, str]
) -> Specification:
    config = resolved.config
    launch, here = config.launch, choice.starter.here
    variables = {} if here else forwarding.forwarded(environment, launch.forward)
    if launch.environment_file:
        try:
            variables |= forwarding.read_file(launch.environment_file)
        except (OSError, ValueError) as error:
            raise HostError(f"launch.environment_file: {error}") from error
    directory = launch.working_directory or os.getcwd()
    interface = {name: launch.interface for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if launch.interface}
    job = Specification(
        hosts=choice.hosts,
        command=(launch.python or sys.executable, "-u", os.path.join(directory, script), *own),
        directory=directory,
        environment={**interface, **variables, **launch.environment},
        configuration=configuration.to_yaml(resolved),
        code=code_version(),
        logs=str(Path(config.run.dir, "logs")),
        console=launch.console,
        plain=here,
        terminal=_terminal() if here else (None, None),
        grace=launch.grace,
        heartbeat=0.0 if here else launch.heartbeat,  # here the end of a pipe shows that the launcher is gone
        device=launch.device,
        bind=launch.bind,
        watch=_limits(script, config),
        credentials_file=str(Path(directory, config.run.dir, f".credentials-{secrets.token_hex(4)}")),
    )
    wrap = choice.wrapper.wrap
    return wrap(job, launch) if wrap else job


def _limits(script: str, config: Config) -> dict[str, float]:
    """Seconds that ranks may stay in a phase. `start` is of ranks that have said nothing yet: a user's script never
    says anything, so it has none."""
    limits = {name: value for name, value in config.watch.model_dump().items() if isinstance(value, float)}
    path = Path(script).resolve()
    return limits | ({"start": config.watch.setup} if path.name in WATCHED and path.parent == root() else {})


def _terminal() -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """The size of the terminal behind standard output and standard error, where that is one."""
    columns, rows = shutil.get_terminal_size()
    output, errors = ((rows, columns) if stream.isatty() else None for stream in (sys.stdout, sys.stderr))
    return output, errors


def restarted(plan: JobPlan, attempt: int) -> Specification:
    """The job of the agents at a start, with the number of earlier starts (requeued Slurm jobs too) and the time."""
    before = os.environ.get("SLURM_RESTART_COUNT", "")
    number = attempt + (int(before) if before.isdigit() else 0)
    own = {"JOB_ATTEMPT": str(number), "JOB_SINCE": repr(time.time()), SECRET: secrets.token_hex(16)}
    environment = {**plan.job.environment, **own}
    code = code_now() if attempt else plan.job.code  # hosts must have what this one has now
    return replace(plan.job, attempt=attempt, environment=environment, code=code)


def commands(plan: JobPlan) -> list[Command]:
    """The commands of the chosen runner."""
    return plan.choice.commands(plan.job, plan.launch)
