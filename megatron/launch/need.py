"""What a run will need of its devices, said before any of them is taken.

The formulas build layers, for which they need torch, so another process says it: one that sees no device. On a CPU
rank 0 says it, which saves that process, and so it is where this machine does not have the ranks' devices.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from megatron.worker import devices

from .console import YELLOW, log
from .job_plan import JobPlan

TOLD = "JOB_PLAN_TOLD"  # tells rank 0 that it need not
PATIENCE = 60.0  # seconds: more than torch takes to import from a slow file system


def tell_need(plan: JobPlan) -> JobPlan:
    """Print the line of the plan, where the ranks' device is known here; gives the plan that says so to the ranks."""
    config = plan.resolved.config
    if not config.logging.predictions or Path(plan.script).name != "train.py" or plan.launch.device == "cpu":
        return plan
    name = devices.name_of_first(os.environ)
    if name is None:
        return plan
    said = _said(plan, name)
    for line in said:
        log(line, colour=YELLOW if line.startswith("warning") else "")
    job = replace(plan.job, environment={**plan.job.environment, TOLD: "1"}) if said else plan.job
    return replace(plan, job=job)


def _said(plan: JobPlan, device: str) -> list[str]:
    """Lines of another process; none where it fails: no plan is worth a run."""
    top = Path(__file__).resolve().parents[2]
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
