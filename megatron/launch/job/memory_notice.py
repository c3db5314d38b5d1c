"""The devices' memory that a run will need, reported before any of them is taken.

The formulas build layers, for which they need torch, so another process says it: one that sees no device. On a CPU
rank 0 says it, which saves that process, and so it is where this machine is no host of the run. Rank 0 says it again
where its device is another one than the launcher has seen.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from megatron.worker import devices, network

from ..report.console import YELLOW, log
from .job_plan import JobPlan

TOLD = "JOB_PLAN_TOLD"  # has the device of the plan, for rank 0
PATIENCE = 20.0  # seconds: torch takes two to import, and a line is not worth a long wait


def tell_need(plan: JobPlan) -> JobPlan:
    """Print the line of the plan, where the ranks' device is known here, and give the ranks that plan."""
    config = plan.resolved.config
    if not config.logging.predictions or Path(plan.script).name != "train.py" or plan.launch.device == "cpu":
        return plan
    name = devices.name_of_first(os.environ) if _among_hosts(plan) else None
    if name is None:
        return plan
    said = _said(plan, name)
    for line in said:
        log(line, colour=YELLOW if line.startswith("warning") else "")
    job = replace(plan.job, environment={**plan.job.environment, TOLD: name}) if said else plan.job
    return replace(plan, job=job)


def _among_hosts(plan: JobPlan) -> bool:
    """Whether ranks start on this machine: a login node may have another device than they."""
    if plan.choice.starter.here:
        return True
    own = socket.gethostname().partition(".")[0]
    known = {own, "localhost", os.environ.get("SLURMD_NODENAME"), *(each.address for each in network.addresses())}
    names = [host.name for host in plan.choice.hosts]
    return any(name in known or name.partition(".")[0] == own for name in names)


def _said(plan: JobPlan, device: str) -> list[str]:
    """Lines of another process, none where it fails: a failed plan must not end a run."""
    top = Path(__file__).resolve().parents[3]
    path = os.pathsep.join(filter(None, (str(top), os.environ.get("PYTHONPATH"))))
    hidden = {name: "" for names in devices.VISIBLE.values() for name in names}
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", **hidden}
    per_host = max(len(host.slots) for host in plan.choice.hosts)
    words = ["-m", "megatron.plan", "-", str(plan.choice.ranks), str(per_host), device]
    try:
        done = subprocess.run(
            [sys.executable, *words], check=False,
            input=plan.job.configuration, capture_output=True, text=True, env=environment, timeout=PATIENCE,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.startswith(("plan: ", "      ", "warning: "))]
