"""The commands, ranks and variables of a start, as text. Secrets are blotted out."""

from __future__ import annotations

import shlex

from megatron.config.problems import list_problems
from megatron.config.words import counted
from megatron.worker import devices

from .agent.ranks import rank_environment
from .job.job_plan import JobPlan, commands
from .report import forwarding
from .wire.specification import Host


def describe(plan: JobPlan) -> str:
    """The plan for people. Nothing is started."""
    job, choice = plan.job, plan.choice
    where = f"{counted(choice.ranks, 'rank')} on {counted(len(choice.hosts), 'host')}"
    lines = [f"runner {choice.runner} ({choice.reason}): {where}", ""]
    lines.append("commands that this machine would start:")
    for command in commands(plan):
        variables = [f"{name}={shlex.quote(value)}" for name, value in forwarding.shown(command.environment).items()]
        lines.append("  " + " ".join([*variables, shlex.join(command.arguments)]))
    lines += [
        "",
        "every rank executes:",
        f"  {shlex.join(job.command)}",
        f"in {job.directory}",
        "",
        "with these variables:",
    ]
    lines += [f"  {name}={shlex.quote(value)}" for name, value in sorted(forwarding.shown(job.environment).items())]
    lines += ["  JOB_CONFIG=(a private file with the configuration)", f"  JOB_CONFIG_SHA256={job.sha256}", ""]
    first = 0
    for host in job.hosts:
        lines += _host(plan, host, first)
        first += len(host.slots)
    lines += ["", "the configuration is valid for that many ranks"]
    if plan.resolved.warnings:
        lines += ["", list_problems(plan.resolved.warnings)]
    return "\n".join(lines) + "\n"


def _host(plan: JobPlan, host: Host, first: int) -> list[str]:
    """A host's ranks, one line each."""
    size, launch = len(host.slots), plan.launch
    master = (
        launch.master_address or ("127.0.0.1" if len(plan.job.hosts) == 1 else f"(of {plan.job.hosts[0].name})"),
        launch.master_port or "(a free port there)",
    )
    lines = [f"host {host.name}: slots {', '.join(map(str, host.slots))}"]
    extra = {}
    if plan.choice.starter.here:
        extra = devices.visibility(host.slots, plan.job.environment, plan.job.device)
        extra["OMP_NUM_THREADS"] = plan.job.environment.get("OMP_NUM_THREADS", str(devices.threads_per_rank(size)))
    else:
        lines.append(
            "  its agent adds what only the host knows: visible devices, OMP_NUM_THREADS (unless set), network "
            "interface, "
            "fabric defaults"
        )
    for local in range(size if not plan.job.wrapper else 0):
        values = rank_environment(extra, first + local, local, size, plan.job.world_size, master)
        lines.append("  " + " ".join(f"{name}={value}" for name, value in values.items()))
    return lines
