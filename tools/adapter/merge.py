#!/usr/bin/env python
"""Write the sum of a checkpoint's adapters and their base as a checkpoint.

deepy adapter merge runs/sft/checkpoints/step_00000060 merged/step_00000060 --verify
deepy checkpoint to-hf merged/step_00000060 models/tuned --verify
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
from pathlib import Path

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.save.progress import now_and_then
from megatron.checkpoint.save.store import find_checkpoint
from megatron.config import ConfigError
from megatron.config.features.feature import load_of
from megatron.config.registry import RegistryError
from megatron.parallel.layout.precision import COMPUTE_TYPES


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint with adapters, or the directory of a run with some")
    parser.add_argument("out", type=Path, help="the checkpoint to write. It must not exist")
    parser.add_argument("--base", help="the weights under the adapters (default: where the run has found them)")
    parser.add_argument("--dtype", choices=sorted(COMPUTE_TYPES), help="type of the weights (default: the base's)")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="run the model with adapters and the merged one on the same tokens in fp32",
    )
    options = parser.parse_args(arguments)
    try:
        adapters = open_checkpoint(find_checkpoint(options.checkpoint), verify="checksums")
        base, config = load_of("adapters", "merging:base_of")(adapters, options.base)
        dtype = COMPUTE_TYPES[options.dtype] if options.dtype else None
        load_of("adapters", "merging:merge")(adapters, base, config, options.out, dtype, now_and_then())
        proof = load_of("adapters", "merging:prove")(adapters, base, config, options.out) if options.verify else None
    except (CheckpointError, ConfigError, RegistryError, OSError) as error:
        print(f"merge: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}")
    if proof is not None:
        print(proof)
    return 0 if proof is None or proof.holds else 1


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
