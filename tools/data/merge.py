#!/usr/bin/env python
"""Join token files, document after document.

deepy data merge --input data/part_0 data/part_1 --output data/all
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
    parser.add_argument("--input", nargs="+", required=True, metavar="PREFIX", help="pairs, in order")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="the new pair")
    parser.add_argument("--overwrite", action="store_true", help="replace the output")
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron import __version__
    from megatron.data.corpus.files import merge
    from megatron.data.token_file import TokenFile

    manifest = merge(given.input, given.output, __version__, given.overwrite)
    made = TokenFile(given.output)
    return {"output": str(made.prefix), "documents": len(made), "tokens": made.tokens, "manifest": manifest is not None}


def show(result: dict) -> None:
    note = "" if result["manifest"] else " (without a manifest: not all inputs have one)"
    print(f"{result['output']}: {result['documents']:,} documents, {result['tokens']:,} tokens{note}")


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
