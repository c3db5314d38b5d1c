#!/usr/bin/env python
"""Export RWKV-5, 6 or 7 to one file with the names of the authors' models (.pth).

deepy checkpoint to-rwkv runs/goose goose.pth --dtype bfloat16
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Python looks in a script's own folder first, where `inspect.py` would stand in for the standard library's.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from megatron.extras import require

    require("transformers")

import argparse
from pathlib import Path

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.hf.export import TYPES
from megatron.checkpoint.hf.rwkv_files import export_published
from megatron.checkpoint.save.store import find_checkpoint
from megatron.config import ConfigError
from megatron.config.admitted import add_flag


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, a folder of checkpoints or a run's directory")
    parser.add_argument("out", type=Path, help="the file to write, which must not exist")
    parser.add_argument("--dtype", choices=sorted(TYPES), help="type of all tensors (default: as trained)")
    add_flag(parser)
    options = parser.parse_args(arguments)
    try:
        checkpoint = open_checkpoint(find_checkpoint(options.checkpoint), verify="checksums")
        dtype = export_published(checkpoint, options.out, dtype=options.dtype)
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"to_rwkv: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out} in {str(dtype).removeprefix('torch.')}")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
