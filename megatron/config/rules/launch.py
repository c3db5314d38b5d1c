"""Where the run starts: hosts, runners and containers that fit together."""

import re
from collections.abc import Iterator
from pathlib import Path as File
from typing import Any

from ..arithmetic import machine
from ..problems import Problem
from ..registry import RUNNER, RegistryError, registry_of
from ..rule_context import Check, RuleContext

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_WORD = re.compile(r"[A-Za-z0-9_.:+,@/=][A-Za-z0-9_.:+,@/=-]*")
_RESOURCE = re.compile(r"([a-z0-9][a-z0-9.-]*/)?[A-Za-z0-9][A-Za-z0-9_.-]*")
CONTAINERS = ("apptainer", "enroot", "pyxis")
_SECRET = re.compile(r"(^|_)(API_?)?(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)


def _runner(context: RuleContext) -> Any:
    """The `megatron.launch.runner.Runner` that the configuration names, or None."""
    try:
        found = registry_of(tuple(context.config.model.extensions)).load(RUNNER, context.config.launch.runner)
    except RegistryError:  # which another rule reports
        return None
    return found if hasattr(found, "needs_hostfile") else None  # else the launcher refuses it


def runner_has_its_hosts(context: RuleContext) -> Iterator[Problem]:
    launch = context.config.launch
    runner = _runner(context)
    if runner is None:
        return
    if runner.here and launch.hostfile is not None:
        yield context.problem(
            "launch.hostfile launch.runner",
            rule=f"hostfile must not go with the {launch.runner} runner, which starts ranks on this machine only",
            fix="remove the hostfile, or use runner: auto",
        )
    if runner.needs_hostfile and launch.hostfile is None:
        rule = f"{launch.runner} must be given the hosts"
        fix = "give launch.hostfile, a file with one `name slots=N` per line"
        yield context.problem("launch.runner launch.hostfile", rule=rule, fix=fix)


def launch_files_exist(context: RuleContext) -> Iterator[Problem]:
    for name in ("hostfile", "environment_file"):
        path = getattr(context.config.launch, name)
        if path is not None and not File(path).is_file():
            fix = f"check the path, which is seen from {File.cwd()}"
            rule = f"must be a file that exists, and there is no file {path}"
            yield context.problem(f"launch.{name}", rule=rule, fix=fix)


def secrets_stay_out_of_the_configuration(context: RuleContext) -> Iterator[Problem]:
    """Neither their values nor the argument that has them is shown."""
    for name in context.config.launch.environment:
        if _SECRET.search(name):
            yield Problem(
                f"launch.environment.{name}",
                rule="must not be a secret: the configuration is kept with the run, in every checkpoint and in "
                "the logs",
                fix="put it into a file that launch.environment_file names, or export it where the run is started "
                "(all ranks receive HF_* and WANDB_*, and others by launch.forward)",
                where=str(context.origin(("launch", "environment", name))).partition("=")[0],
            )


def job_scripts_can_hold_their_values(context: RuleContext) -> Iterator[Problem]:
    """A line break in a value would start another line of a job script, which the scheduler or a shell obeys."""
    config = context.config
    batch = config.launch.batch
    values: dict[str, str | None] = {"run.name": config.run.name, "run.dir": config.run.dir}
    values["launch.batch.image"] = batch.image
    for name in ("python", "working_directory", "environment_file"):
        values[f"launch.{name}"] = getattr(config.launch, name)
    values |= {f"launch.batch.{name}": " ".join(getattr(batch, name)) for name in ("setup", "options", "resources")}
    for name, value in values.items():
        if value is not None and _CONTROL.search(value):
            rule = "must be text without line breaks and other control characters"
            yield context.problem(name, rule=rule, fix="remove them")
    for name in ("time", "account", "partition", "qos", "memory"):
        value = getattr(batch, name)
        if value is not None and not _WORD.fullmatch(value):
            rule = "must be one word of letters, digits and . _ : + , @ / = -"
            yield context.problem(f"launch.batch.{name}", rule=rule, fix="write it as the scheduler shows it")
    for name in batch.resources:
        if not _RESOURCE.fullmatch(name):
            rule = "must be names of resources as Kubernetes has them, such as rdma/hca"
            yield context.problem("launch.batch.resources", rule=rule, fix="see `kubectl describe node`")


def environment_can_be_set(context: RuleContext) -> Iterator[Problem]:
    """The names and values that an operating system takes."""
    for name, value in context.config.launch.environment.items():
        if not name or "=" in name or "\0" in name:
            rule = "names of variables must not be empty, nor have '=' or a NUL in them"
            fix = "write NAME: value, one line per variable"
        elif "\0" in value:
            rule, fix = "values of variables must not have a NUL in them", "remove the NUL (\\0)"
        else:
            continue
        yield context.problem_at(("launch", "environment", name), rule=rule, fix=fix)


def device_is_here(context: RuleContext) -> Iterator[Problem]:
    if context.config.launch.device == "cuda" and context.starts_here and not machine.has_gpu():
        yield context.problem(
            "launch.device",
            rule="this machine must have an NVIDIA or AMD GPU, and it has none",
            fix="use device: auto or cpu, or name hosts that have GPUs (launch.hostfile)",
        )


def ranks_can_be_started(context: RuleContext) -> Iterator[Problem]:
    """The interpreter and the folder that every rank starts with, where they are on this machine."""
    launch = context.config.launch
    if not context.starts_here:
        return
    folder = launch.working_directory or "."
    if not File(folder).is_dir():
        fix = f"check the path (it is seen from {File.cwd()}), or remove it: ranks start in the current folder"
        yield context.problem("launch.working_directory", rule="must be a folder that exists", fix=fix)
    if launch.python is not None and launch.container is None and not machine.program(launch.python, folder):
        yield context.problem(
            "launch.python",
            rule="must be a program that can be started, and there is none of this name",
            fix="give the path of a Python interpreter, or remove it: ranks use the launcher's own",
        )


def container_can_be_made(context: RuleContext) -> Iterator[Problem]:
    launch, key = context.config.launch, "launch.container"
    if launch.container is None:
        return
    tool, _, image = launch.container.partition(":")
    if tool not in CONTAINERS or not image or _CONTROL.search(image):
        rule = f"must be TOOL:IMAGE, and the tool one of {', '.join(CONTAINERS)}"
        yield context.problem(key, rule=rule, fix="for example apptainer:/images/deepy.sif")
    elif tool == "pyxis" and launch.runner not in ("auto", "slurm"):
        yield context.problem(
            f"{key} launch.runner",
            rule="pyxis must go with the slurm runner: it is an addition to srun",
            fix="use apptainer or enroot, or launch.runner=slurm",
        )
    elif launch.runner == "torchrun":
        yield context.problem(
            f"{key} launch.runner",
            rule="must go with a runner that starts agents",
            fix="use another runner, or start torchrun inside of the container yourself",
        )
    if any(_CONTROL.search(mount) or "," in mount or not mount.startswith("/") for mount in launch.container_mounts):
        yield context.problem(
            "launch.container_mounts",
            rule="must be absolute paths without commas, each FOLDER or OUTSIDE:INSIDE",
            fix="for example [/data, /scratch/me:/scratch]",
        )


def several_hosts_are_there(context: RuleContext) -> Iterator[Problem]:
    launch, several = context.config.launch, "start it on several hosts (launch.hostfile)"
    if launch.spares and context.starts_here:
        rule, fix = "must be fewer than the hosts, and this run has one", f"use spares: 0, or {several}"
        yield context.problem("launch.spares", rule=rule, fix=fix)
    if launch.compare and context.starts_here:
        rule, fix = "must have hosts to compare, and this run has one", f"{several}, or remove the key"
        yield context.problem("launch.compare", rule=rule, fix=fix)


CHECKS = (
    Check(
        "launch.exclude launch.include",
        lambda c: c.launch.include is not None and c.launch.exclude is not None,
        "hosts must be either included or excluded",
        "remove one of them: the other says it all",
    ),
    Check(
        "launch.container_mounts launch.container",
        lambda c: c.launch.container is None and c.launch.container_mounts,
        "must go with launch.container",
        "remove them",
    ),
    Check(
        "launch.python launch.container",
        lambda c: c.launch.container is not None and c.launch.python is None,
        "must be given with a container: it is the interpreter inside",
        "use launch.python=python3",
    ),
    Check(
        "launch.spares launch.restarts",
        lambda c: c.launch.spares and not c.launch.restarts,
        "must go with launch.restarts: a spare host takes a place when the run is started again",
        "give launch.restarts, or no spares",
    ),
    Check(
        "launch.spares launch.runner",
        lambda c: c.launch.spares and c.launch.runner == "torchrun",
        "must be 0 with torchrun, which starts ranks again by itself, on the same hosts",
        "use another runner, or no spares",
    ),
)
INPUT_RULES = (launch_files_exist, device_is_here, ranks_can_be_started)
