#!/usr/bin/env python
"""Import a published RWKV-5, 6 or 7 model (.pth) for checkpoint.initialize_from.

deepy checkpoint from-rwkv RWKV-x070-World-0.1B.pth OUT --sequence-length 4096
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

from megatron.checkpoint import CheckpointError
from megatron.checkpoint.hf.rwkv_files import import_published
from megatron.config import ConfigError
from megatron.config.tree import thaw


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the published file. Nothing in it is run")
    parser.add_argument("out", type=Path, help="directory of the checkpoint, which must not exist")
    parser.add_argument("--sequence-length", type=int, default=4096, help="tokens of a sample (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    try:
        resolved = import_published(options.file, options.out, sequence_length=options.sequence_length)
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"from_rwkv: {error}", file=sys.stderr)
        return 2
    model = thaw(resolved.config.model.model_dump(exclude_defaults=True))
    if options.json:
        print(json.dumps({"out": str(options.out), "model": model}))
    else:
        print(
            f"wrote {options.out}: {model['layers']}, width {model['hidden_size']}. A run takes it with "
            f"checkpoint.initialize_from={options.out}"
        )
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
