#!/usr/bin/env python
"""Write the model of a checkpoint, of any layout, as a Hugging Face folder.

deepy checkpoint to-hf runs/x/checkpoints/step_00001000 OUT --verify
deepy checkpoint to-hf runs/x OUT --dtype bfloat16          the newest checkpoint of a run
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
import json
from pathlib import Path

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.hf.config import names
from megatron.checkpoint.hf.export import GIBIBYTE, TYPES, export, prove
from megatron.checkpoint.save.progress import now_and_then
from megatron.checkpoint.save.store import find_checkpoint
from megatron.config import ConfigError
from megatron.config.admitted import add_flag
from megatron.config.registry import RegistryError


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint, a folder of checkpoints or a run's directory")
    add("out", type=Path, help="the folder to write, which must not exist")
    add(
        "--architecture",
        metavar="NAME",
        help=f"{', '.join(sorted(names()))}, or one of an extension that the run lists (default: the first that can "
        "express the model)",
    )
    add("--dtype", choices=sorted(TYPES), help="type of the weights. float32 takes the masters (default: as trained)")
    add("--average", action="store_true", help="the average of the weights (training.weight_average) in their place")
    add("--shard-size", type=float, default=5.0, metavar="GIB", help="largest file, in GiB (default 5)")
    add(
        "--verify", action="store_true", help="run both models on the same tokens in fp32, and both tokenizers on texts"
    )
    add("--json", action="store_true", help="print one JSON document")
    add_flag(parser)
    options = parser.parse_args(arguments)
    if not 0 < options.shard_size < float("inf"):
        parser.error(f"--shard-size must be a number of GiB above 0, not {options.shard_size:g}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        checkpoint = open_checkpoint(find_checkpoint(options.checkpoint), verify="checksums")
        if options.average:
            checkpoint = checkpoint.averaged()
        tell = now_and_then(quiet=options.json)
        done = export(
            checkpoint,
            options.out,
            name=options.architecture,
            dtype=options.dtype,
            limit=max(1, int(options.shard_size * GIBIBYTE)),
            progress=tell,
        )
        dtype = TYPES[options.dtype] if options.dtype else None
        proof = prove(checkpoint, options.out, dtype) if options.verify else None
    except (CheckpointError, ConfigError, RegistryError, OSError) as error:
        print(f"to_hf: {error}", file=sys.stderr)
        return 2
    kind = str(done.dtype).removeprefix("torch.")
    if options.json:
        print(
            json.dumps({
                "out": str(done.folder),
                "architecture": done.class_name,
                "dtype": kind,
                "files": done.files,
                "notes": done.notes,
                **(proof.values if proof else {}),
            })
        )
    else:
        print(f"wrote {done.folder}: {done.class_name}, {kind}, {len(done.files)} files of weights")
        print("\n".join([*(f"note: {note}" for note in done.notes), *([str(proof)] if proof else [])]))
    return 0 if proof is None or proof.holds else 1


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
