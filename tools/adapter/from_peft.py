#!/usr/bin/env python
"""Write the adapters of a folder of Hugging Face's peft as a checkpoint.

deepy checkpoint from-hf models/base imported/step_00000000 --yaml imported.yml
deepy adapter from-peft models/adapter adapters/step_00000000 --base imported/step_00000000 --yaml adapter.yml
deepy train imported.yml adapter.yml sft.yml
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

import yaml

from megatron.checkpoint import SOLO, CheckpointError, open_checkpoint
from megatron.checkpoint.read.reader import config_of
from megatron.checkpoint.save.store import find_checkpoint
from megatron.config import ConfigError
from megatron.config.features.feature import load_of
from megatron.config.registry import RegistryError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder that peft has saved")
    parser.add_argument("out", type=Path, help="the checkpoint to write. It must not exist")
    parser.add_argument("--base", type=Path, required=True, help="checkpoint of the model that they belong to")
    parser.add_argument("--yaml", type=Path, metavar="FILE", help="also write the section `adapter` of a run with them")
    options = parser.parse_args(arguments)
    try:
        if options.yaml is not None and options.yaml.exists():
            raise CheckpointError(options.yaml, "--yaml must name a file that does not exist")
        base = open_checkpoint(find_checkpoint(options.base), verify="checksums")
        known = load_of("adapters", "part:hash_of")(base, SOLO)
        read = load_of("adapters", "peft:from_peft")
        section = read(options.folder, base, config_of(base), known, options.out)
    except (CheckpointError, ConfigError, RegistryError, OSError) as error:
        print(f"from_peft: {error}", file=sys.stderr)
        return 2
    if options.yaml is not None:
        options.yaml.write_text(yaml.safe_dump({"adapter": section}, sort_keys=False), encoding="utf-8")
    print(f"wrote {options.out}: {section['type']} of rank {section['rank']} on {len(section['targets'])} layers")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
