"""Ranks that really exchange messages: all-reduce in a loop, stop together when any of them gets a signal, "save", end.

argv: `steps N` ends by itself. `loop` runs until a signal. Every rank leaves notes named after it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.worker.job import check_agreement, guarded, read_job

NOTES = Path(os.environ["NOTES"])


def main() -> int:
    config, place = read_job(check_inputs=False)
    os.environ.update(place.variables)
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda n, _: received.append(n))
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("GLOO_TIMEOUT", "60"))))

    def gather(mine: str) -> list[str]:
        everybody = [""] * place.world_size
        dist.all_gather_object(everybody, mine)
        return everybody

    check_agreement(place, gather)
    steps = int(place.own[1]) if place.own[0] == "steps" else 10**9
    stop = torch.zeros(1)
    for step in range(steps):
        total = torch.tensor([float(place.rank + 1)])
        dist.all_reduce(total)
        stop[0] = received[0] if received else 0
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if step == 0:
            note = {
                "sum": total.item(),
                "host": os.uname().nodename,
                "pid": os.getpid(),
                "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
                "starter": place.starter,
                "attempt": place.attempt,
                "local": [place.local_rank, place.local_world_size],
            }
            (NOTES / f"up.{place.rank}.part").write_text(json.dumps(note))
            (NOTES / f"up.{place.rank}.part").rename(NOTES / f"up.{place.rank}")
        if stop.item():
            time.sleep(1.0)
            (NOTES / f"saved.{place.rank}").write_text(str(int(stop.item())))
            return 128 + int(stop.item())
        time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
