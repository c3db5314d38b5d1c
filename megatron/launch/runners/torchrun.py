"""torchrun on every host: our agent starts one torchrun per host, and torchrun starts, and restarts, the ranks."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from ..runner import Runner
from ..wire.specification import Specification

if TYPE_CHECKING:
    from ...config.sections.layout import LaunchSection

# Addresses and the number of slots are known when the agent starts it. Everything else is an argument. torchrun would
# guess the first host and its address from host names, and be wrong on many machines.
_SHELL = (
    'case "$RANK" in 0) first=true;; *) first=false;; esac; '
    'exec "$0" -u -m torch.distributed.run --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" '
    '--rdzv-conf="is_host=$first" --local-addr="$JOB_ADDRESS" --nproc-per-node="$JOB_SLOTS" "$@"'
)
# Without this a restart on several hosts reads the previous attempt's addresses and never recovers.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"


def wrapped(job: Specification, launch: LaunchSection, name: str | None = None) -> Specification:
    """torchrun between the agents and the ranks. `name` is that of the rendezvous, by default a new one."""
    python, *rest = job.command
    script = rest[1:]  # without -u
    options = [
        f"--nnodes={len(job.hosts)}",
        f"--rdzv-id={name or secrets.token_hex(4)}",
        f"--max-restarts={launch.restarts}",
        f"--signals-to-handle={SIGNALS}",
    ]
    return replace(
        job,
        wrapper=True,
        command=("/bin/sh", "-c", _SHELL, python, *options, *script),
        environment={**ENVIRONMENT, **job.environment},
    )


RUNNER = Runner(wrap=wrapped, restarts=True)
