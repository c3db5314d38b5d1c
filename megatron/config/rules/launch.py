"""Where the run starts: hosts and runners that fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path as File
from typing import Any

from ..arithmetic import machine
from ..problems import Problem
from ..registry import RUNNER, RegistryError, registry_of
from ..rule_context import RuleContext

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_WORD = re.compile(r"[A-Za-z0-9_.:+,@/=][A-Za-z0-9_.:+,@/=-]*")
_RESOURCE = re.compile(r"([a-z0-9][a-z0-9.-]*/)?[A-Za-z0-9][A-Za-z0-9_.-]*")
CONTAINERS = ("apptainer", "enroot", "pyxis")
_SECRET = re.compile(r"(^|_)(API_?)?(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)


def hosts_are_chosen_one_way(context: RuleContext) -> Iterator[Problem]:
    launch = context.config.launch
    if launch.include is not None and launch.exclude is not None:
        yield context.problem(
            "launch.exclude",
            "launch.include",
            rule="hosts must be either included or excluded",
            fix="keep one of them: it says it all",
        )


def _runner(context: RuleContext) -> Any:
    """The `megatron.launch.runner.Runner` that the configuration names; None for auto, and for one that is none."""
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
            "launch.hostfile",
            "launch.runner",
            rule=f"hostfile must not go with the {launch.runner} runner, which starts ranks on this machine only",
            fix="remove the hostfile, or use runner: auto",
        )
    if runner.needs_hostfile and launch.hostfile is None:
        yield context.problem(
            "launch.runner",
            "launch.hostfile",
            rule=f"{launch.runner} must be given the hosts",
            fix="give launch.hostfile, a file with one `name slots=N` per line",
        )


def launch_files_exist(context: RuleContext) -> Iterator[Problem]:
    for name in ("hostfile", "environment_file"):
        path = getattr(context.config.launch, name)
        if path is not None and not File(path).is_file():
            fix = f"check the path; it is seen from {File.cwd()}"
            rule = f"must be a file that exists; there is no file {path}"
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
                "(HF_* and "
                "WANDB_* go along to all ranks, others by launch.forward)",
                where=str(context.origin(("launch", "environment", name))).partition("=")[0],
            )


def job_scripts_can_hold_their_values(context: RuleContext) -> Iterator[Problem]:
    """A line break in a value would be a line of its own in a job script, which the scheduler or a shell obeys."""
    config = context.config
    batch = config.launch.batch
    values: dict[str, str | None] = {"run.name": config.run.name, "run.dir": config.run.dir}
    values["launch.batch.image"] = batch.image
    for name in ("python", "working_directory", "environment_file"):
        values[f"launch.{name}"] = getattr(config.launch, name)
    values |= {f"launch.batch.{name}": " ".join(getattr(batch, name)) for name in ("setup", "options", "resources")}
    for name, value in values.items():
        if value is not None and _CONTROL.search(value):
            yield context.problem(
                name, rule="must be text without line breaks and other control characters", fix="remove them"
            )
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
        wrong = not name or "=" in name or "\0" in name
        if wrong or "\0" in value:
            what = "names of variables must not be empty, nor have '=' or a NUL in them" if wrong else None
            yield context.problem_at(
                ("launch", "environment", name),
                rule=what or "values of variables must not have a NUL in them",
                fix="write NAME: value, one line per variable" if wrong else "remove the NUL (\\0)",
            )


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
        yield context.problem(
            "launch.working_directory",
            rule="must be a folder that exists",
            fix=f"check the path (it is seen from {File.cwd()}), or leave it out: ranks start in the current folder",
        )
    if launch.python is not None and launch.container is None and not machine.program(launch.python, folder):
        yield context.problem(
            "launch.python",
            rule="must be a program that can be started, and there is none of this name",
            fix="give the path of a Python interpreter, or leave it out: ranks use the launcher's own",
        )


def container_can_be_made(context: RuleContext) -> Iterator[Problem]:
    launch = context.config.launch
    if launch.container is None:
        if launch.container_mounts:
            yield context.problem(
                "launch.container_mounts", "launch.container", rule="must go with launch.container", fix="remove them"
            )
        return
    tool, _, image = launch.container.partition(":")
    if tool not in CONTAINERS or not image or _CONTROL.search(image):
        yield context.problem(
            "launch.container",
            rule=f"must be TOOL:IMAGE, and the tool one of {', '.join(CONTAINERS)}",
            fix="for example apptainer:/images/deepy.sif",
        )
    elif tool == "pyxis" and launch.runner not in ("auto", "slurm"):
        yield context.problem(
            "launch.container",
            "launch.runner",
            rule="pyxis must go with the slurm runner: it is an addition to srun",
            fix="use apptainer or enroot, or launch.runner=slurm",
        )
    elif launch.runner == "torchrun":
        yield context.problem(
            "launch.container",
            "launch.runner",
            rule="must go with a runner that starts agents",
            fix="use another runner, or start torchrun inside of the container yourself",
        )
    if launch.python is None:
        yield context.problem(
            "launch.python",
            "launch.container",
            rule="must be given with a container: it is the interpreter inside",
            fix="use launch.python=python3",
        )
    for mount in launch.container_mounts:
        if _CONTROL.search(mount) or "," in mount or not mount.startswith("/"):
            yield context.problem(
                "launch.container_mounts",
                rule="must be absolute paths without commas, each FOLDER or OUTSIDE:INSIDE",
                fix="for example [/data, /scratch/me:/scratch]",
            )


def spares_can_take_a_place(context: RuleContext) -> Iterator[Problem]:
    launch = context.config.launch
    if not launch.spares:
        return
    if not launch.restarts:
        yield context.problem(
            "launch.spares",
            "launch.restarts",
            rule="must go with launch.restarts: a spare host takes a place when the run is started again",
            fix="give launch.restarts, or no spares",
        )
    if launch.runner == "torchrun":
        yield context.problem(
            "launch.spares",
            "launch.runner",
            rule="must be 0 with torchrun, which starts ranks again by itself, on the same hosts",
            fix="use another runner, or no spares",
        )
    if context.starts_here:
        yield context.problem(
            "launch.spares",
            rule="must be fewer than the hosts, and this run has one",
            fix="use spares: 0, or start it on several hosts (launch.hostfile)",
        )


def hosts_can_be_compared(context: RuleContext) -> Iterator[Problem]:
    if context.config.launch.compare and context.starts_here:
        yield context.problem(
            "launch.compare",
            rule="must have hosts to compare, and this run has one",
            fix="start it on several hosts (launch.hostfile), or remove the key",
        )


INPUT_RULES = (launch_files_exist, device_is_here, ranks_can_be_started)
