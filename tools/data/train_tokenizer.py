#!/usr/bin/env python
"""Train a tokenizer on texts.

    deepy data train-tokenizer --input corpus.jsonl --output tokenizer.json --size 16384
    deepy data train-tokenizer --input corpus.jsonl --output spm.model --kind sentencepiece-bpe --size 32000

<|endoftext|> ends documents and is id 0.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Files here hide modules of the library.
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
from pathlib import Path  # noqa: E402

from tools.data.command import add_shared, run_tool  # noqa: E402

KINDS = ["bpe", "unigram", "sentencepiece-bpe", "sentencepiece-unigram", "characters"]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files, folders and globs, as for `deepy data tokenize`",
    )
    add_shared(parser, "--format", "kind of the files (default: by their endings)")
    add("--output", required=True, metavar="FILE", help="tokenizer.json, or the .model of sentencepiece")
    add("--kind", choices=KINDS, default="bpe", help="bpe and unigram are byte-level (default: %(default)s)")
    add(
        "--extend",
        metavar="TOKENIZER",
        help="a tokenizer.json (bpe) whose ids are kept. New ones are added up to --size",
    )
    add("--size", type=int, default=32768, help="ids, special tokens included (default: %(default)s)")
    add("--special", nargs="*", default=[], metavar="TOKEN", help="further special tokens, e.g. <|fim_prefix|>")
    add("--key", default="text", help="key or column of the text (default: %(default)s)")
    add("--limit", type=float, metavar="BYTES", help="learn from at most about N bytes")
    add("--overwrite", action="store_true", help="replace the output")
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron.config.file_access import keep_inputs
    from megatron.data.corpus.encode import Treatment
    from megatron.data.corpus.inputs import find_inputs, skipped_files
    from megatron.data.corpus.vocabulary import extend, texts, train
    from megatron.data.errors import DataError

    if given.limit is not None and not 1 <= given.limit < float("inf"):
        raise DataError("--limit", f"{given.limit:g} is no number of bytes", "give at least 1, or omit it")
    output = Path(given.output)
    if output.exists() and not given.overwrite:
        raise DataError(output, "this file exists already", "use another --output, or --overwrite")
    skipped: list[str] = []
    inputs = find_inputs(given.input, given.format, skipped)
    if skipped:
        print(skipped_files(skipped), file=sys.stderr)
    old = [Path(given.extend)] if given.extend else []
    keep_inputs([output], [*old, *(each.path for each in inputs if each.path is not None)])
    corpus = texts(inputs, Treatment(key=given.key), given.limit and int(given.limit))
    if given.extend:
        if given.special or given.kind != "bpe":
            raise DataError("--extend", "it takes bpe, and no --special", "leave --kind and --special out")
        return extend(old[0], corpus, given.size, output)
    return train(given.kind, corpus, given.size, output, tuple(given.special))


def show(result: dict) -> None:
    print(f"{result['path']}: {result['kind']}, {result['size']:,} ids")


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
