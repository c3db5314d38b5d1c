"""Job scripts and manifests for schedulers, from the `launch.batch` keys."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.file_access import replace_file
from megatron.installation import root
from megatron.worker.job import CONFIG_ERROR

from ..report.console import STOPPED_EARLY, log
from .hosts import HostError

IMAGE_GROUP = 1000  # owns the volume, so that the users of the project's images can write there
LOST_PODS = 3  # times that all pods may come back after one was lost, where launch.restarts allows fewer

if TYPE_CHECKING:
    from .job_plan import JobPlan


def job_script(kind: str, plan: JobPlan) -> str:
    """The text of a job script ("sbatch" or "pbs") or a manifest ("k8s")."""
    if kind == "sbatch":  # Slurm opens the output before the job runs: it must be in a folder that exists
        return sbatch(plan, plan.job.directory)
    return {"pbs": pbs, "k8s": kubernetes}[kind](plan)


def submit(plan: JobPlan, really: bool) -> int:
    """Write the Slurm job script, and submit it if asked to.

    Only a job that is submitted here gets the run's directory, for the script and Slurm's output."""
    run, directory = plan.resolved.config.run, Path(plan.job.directory)
    if not really:
        path = directory / f"{Path(run.dir).name or 'job'}.sbatch"
        replace_file(path, sbatch(plan, str(directory)))
        log(f"wrote {path}")
        sys.stdout.write(f"sbatch {shlex.quote(str(path))}\n")
        return 0
    if shutil.which("sbatch") is None:
        raise HostError("--submit needs the program sbatch, which is not installed here")
    path = directory / run.dir / "job.sbatch"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, sbatch(plan, str(path.parent)))
    log(f"wrote {path}")
    return subprocess.run(["sbatch", str(path)], cwd=directory, check=False).returncode


def _deepy(plan: JobPlan, *options: str, hostfile: str = "") -> str:
    """The command line that the job script runs. `hostfile` is an option in the shell's own words."""
    python = (not plan.launch.container and plan.launch.python) or sys.executable  # deepy.py stays outside
    words = [shlex.join([python, str(root() / "deepy.py"), *options]), hostfile, shlex.join([plan.script, *plan.words])]
    return " ".join(filter(None, words))


def _gpus(plan: JobPlan) -> int:
    return 0 if plan.launch.device == "cpu" else len(plan.choice.hosts[0].slots)


def sbatch(plan: JobPlan, folder: str) -> str:
    """A Slurm job: USR1 before the time is up makes the ranks save and end, and the job is queued again.

    Args:
        folder: of the job's own output.
    """
    batch, name = plan.launch.batch, plan.resolved.config.run.name
    logs = folder.replace("%", "%%") + "/slurm-%j.out"  # Slurm fills in what follows a percent sign
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
    flags = [shlex.quote(f"--{key}={value}") for key, value in lines if value is not None]  # Slurm reads quotes too
    flags += [] if batch.cores else ["--exclusive"]  # all cores
    memory = batch.memory or (None if batch.cores else "0")  # 0 is all that there is
    flags += [f"--mem={memory}"] if memory else []
    flags += ["--requeue"] if batch.requeue else ["--no-requeue"]
    head = [f"#SBATCH {flag}" for flag in (*flags, *batch.options)]
    again = f'[ "$status" -eq {STOPPED_EARLY} ] && scontrol requeue "$SLURM_JOB_ID"' if batch.requeue else "true"
    note = f"# {STOPPED_EARLY}: the run was warned in time, has saved, and is not at its end."
    return _script(plan, head, _deepy(plan, "--runner", "slurm"), "status=$?", note, again, "exit $status")


def _script(plan: JobPlan, head: list[str], *work: str) -> str:
    enter = f"cd {shlex.quote(plan.job.directory)} || exit 2"
    return "".join(f"{line}\n" for line in ("#!/bin/bash", *head, "", *plan.launch.batch.setup, enter, *work))


def pbs(plan: JobPlan) -> str:
    """A PBS job. The hosts are reached by ssh."""
    batch = plan.launch.batch
    ranks, gpus = len(plan.choice.hosts[0].slots), _gpus(plan)
    chunk = (
        f"select={batch.nodes}:mpiprocs=1"
        + (f":ngpus={gpus}" if gpus else "")
        + (f":ncpus={batch.cores}" if batch.cores else "")
        + (f":mem={batch.memory}" if batch.memory else "")
    )
    name = re.sub(r"[^A-Za-z0-9_.+-]", "_", plan.resolved.config.run.name)
    head = [f"#PBS -N {name[:15] if name[:1].isalpha() else 'r' + name[:14]}", f"#PBS -l {chunk}"]
    head += [f"#PBS -l walltime={batch.time}"] if batch.time else []
    head += [f"#PBS -A {batch.account}"] if batch.account else []
    head += [f"#PBS -q {batch.partition}"] if batch.partition else []
    head += ["#PBS -j oe", "#PBS -r y" if batch.requeue else "#PBS -r n", *(f"#PBS {line}" for line in batch.options)]
    hostfile = f'hostfile={shlex.quote(plan.resolved.config.run.dir)}/hosts."$PBS_JOBID"'
    folder = 'mkdir -p -- "$(dirname -- "$hostfile")"'
    hosts = f'sort -u "$PBS_NODEFILE" | sed \'s/$/ slots={ranks}/\' > "$hostfile"'
    return _script(plan, head, hostfile, folder, hosts, _deepy(plan, hostfile='--hostfile="$hostfile"'), "exit $?")


