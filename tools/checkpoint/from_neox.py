#!/usr/bin/env python
"""Import a checkpoint of GPT-NeoX, to continue its run or to start from its weights.

deepy checkpoint from-neox checkpoints/global_step1000 OUT --config configs/70M.yml
deepy checkpoint from-neox checkpoints/global_step143000 OUT --config configs/70M.yml --weights --verify
deepy checkpoint from-neox checkpoints/global_step143000 OUT --config configs/70M.yml --hf FOLDER

With optimizer states (ZeRO 0, 1 or 2) OUT has them, the step and the position in the data: checkpoint.resume=OUT. If
the folder has none, or with --weights, OUT has only the weights: checkpoint.initialize_from=OUT. Any tensor and
pipeline parallel size works. --hf keeps the Hugging Face model of the weights. No code in the files is run.
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
import tempfile
from contextlib import nullcontext
from pathlib import Path

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.hf.export import Proof, prove
from megatron.checkpoint.hf.importer import import_model
from megatron.checkpoint.hf.neox import open_run, to_checkpoint, to_folder
from megatron.checkpoint.hf.neox_files import has_optimizer
from megatron.config import ConfigError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the global_stepN folder")
    parser.add_argument("out", type=Path, help="directory of the checkpoint, which must not exist")
    parser.add_argument("--config", nargs="+", required=True, metavar="FILE", help="the run's YAML, GPT-NeoX's or ours")
    parser.add_argument("--weights", action="store_true", help="take only the weights, to start a new run from them")
    parser.add_argument("--hf", type=Path, metavar="FOLDER", help="keep the Hugging Face model in this new folder")
    parser.add_argument("--verify", action="store_true", help="run it and transformers' model on the same tokens")
    options = parser.parse_args(arguments)
    try:
        step, proof = convert(options)
    except (CheckpointError, ConfigError, OSError, ValueError) as error:
        print(f"from_neox: {error}", file=sys.stderr)
        return 2
    if step is None:
        print(f"wrote {options.out} (only weights). A run starts from it with checkpoint.initialize_from={options.out}")
    else:
        print(f"wrote {options.out} (step {step}). A run continues from it with checkpoint.resume={options.out}")
    if proof:
        print(proof)
    return 0 if proof is None or proof.holds else 1


def convert(options: argparse.Namespace) -> tuple[int | None, Proof | None]:
    """Return the step (None with only weights) and the proof, if requested."""
    if options.out.exists():
        raise CheckpointError(options.out, "it exists already")
    if options.hf is not None:
        options.hf.mkdir(parents=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    step, run = None, None
    if not options.weights and has_optimizer(options.source):
        run, meta = to_checkpoint(options.source, options.config, options.out, log)
        step = meta.step
        if not (options.hf or options.verify):
            return step, None
    run = run or open_run(options.source, options.config, log)
    beside = tempfile.TemporaryDirectory(dir=options.out.parent, prefix=f".{options.out.name}.")
    with nullcontext(options.hf) if options.hf else beside as folder:
        to_folder(run, Path(folder))
        if step is None:
            import_model(Path(folder), options.out)
        # Masters have more digits than the weights that were made of them.
        dtype = None if step is None else run.dtype
        return step, prove(open_checkpoint(options.out), Path(folder), dtype) if options.verify else None


def log(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
