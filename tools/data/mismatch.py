#!/usr/bin/env python
"""Pair prompts with answers to other prompts, for KTO's estimate of the divergence from the reference.

    deepy data mismatch --answers data/answers --labels data/answers_labels --output data/mismatched

Document n has the prompt of answer n and the answer of the next document with another prompt. The first label of a
document ends its prompt. Labels are written to PREFIX_labels.
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
    add = parser.add_argument
    add("--answers", required=True, metavar="PREFIX", help="token file, without .bin and .idx")
    add("--labels", required=True, metavar="PREFIX", help="its label file, whose first label ends the prompt")
    add("--output", required=True, metavar="PREFIX", help="the new pair")
    add("--longest", type=int, metavar="TOKENS", help="cut answers so that a document has no more (default: no limit)")
    add("--overwrite", action="store_true", help="replace the output")
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron.data.preferences.pairs import write_mismatched

    count = write_mismatched(given.answers, given.labels, given.output, given.longest, given.overwrite)
    return {"output": given.output, "documents": count}


def show(result: dict) -> None:
    print(f"{result['output']}: {result['documents']:,} documents. Labels: {result['output']}_labels")


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
