#!/usr/bin/env python
"""Write one of GPT-NeoX's own checkpoints as one that a run can be initialised from (checkpoint.initialize_from).

python tools/checkpoint/from_neox.py checkpoints/global_step143000 OUT --config configs/70M.yml --verify
python tools/checkpoint/from_neox.py checkpoints/global_step143000 OUT --config configs/70M.yml --hf FOLDER

The layer files of any tensor parallel size, of both versions. The Hugging Face model that is made on the way is kept
with --hf; without, it is written into a temporary folder beside OUT.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Python looks in a script's own folder first, where `inspect.py` would stand in for the standard library's.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import tempfile
from contextlib import nullcontext
from pathlib import Path

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.hf.importer import import_model
from megatron.checkpoint.hf.neox import to_folder
from megatron.checkpoint.hf.verify import prove
from megatron.config import ConfigError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the global_stepN folder")
    parser.add_argument("out", type=Path, help="directory of the checkpoint; must not exist")
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML, GPT-NeoX's or ours")
    parser.add_argument("--hf", type=Path, metavar="FOLDER", help="keep the Hugging Face model here; must not exist")
    parser.add_argument("--verify", action="store_true", help="run it and transformers' model on the same tokens")
    options = parser.parse_args(arguments)
    try:
        proof = convert(options.source, options.out, options.config, options.hf, options.verify)
    except (CheckpointError, ConfigError, OSError, ValueError) as error:
        print(f"from_neox: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}; a run takes it with checkpoint.initialize_from={options.out}")
    if proof:
        print(f"verified: {proof}")
    return 0 if proof is None or proof.holds else 1


def convert(source: Path, out: Path, config: Path, keep: Path | None, verify: bool):
    """Returns the proof, if one is wanted."""
    if out.exists():
        raise CheckpointError(out, "it exists already")
    if keep is not None:
        keep.mkdir(parents=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        to_folder(source, config, Path(folder), lambda text: print(text, file=sys.stderr))
        import_model(Path(folder), out)
        return prove(open_checkpoint(out), Path(folder), None) if verify else None


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