def kubernetes(plan: JobPlan) -> str:
    """An Indexed Job with a headless Service: one pod per host, torchrun in each, pod 0 is where they meet."""
    batch, config = plan.launch.batch, plan.resolved.config
    name = _service_name(config.run.name)
    variables = "".join(
        f"            - {{name: {_yaml(key)}, value: {_yaml(value)}}}\n"
        for key, value in config.launch.environment.items()
    )
    notes = secret = ""
    if config.launch.environment_file:  # what is in it may be secret, so it does not belong here
        file = shlex.quote(config.launch.environment_file)
        notes = f"# kubectl create secret generic {name}-environment --from-env-file={file}\n"
        secret = f"          envFrom: [{{secretRef: {{name: {name}-environment}}}}]\n"
    limits, security = _resources(plan)
    # A lost pod makes its peers fail too. All come back, and continue from the newest checkpoint: that must be allowed.
    pods, failures = batch.nodes, max(config.launch.restarts, LOST_PODS) * batch.nodes
    notes = _volume(plan, name) + notes
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
  completions: {pods}
  parallelism: {pods}
  backoffLimit: {failures}
  podFailurePolicy:
    rules:
      - action: FailJob
        onExitCodes: {{containerName: ranks, operator: In, values: [{CONFIG_ERROR}]}}
      - action: Ignore
        onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      securityContext: {{fsGroup: {IMAGE_GROUP}}}
      terminationGracePeriodSeconds: {int(config.launch.grace) + 30}
      containers:
        - name: ranks
          image: {_yaml(batch.image)}
          workingDir: {_yaml(plan.job.directory)}
          command: ["/bin/sh", "-c", {_yaml(_command_of_a_pod(plan, name))}]
          env:
            - {{name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE, value: "1"}}
{variables}{secret}          securityContext:{security}
          resources:{limits}
          volumeMounts:
            - {{name: shared-memory, mountPath: /dev/shm}}
            - {{name: work, mountPath: {_yaml(plan.job.directory)}}}
      volumes:
        - {{name: shared-memory, emptyDir: {{medium: Memory}}}}
        - {{name: work, persistentVolumeClaim: {{claimName: {name}}}}}
"""


def _resources(plan: JobPlan) -> tuple[str, str]:
    """The requests and rights of a pod's container, as the values of `resources` and `securityContext`."""
    batch = plan.launch.batch
    wanted = ({f"{batch.gpus}.com/gpu": _gpus(plan)} if _gpus(plan) else {}) | batch.resources
    limits = f"\n            limits: {json.dumps(wanted)}" if wanted else " {}"
    # Cards that read memory by themselves need it locked, which a pod may do with this capability.
    locks = any("rdma" in each or "efa" in each for each in wanted)
    return limits, ' {capabilities: {add: ["IPC_LOCK"]}}' if locks else " {}"


def _command_of_a_pod(plan: JobPlan, service: str) -> str:
    """torchrun with this pod's ranks. All meet at pod 0."""
    script, words = Path(plan.script), [_in_an_image(word) for word in plan.words]
    if script.resolve().parent == root():
        run = shlex.join(["deepy", script.stem, *words])
        start = f"--no-python {run}"
    else:  # a script of the user's, which is in the volume
        start = shlex.join([os.path.relpath(script, plan.job.directory), *words])
    return (
        f"exec torchrun --nnodes={plan.launch.batch.nodes} --nproc-per-node={len(plan.choice.hosts[0].slots)} "
        f"--node-rank=$JOB_COMPLETION_INDEX --master-addr={service}-0.{service} --master-port=29500 {start}"
    )


def _in_an_image(word: str) -> str:
    """A ready configuration by its name: its path is another one there."""
    path, ready = Path(word), root() / "configs"
    return (
        path.resolve().relative_to(ready).with_suffix("").as_posix() if path.resolve().is_relative_to(ready) else word
    )


def _volume(plan: JobPlan, name: str) -> str:
    """Comments: what the image and the volume must have."""
    config, folder = plan.resolved.config, plan.job.directory
    given = [word for word in plan.taken.files if _in_an_image(word) == word]
    given += [
        each.stream or f"{each.path}.bin and .idx"
        for each in (*config.data.train, *chain(*config.data.validation.values()))
    ]
    given += [config.tokenizer.path] if config.tokenizer.path else []
    shown = "".join(f"#   {_yaml(str(each))}\n" for each in dict.fromkeys(given))
    return (
        f"# The image {_yaml(plan.launch.batch.image)} must have the command deepy, as the project's own images have.\n"
        f"# The claim {name} is mounted at {_yaml(folder)} (ReadWriteMany with several pods).\n"
        f"# The run writes there, and reads there:\n{shown}"
    )


def _service_name(name: str) -> str:
    """A name as a Service may have it: small letters of ASCII, digits and hyphens, a letter first, 63 at most. A pod
    adds its number to it."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:50].strip("-")


def _yaml(text: str) -> str:
    """A YAML string in double quotes (JSON strings are YAML)."""
    return json.dumps(text)
