#!/usr/bin/env python
"""Convert conversations to a token file with labels, for supervised fine-tuning.

    deepy data chat --input 'chats/*.jsonl' --output data/chats --tokenizer models/base
    deepy data chat --input chats.parquet --key conversations --template chatml --train last \\
        --output data/chats --tokenizer tokenizer.json

A record is a list of messages with `role` and `content`, or with ShareGPT's `from` and `value`. The labels are the
assistant's turns with the token that ends them. They stand in a second token file, PREFIX_labels.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Files here hide modules of the library.
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
from dataclasses import asdict  # noqa: E402
from pathlib import Path  # noqa: E402

from tools.data.command import add_shared, add_tokenizer, run_tool, show_bad, tokenizer_section  # noqa: E402


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files, folders and globs: .jsonl .json .parquet .arrow",
    )
    add("--output", required=True, metavar="PREFIX", help="path of the token file without .bin and .idx")
    add("--key", default="messages", help="key or column of the messages (default: %(default)s)")
    add("--template", metavar="NAME", help="chatml, llama3, plain, or a .jinja file (default: the tokenizer's own)")
    add("--value", action="append", default=[], metavar="NAME=TEXT", help="a value for the template, such as a date")
    add(
        "--train",
        choices=["assistant", "last", "all"],
        default="assistant",
        help="labels: every turn of the assistant, its last one, or all tokens (default: %(default)s)",
    )
    eod = "end each conversation with the end-of-document token, which is no label (default: yes)"
    add_shared(parser, "--append-eod", eod)
    add("--longest", type=int, metavar="TOKENS", help="omit longer conversations (default: no limit)")
    add("--reward", metavar="KEY", help="also write PREFIX_rewards.npy: a number, true or false of each record")
    add_shared(parser, "--bad", "skip records without a conversation, or end with an error (default: %(default)s)")
    add_shared(parser, "--workers", "processes (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace an output that is there")
    add_tokenizer(parser)
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron import __version__
    from megatron.data.chat.encode import ChatTreatment, find_template
    from megatron.data.chat.job import ChatJob, run
    from megatron.data.corpus.inputs import find_inputs
    from megatron.data.errors import DataError

    if given.tokenizer is None or given.tokenizer_type != "huggingface":
        raise DataError("--tokenizer", "conversations need a tokenizer.json", "give one, or a folder with one")
    if given.longest is not None and given.longest < 2:
        raise DataError("--longest", f"it must be at least 2 tokens, not {given.longest}", "give the sequence length")
    values = dict(each.partition("=")[::2] for each in given.value)
    job = ChatJob(
        find_inputs(given.input),
        Path(given.output),
        tokenizer_section(given),
        find_template(given.tokenizer, given.template, values),
        ChatTreatment(given.key, given.train, given.append_eod, given.longest, given.reward),
        given.workers,
        given.bad,
        given.overwrite,
        __version__,
    )
    counts = run(job)
    tokens, labels = job.prefixes
    template = {"name": job.template.name, "hash": job.template.hash, "tagged": job.template.tagged}
    return {"output": str(tokens), "labels": str(labels), "template": template, **asdict(counts)}


def show(result: dict) -> None:
    share = result["trained"] / result["tokens"]
    print(
        f"{result['output']}: {result['conversations']:,} conversations, {result['tokens']:,} tokens, "
        f"{result['trained']:,} of them labels ({share:.0%})"
    )
    print(f"train: [{{path: {result['output']}, labels: {result['labels']}}}]")
    if result["long"]:
        print(f"{result['long']:,} conversations longer than --longest were omitted")
    show_bad(result["bad"], result["examples"])


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
