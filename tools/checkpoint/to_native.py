#!/usr/bin/env python
"""Export a checkpoint to DeepSpeed's native format, as its engine saves it.

The number of ranks is that of the files.

./deepy.py --ranks 4 tools/checkpoint/to_native.py run.yml checkpoint.resume=CHECKPOINT    into <run.dir>/deepspeed

The layout is data parallel with any ZeRO stage from 1: native files hold what a rank has, without saying how tensor
parallel ranks or stages cut the model. For those there is the universal format (to_deepspeed.py).
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Python looks in a script's own folder first, where `inspect.py` would stand in for the standard library's.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.worker.job import guarded, leave_process


def main() -> int:
    from megatron.training.start.native import write_native
    from megatron.training.world import joined
    from megatron.worker.job import read_job

    config, place = read_job()
    with joined(config, place) as world:
        write_native(config, world, print if world.is_main else lambda _: None)
    return 0


if __name__ == "__main__":
    leave_process(guarded(main))
