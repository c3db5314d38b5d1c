#!/usr/bin/env python
"""Export a checkpoint to DeepSpeed's universal format, with optimizer states.

The format is a folder per parameter with its fp32 value and moments, and the state of the optimizer and of the engine.

deepy checkpoint to-deepspeed CHECKPOINT OUT
deepy checkpoint to-deepspeed CHECKPOINT OUT --names names.yml    # our name: their name, for each tensor
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Python looks in a script's own folder first, where `inspect.py` would stand in for the standard library's.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
from pathlib import Path

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.universal import LATEST, export, mark_latest, read_names


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="of any layout")
    parser.add_argument("out", type=Path, help="the folder, which must not exist")
    parser.add_argument("--names", type=Path, metavar="FILE", help="YAML: our name of each tensor, and theirs")
    options = parser.parse_args(arguments)
    try:
        names = read_names(options.names) if options.names else None
        count = export(open_checkpoint(options.checkpoint, verify="checksums"), options.out, names)
    except (CheckpointError, OSError, ValueError) as error:
        print(f"to_deepspeed: {error}", file=sys.stderr)
        return 2
    print(f"wrote {count} parameters to {options.out}/zero")
    if mark_latest(options.out):
        print(f"{options.out.parent / LATEST} names it")
    else:
        print(f"{options.out.parent / LATEST} names another one. Load this with tag={options.out.name!r}")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
