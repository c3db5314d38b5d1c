#!/usr/bin/env python
"""Export a checkpoint to DeepSpeed's native format, as its engine saves it.

    deepy checkpoint to-native run.yml checkpoint.resume=CHECKPOINT                             for one rank
    ./deepy.py --ranks 4 tools/checkpoint/to_native.py run.yml checkpoint.resume=CHECKPOINT     for four

The files are in the folder `deepspeed` of the run, and only the same number of ranks can read them. The layout must be
data parallel, with a ZeRO stage from 1. Native files have the tensors of a rank, and no record of how tensor parallel
ranks or stages cut the model. `deepy checkpoint to-deepspeed` writes universal files, for every layout.
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
