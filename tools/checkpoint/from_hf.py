#!/usr/bin/env python
"""Import a Hugging Face model as a checkpoint (checkpoint.initialize_from).

deepy checkpoint from-hf path/to/model OUT --verify
deepy checkpoint from-hf EleutherAI/pythia-70m OUT --yaml pythia.yml     # for `extends: pythia.yml`
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
from typing import Any

import yaml

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.hf.companions import not_kept
from megatron.checkpoint.hf.export import prove
from megatron.checkpoint.hf.importer import import_model, locate
from megatron.checkpoint.save.progress import now_and_then
from megatron.config import ConfigError, Resolved
from megatron.config.registry import RegistryError
from megatron.config.tree import get, put, thaw


def base_of(resolved: Resolved, checkpoint: Path) -> dict[str, Any]:
    """The base of a run that starts from an import: its model, its tokenizer and the checkpoint."""
    found: dict[str, Any] = {}
    values = thaw(resolved.config.model_dump())
    for key, origin in resolved.origins.items():
        if origin.given and key.startswith(("model.", "tokenizer.")):
            path = tuple(key.split("."))
            put(found, path, get(values, path))
    put(found, ("checkpoint", "initialize_from"), str(checkpoint))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="a local folder, or a name on the hub")
    add("out", type=Path, help="directory of the checkpoint, which must not exist")
    add("--sequence-length", type=int, help="tokens of a sample (default: the model's own longest)")
    add(
        "--extension",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module that has the model's architecture, as in model.extensions. May be repeated",
    )
    add(
        "--multi-token",
        action="store_true",
        help="keep layers that predict further tokens (model.multi_token_prediction), which are otherwise skipped",
    )
    add(
        "--verify", action="store_true", help="run both models on the same tokens in fp32, and both tokenizers on texts"
    )
    add("--yaml", type=Path, metavar="FILE", help="also write the file that a run from it can extend")
    add("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    try:
        if options.yaml is not None and options.yaml.exists():
            raise CheckpointError(options.yaml, "--yaml must name a file that does not exist")
        extensions = tuple(options.extension)
        folder = locate(options.model, extensions)
        tell = now_and_then(quiet=options.json)
        resolved = import_model(
            folder,
            options.out,
            sequence_length=options.sequence_length,
            extensions=extensions,
            further=options.multi_token,
            progress=tell,
        )
        proof = prove(open_checkpoint(options.out), folder, None) if options.verify else None
    except (CheckpointError, ConfigError, RegistryError, OSError, ValueError) as error:
        print(f"from_hf: {error}", file=sys.stderr)
        return 2
    left = not_kept(folder)
    model = thaw(resolved.config.model.model_dump(exclude_defaults=True))
    if options.yaml is not None:
        options.yaml.write_text(yaml.safe_dump(base_of(resolved, options.out), sort_keys=False), encoding="utf-8")
    if options.json:
        print(
            json.dumps({"out": str(options.out), "model": model, "not_kept": left, **(proof.values if proof else {})})
        )
    else:
        print(f"wrote {options.out}. A run starts from it with checkpoint.initialize_from={options.out}")
        if left:
            print(f"note: an export will not have these files: {', '.join(left)}")
        if proof:
            print(proof)
    return 0 if proof is None or proof.holds else 1


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
