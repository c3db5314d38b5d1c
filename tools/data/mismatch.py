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
    import numpy as np

    from megatron.config.file_access import keep_inputs
    from megatron.data.errors import DataError
    from megatron.data.manifest import keep_others
    from megatron.data.preferences.answers import Answers
    from megatron.data.preferences.pairs import mismatches
    from megatron.data.sample import IGNORED
    from megatron.data.token_file import TokenFileWriter, prefix_of, with_ending

    read, marks, longest = Answers(given.answers, given.labels), f"{prefix_of(given.output)}_labels", given.longest
    assert read.labels is not None
    for prefix in (given.output, marks):
        keep_others(prefix_of(prefix))
        keep_inputs([with_ending(prefix_of(prefix), ".bin")], [read.tokens.bin_path, read.labels.bin_path])
        if (index := with_ending(prefix_of(prefix), ".idx")).exists() and not given.overwrite:
            raise DataError(index, "it must not exist yet", "use another --output, or --overwrite")
    with TokenFileWriter(given.output, read.tokens.dtype) as ids, TokenFileWriter(marks, np.int32) as targets:
        for prompt, answer, partner in mismatches(read):
            room = None if longest is None else max(0, longest - len(prompt))
            if room == 0:
                rule = f"a prompt has {len(prompt)} tokens"
                raise DataError(given.answers, rule, "use a larger --longest, or remove it")
            ids.append(np.concatenate([prompt, answer[:room]]))
            own = read.labels[partner][-len(answer) :][:room]
            targets.append(np.concatenate([np.full(len(prompt), IGNORED), own]))
    return {"output": given.output, "documents": len(read)}


def show(result: dict) -> None:
    print(f"{result['output']}: {result['documents']:,} documents. Labels: {result['output']}_labels")


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
