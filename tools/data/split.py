#!/usr/bin/env python
"""Cut a token file's documents into several files.

    deepy data split data/all --output data/all --shares train=0.98 validation=0.01 test=0.01 --seed 1

Writes data/all_train, data/all_validation and data/all_test. Without --seed the file is cut in its own order.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Files here hide modules of the library.
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402

from tools.data.command import run_tool  # noqa: E402


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="PREFIX", help="the pair to cut")
    parser.add_argument(
        "--shares",
        nargs="+",
        required=True,
        metavar="NAME=SHARE",
        help="names of the parts, with their shares of the documents",
    )
    parser.add_argument("--output", required=True, metavar="PREFIX", help="each part is PREFIX_NAME")
    parser.add_argument("--seed", type=int, help="draw the documents of the parts at random")
    parser.add_argument("--overwrite", action="store_true", help="replace the outputs")
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron import __version__
    from megatron.data.corpus.files import split

    return {
        "documents": split(given.file, shares(given.shares), given.output, __version__, given.overwrite, given.seed)
    }


def shares(texts: list[str]) -> dict[str, float]:
    """The shares of 'name=share' texts."""
    from megatron.data.errors import DataError

    found = {}
    for text in texts:
        name, _, share = text.partition("=")
        try:
            found[name] = float(share)
        except ValueError as error:
            raise DataError("--shares", f"{text!r} is not NAME=SHARE", "write it as in train=0.98") from error
        if not name or not 0 <= found[name] < float("inf"):
            raise DataError("--shares", f"{text!r} has no name, or a share below 0", "write it as in train=0.98")
    if len(found) < len(texts):
        raise DataError("--shares", "a name is given twice", "use different names")
    return found


def show(result: dict) -> None:
    for name, documents in result["documents"].items():
        print(f"{name:16} {documents:,} documents")


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
