#!/usr/bin/env python
"""Convert texts to a token file for training.

    deepy data tokenize --input 'corpus/*.jsonl.zst' --output data/corpus --tokenizer tokenizer.json
    deepy data tokenize --dataset Salesforce/wikitext --config wikitext-103-raw-v1 --output data/wikitext \\
        --tokenizer openai-community/gpt2

The output is the same for any number of workers. A killed job continues at the same place when it is started again.
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
    add_inputs(parser)
    add_work(parser)
    add_tokenizer(parser)
    return parser


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Options of the inputs."""
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        default=[],
        metavar="FILE",
        help="files, folders and globs: .jsonl .json .parquet .arrow .txt .dat, "
        "also .gz .zst .xz .bz2, and .tar of these",
    )
    add_shared(parser, "--format", "kind of the files (default: by their endings)")
    add("--dataset", metavar="NAME", help="a name on the hub, or a builder of datasets.load_dataset, such as json")
    add("--config", metavar="NAME", help="configuration of the data set")
    add("--split", default="train", help="split of the data set (default: %(default)s)")
    add("--streaming", action="store_true", help="read the data set without downloading it first")


def add_work(parser: argparse.ArgumentParser) -> None:
    """Options of the work."""
    add = parser.add_argument
    add("--output", required=True, metavar="PREFIX", help="the pair's path without .bin and .idx")
    add("--key", default="text", help="key or column of the text (default: %(default)s)")
    add_shared(parser, "--append-eod", "end each document with the end-of-document token (default: yes)")
    add("--normalise", choices=["NFC", "NFKC", "NFD", "NFKD"], help="bring texts into a Unicode normal form first")
    add("--strip", action="store_true", help="remove white space at both ends of texts")
    add_shared(parser, "--bad", "skip lines without a text, or end with an error (default: %(default)s)")
    add_shared(parser, "--workers", "processes (default: %(default)s)")
    add(
        "--encoder",
        choices=["auto", "gigatoken", "tokenizer"],
        default="auto",
        help="program that computes the ids (default: %(default)s)",
    )
    add(
        "--save-every",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="time between two safe states (default: %(default)s)",
    )
    add("--overwrite", action="store_true", help="overwrite a finished or an unfinished output")
    add("--no-input-hashes", action="store_true", help="do not read the inputs once more for their SHA-256")
    add("--quiet", action="store_true", help="no progress line")


def main(given: argparse.Namespace) -> dict:
    from megatron import __version__
    from megatron.data.corpus.encode import Treatment
    from megatron.data.corpus.inputs import Input, find_inputs, skipped_files
    from megatron.data.corpus.job import TokenizeJob
    from megatron.data.corpus.job import run as tokenize
    from megatron.data.corpus.progress import Display
    from megatron.data.errors import DataError

    skipped: list[str] = []
    inputs = find_inputs(given.input, given.format, skipped)
    if skipped:
        print(skipped_files(skipped), file=sys.stderr)
    if given.dataset:
        loading = {"name": given.config, "split": given.split, "streaming": given.streaming}
        inputs.append(Input(given.dataset, "dataset", {name: value for name, value in loading.items() if value}))
    if not inputs:
        raise DataError("--input", "there is nothing to read", "give --input or --dataset")
    treatment = Treatment(given.key, given.append_eod, given.normalise, given.strip)
    job = TokenizeJob(
        inputs,
        Path(given.output),
        tokenizer_section(given),
        treatment,
        given.workers,
        given.encoder,
        given.bad,
        given.save_every,
        given.overwrite,
        not given.no_input_hashes,
        __version__,
    )
    size = sum(entry.path.stat().st_size for entry in inputs if entry.path)
    outcome = tokenize(job, Display(size, given.quiet))
    progress = outcome.progress
    return {
        "output": str(job.prefix),
        "resumed": outcome.resumed,
        "kept": outcome.kept,
        "seconds": outcome.seconds,
        "encoder": outcome.choice.name,
        "encoder_reason": outcome.choice.reason,
        "text_bytes": progress.text_bytes,
        "empty": progress.empty,
        "bad": progress.bad,
        "bad_examples": progress.examples,
        "skipped": skipped,
        "manifest": asdict(outcome.manifest),
    }


def show(result: dict) -> None:
    manifest = result["manifest"]
    print(
        f"{result['output']}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens "
        f"of {result['text_bytes']:,} bytes in {result['seconds']:.1f} s"
    )
    print(f"encoder: {result['encoder_reason']}")
    if result["empty"]:
        print(f"{result['empty']:,} texts without tokens were skipped")
    show_bad(result["bad"], result["bad_examples"])


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
