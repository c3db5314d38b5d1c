#!/usr/bin/env python
"""Fetch a well-known corpus as jsonl files for `deepy data tokenize`.

    deepy data prepare --list
    deepy data prepare stdlib --output data
    deepy data prepare fineweb-edu --output data --limit 100000

Files that are complete are kept.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Files here hide modules of the library.
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
from pathlib import Path  # noqa: E402

from tools.data.command import run_tool  # noqa: E402


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="?", help="its name")
    parser.add_argument("--list", action="store_true", help="list the corpora")
    parser.add_argument("--output", default="data", metavar="FOLDER", help="folder of the files (default: %(default)s)")
    parser.add_argument(
        "--validation", type=float, default=0.02, help="share of documents for validation (default: %(default)s)"
    )
    parser.add_argument("--limit", type=int, metavar="DOCUMENTS", help="stop after N")
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron.data.corpus.registry import corpora, prepare
    from megatron.data.errors import DataError

    if given.list:
        return {"corpora": corpora()}
    if given.corpus is None:
        raise DataError("corpus", "no name was given", "give one of --list")
    if not 0 <= given.validation < 1:
        raise DataError("--validation", f"{given.validation} is no share", "give a number from 0 to below 1")
    if given.limit is not None and given.limit < 1:
        raise DataError("--limit", f"{given.limit} is no number of documents", "give at least 1, or omit it")
    return prepare(given.corpus, Path(given.output), given.validation, given.limit)


def show(result: dict) -> None:
    for name, about in result.get("corpora", {}).items():
        print(f"{name:20} {about}")
    for part, file in result.get("files", {}).items():
        print(
            f"{part:12} {file['path']}: {file['documents']:,} documents, {file['bytes']:,} bytes"
            + (" (kept)" if result["kept"] else "")
        )


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
