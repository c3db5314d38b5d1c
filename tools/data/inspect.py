#!/usr/bin/env python
"""Show a token file: counts, lengths of documents, samples, its tokenizer, problems.

deepy data inspect data/corpus --samples 3 --picture lengths.png
deepy data inspect data/corpus --verify

Exit status 1: the file has problems.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Files here hide modules of the library.
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402

from megatron.config.problems import counted  # noqa: E402
from tools.data.command import add_tokenizer, run_tool, tokenizer_section  # noqa: E402


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", metavar="FILE", help="the pair's path, with or without its ending")
    add("--samples", type=int, default=0, metavar="N", help="show the beginnings of N documents")
    add("--picture", metavar="FILE", help="draw the lengths")
    add("--verify", action="store_true", help="compare both files with the manifest's hashes and read every token")
    add("--add-checksums", action="store_true", help="add checksums of blocks to a manifest of an older version")
    add_tokenizer(parser)
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron.config.file_access import keep_inputs
    from megatron.data.corpus.files import add_checksums, examine_file, pair_files
    from megatron.data.tokenizer import build_tokenizer

    if given.add_checksums:
        add_checksums(given.file)
    if given.picture:
        keep_inputs([given.picture], pair_files(given.file), "--picture")
    section = tokenizer_section(given)
    known = section.path is not None or section.type in ("bytes", "characters")
    found = examine_file(given.file, build_tokenizer(section) if known else None, given.samples, given.verify)
    if given.picture:
        draw_lengths(found, given.picture)
    return found


def draw_lengths(found: dict, path: str) -> None:
    """Draw the histogram of `examine_file`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.bar(
        [f"{each['to']:,}" for each in found["histogram"]],
        [each["documents"] for each in found["histogram"]],
        color="#4c72b0",
    )
    axes.set_xlabel("tokens per document, up to")
    axes.set_ylabel("documents")
    axes.set_title(f"{found['file']}: {found['documents']:,} documents, {found['tokens']:,} tokens")
    axes.tick_params(axis="x", rotation=60)
    figure.savefig(path, dpi=120)


def show(result: dict) -> None:
    print(
        f"{result['file']}: {result['documents']:,} documents, {result['tokens']:,} tokens "
        f"({result['dtype']}, {result['bytes']:,} bytes)"
    )
    lengths = result["lengths"]
    print(
        "lengths: "
        + ", ".join(
            f"{name} {lengths[name]:,.0f}" for name in ("smallest", "p10", "median", "mean", "p90", "p99", "largest")
        )
    )
    most = max((each["documents"] for each in result["histogram"]), default=0)
    for each in result["histogram"]:
        bar = "#" * round(50 * each["documents"] / most)
        print(f"  {each['from']:>10,} - {each['to']:>10,}  {each['documents']:>12,}  {bar}")
    if result["tokenizer"]:
        print(
            f"tokenizer: {result['tokenizer']['name']} ({result['tokenizer']['size']:,} ids, "
            f"hash {result['tokenizer']['hash'][:16]})"
        )
    for sample in result["samples"]:
        print(
            f"document {sample['document']} ({sample['tokens']:,} tokens): "
            f"{sample['text'] if sample['text'] is not None else sample['ids']}"
        )
    for note in result["notes"]:
        print(f"note: {note}")
    for problem in result["problems"]:
        print(f"problem: {problem}")
    count = len(result["problems"])
    print("no problems found" if not count else counted(count, "problem"))


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
