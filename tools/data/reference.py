#!/usr/bin/env python
"""Record the log-probabilities of token files under a model, as the reference of preference objectives.

    deepy data reference --model runs/sft --input data/chosen data/rejected

Writes PREFIX_reference.npy for each token file: one float32 per token, 0 for the first one of a document.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Files here hide modules of the library.
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402

import numpy as np  # noqa: E402

from tools.data.command import opened, run_tool  # noqa: E402


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, metavar="RUN", help="run or checkpoint of the reference model")
    add("--input", nargs="+", required=True, metavar="PREFIX", help="token files, without .bin and .idx")
    add("--overwrite", action="store_true", help="replace outputs that are there")
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron.data.errors import DataError
    from megatron.data.token_file import TokenFile

    outputs = {f"{TokenFile(prefix).prefix}_reference.npy": prefix for prefix in given.input}
    for output in outputs:
        if os.path.exists(output) and not given.overwrite:
            raise DataError(output, "it must not exist yet", "use --overwrite")
    model = opened(given.model)
    if model.config.objective.type == "reward_model":
        raise DataError(
            given.model, "it must have logits, and is a reward model", "give the model that training starts from"
        )
    return {"written": {output: _write(output, model.log_probabilities(path)) for output, path in outputs.items()}}


def _write(output: str, found: np.ndarray) -> int:
    part = f"{output}.{os.getpid()}.npy"  # a file under the final name is complete
    np.save(part, found)
    os.replace(part, output)
    return len(found)


def show(result: dict) -> None:
    for output, count in result["written"].items():
        print(f"{output}: {count:,} log-probabilities")


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
