"""Job scripts and manifests for schedulers, from the `launch.batch` keys."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.worker.code_version import root

from .console import say
from .hosts import HostError
from .status import STOPPED_EARLY

if TYPE_CHECKING:
    from .plan import Plan


def job_script(kind: str, plan: Plan) -> str:
    """The text of a job script ("sbatch" or "pbs") or a manifest ("k8s")."""
    return {"sbatch": sbatch, "pbs": pbs, "k8s": kubernetes}[kind](plan)


def submit(plan: Plan, really: bool) -> int:
    """Write the Slurm job script into the run's directory, and submit it if asked to."""
    path = Path(plan.job.directory, plan.resolved.config.run.dir, "job.sbatch")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(sbatch(plan))
    say(f"wrote {path}")
    if not really:
        sys.stdout.write(f"sbatch {shlex.quote(str(path))}\n")
        return 0
    try:
        return subprocess.run(["sbatch", str(path)], cwd=plan.job.directory, check=False).returncode
    except FileNotFoundError as error:
        raise HostError("--submit needs the program sbatch, which is not installed here") from error


def _deepy(plan: Plan, *options: str) -> str:
    """The command line that the job script runs."""
    python = plan.launch.python or sys.executable
    return shlex.join([python, str(root() / "deepy.py"), *options, plan.script, *plan.words])


def _gpus(plan: Plan) -> int:
    return 0 if plan.launch.device == "cpu" else len(plan.choice.hosts[0].slots)


def sbatch(plan: Plan) -> str:
    """A Slurm job: USR1 before the time is up makes the ranks save and end, and the job is queued again."""
    batch, name = plan.launch.batch, plan.resolved.config.run.name
    logs = Path(plan.job.directory, plan.resolved.config.run.dir, "slurm-%j.out")
    lines = [
        ("job-name", name),
        ("nodes", batch.nodes),
        ("ntasks-per-node", 1),
        ("time", batch.time),
        ("account", batch.account),
        ("partition", batch.partition),
        ("qos", batch.qos),
        ("cpus-per-task", batch.cores),
        ("gpus-per-node", _gpus(plan) or None),
        ("output", logs),
        ("open-mode", "append"),
        ("signal", f"USR1@{batch.warning}" if batch.warning and batch.time else None),
    ]
    flags = [f"--{key}={value}" for key, value in lines if value is not None]
    flags += [] if batch.cores else ["--exclusive"]
    flags += ["--requeue"] if batch.requeue else ["--no-requeue"]
    head = [f"#SBATCH {flag}" for flag in (*flags, *batch.options)]
    again = f'[ "$status" -eq {STOPPED_EARLY} ] && scontrol requeue "$SLURM_JOB_ID"' if batch.requeue else "true"
    return (
        "\n".join([
            "#!/bin/bash",
            *head,
            "",
            *batch.setup,
            f"cd {shlex.quote(plan.job.directory)} || exit 2",
            f"{_deepy(plan, '--runner', 'slurm')}",
            "status=$?",
            f"# {STOPPED_EARLY}: the run was warned in time, has saved, and is not at its end.",
            again,
            "exit $status",
        ])
        + "\n"
    )


def pbs(plan: Plan) -> str:
    """A PBS job; the hosts are reached by ssh."""
    batch = plan.launch.batch
    ranks, gpus = len(plan.choice.hosts[0].slots), _gpus(plan)
    chunk = (
        f"select={batch.nodes}:mpiprocs=1"
        + (f":ngpus={gpus}" if gpus else "")
        + (f":ncpus={batch.cores}" if batch.cores else "")
    )
    head = [f"#PBS -N {plan.resolved.config.run.name[:15]}", f"#PBS -l {chunk}"]
    head += [f"#PBS -l walltime={batch.time}"] if batch.time else []
    head += [f"#PBS -A {batch.account}"] if batch.account else []
    head += [f"#PBS -q {batch.partition}"] if batch.partition else []
    head += ["#PBS -j oe", "#PBS -r y" if batch.requeue else "#PBS -r n", *(f"#PBS {line}" for line in batch.options)]
    hostfile = f'hostfile="{plan.resolved.config.run.dir}/hosts.$PBS_JOBID"'
    return (
        "\n".join([
            "#!/bin/bash",
            *head,
            "",
            *batch.setup,
            f"cd {shlex.quote(plan.job.directory)} || exit 2",
            hostfile,
            'mkdir -p "$(dirname "$hostfile")"',
            f'sort -u "$PBS_NODEFILE" | sed \'s/$/ slots={ranks}/\' > "$hostfile"',
            _deepy(plan, "--hostfile", "HOSTFILE").replace("HOSTFILE", '"$hostfile"', 1),
            "exit $?",
        ])
        + "\n"
    )


def kubernetes(plan: Plan) -> str:
    """An Indexed Job with a headless Service: one pod per host, torchrun in each, pod 0 is where they meet."""
    batch, config = plan.launch.batch, plan.resolved.config
    name = "".join(letter if letter.isalnum() else "-" for letter in config.run.name.lower()).strip("-")[:50] or "run"
    ranks, gpus = len(plan.choice.hosts[0].slots), _gpus(plan)
    script = " ".join(shlex.quote(word) for word in (os.path.relpath(plan.script, plan.job.directory), *plan.words))
    command = (
        f"exec torchrun --nnodes={batch.nodes} --nproc-per-node={ranks} --node-rank=$JOB_COMPLETION_INDEX "
        f"--master-addr={name}-0.{name} --master-port=29500 {script}"
    )
    variables = "".join(
        f"            - {{name: {key}, value: {_yaml(value)}}}\n" for key, value in config.launch.environment.items()
    )
    notes, secret = "", ""
    if config.launch.environment_file:  # what is in it may be secret, so it does not belong here
        notes = f"# kubectl create secret generic {name}-environment --from-env-file={config.launch.environment_file}\n"
        secret = f"          envFrom: [{{secretRef: {{name: {name}-environment}}}}]\n"
    limits = f"\n            limits: {{nvidia.com/gpu: {gpus}}}" if gpus else " {}"
    return f"""{notes}apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{job-name: {name}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: {name}}}
spec:
  completionMode: Indexed
  completions: {batch.nodes}
  parallelism: {batch.nodes}
  backoffLimit: {config.launch.restarts * batch.nodes}
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {int(config.launch.grace) + 30}
      containers:
        - name: ranks
          image: {_yaml(batch.image)}
          workingDir: {_yaml(plan.job.directory)}
          command: ["/bin/sh", "-c", {_yaml(command)}]
          env:
            - {{name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE, value: "1"}}
{variables}{secret}          resources:{limits}
          volumeMounts:
            - {{name: shared-memory, mountPath: /dev/shm}}
            - {{name: work, mountPath: {_yaml(plan.job.directory)}}}
      volumes:
        - {{name: shared-memory, emptyDir: {{medium: Memory}}}}
        - {{name: work, persistentVolumeClaim: {{claimName: {name}}}}}
"""


def _yaml(text: str) -> str:
    """A YAML string in double quotes (JSON strings are YAML)."""
    return json.dumps(text)
