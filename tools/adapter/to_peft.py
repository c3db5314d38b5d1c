#!/usr/bin/env python
"""Write the adapters of a checkpoint as a folder that Hugging Face's peft opens.

deepy adapter to-peft runs/sft/checkpoints/step_00000060 models/adapter --base-model meta-llama/Llama-3.2-1B
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from megatron.extras import require

    require("transformers")

import argparse
from pathlib import Path

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.save.store import find_checkpoint
from megatron.config import ConfigError
from megatron.config.features.feature import load_of
from megatron.config.registry import RegistryError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint with adapters, or the directory of a run with some")
    parser.add_argument("out", type=Path, help="the folder to write. It must not exist")
    parser.add_argument("--base", help="the weights under the adapters (default: where the run has found them)")
    parser.add_argument(
        "--base-model", metavar="NAME", help="name of the Hugging Face base model, written into the folder"
    )
    options = parser.parse_args(arguments)
    try:
        adapters = open_checkpoint(find_checkpoint(options.checkpoint), verify="checksums")
        base, config = load_of("adapters", "merging:base_of")(adapters, options.base)
        write = load_of("adapters", "peft:to_peft")
        modules = write(adapters, base, config, options.out, options.base_model)
    except (CheckpointError, ConfigError, RegistryError, OSError) as error:
        print(f"to_peft: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}: adapters of {len(modules)} modules")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
