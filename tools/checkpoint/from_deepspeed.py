#!/usr/bin/env python
"""Import a DeepSpeed checkpoint with its optimizer states, for any layout.

deepy checkpoint from-deepspeed CHECKPOINT/TAG_universal OUT --config run.yml
deepy checkpoint from-deepspeed CHECKPOINT/TAG_universal OUT --config run.yml --names names.yml --step 1000
deepy checkpoint from-deepspeed CHECKPOINT/TAG OUT --config run.yml --names names.yml --trust

DeepSpeed's own converter first makes a native checkpoint universal, in a temporary folder next to OUT. It unpickles
files, which can run code in them, and therefore needs --trust.
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

from megatron.checkpoint import CheckpointError
from megatron.checkpoint.hf.importer import logical_tensors
from megatron.checkpoint.hf.neox import ONE_RANK
from megatron.checkpoint.universal import Universal, made_universal, read_names, restore
from megatron.config import ConfigError, load, to_yaml
from megatron.config.source.files import read_file


def one_rank(files: list[str]) -> list[str]:
    """Overrides that make a run's configuration one of one rank, with the batch that it had. Whatever layout it has,
    only its tensors matter here."""
    sections = [values.get("training") for file in files if isinstance(values := read_file(file).values, dict)]
    both = any({"accumulation", "global_batch_size"} <= set(each) for each in sections if isinstance(each, dict))
    return [*ONE_RANK, "training.accumulation=null"] if both else ONE_RANK


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the folder that has zero/, or a native one")
    parser.add_argument("out", type=Path, help="directory of the checkpoint, which must not exist")
    parser.add_argument("--config", nargs="+", required=True, metavar="FILE", help="the run's configuration")
    parser.add_argument("--names", type=Path, metavar="FILE", help="YAML: our name of each tensor, and theirs")
    parser.add_argument("--trust", action="store_true", help="unpickle the files of a native checkpoint")
    parser.add_argument("--step", type=int, help="completed updates of the run (default: the optimizer's)")
    options = parser.parse_args(arguments)
    try:
        resolved = load(options.config, one_rank(options.config), ranks=1, check_inputs=False)
        names = read_names(options.names) if options.names else None
        with made_universal(options.source, options.out, options.trust) as folder:
            meta = restore(
                Universal(folder),
                options.out,
                logical_tensors(resolved),
                to_yaml(resolved),
                names=names,
                step=options.step,
            )
    except (CheckpointError, ConfigError, OSError, ValueError) as error:
        print(f"from_deepspeed: {error}", file=sys.stderr)
        return 2
    key = "resume" if meta.resumable else "initialize_from"
    print(f"wrote {options.out} (step {meta.step}). A run takes it with checkpoint.{key}={options.out}")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
