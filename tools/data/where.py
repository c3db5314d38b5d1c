#!/usr/bin/env python
"""List the steps at which a run reads a document or a text.

python tools/data/where.py runs/pythia --document pile:123
python tools/data/where.py runs/pythia --text "to be or not to be"
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Files here hide modules of the library.
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

from tools.data.command import add_shared, run_left_out, run_tool  # noqa: E402

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.data.provenance import Provenance


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="the run's directory, or its config.yml")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--document", metavar="SOURCE:NUMBER", help="a document of a source (its name or path)")
    what.add_argument("--text", help="a text. All sources are searched")
    add_shared(parser, "--split", "default: %(default)s")
    parser.add_argument("--name", help="which validation or test set")
    add_shared(parser, "--workers", "processes that search for a text (default: %(default)s)")
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron.data.provenance import Provenance, run_config

    config = run_config(given.run)
    provenance = Provenance(config, given.split, given.name, run_left_out(given.run))
    places = _document(given.document) if given.document else None
    found = []
    if places:
        source = provenance.source(places[0])
        found.append(_entry(provenance, source, places[1], 0, None))
    else:
        found += _texts(provenance, config, given.text, given.workers)
    return {"run": given.run, "places": found, "times": sum(len(each["seen"]) for each in found)}


def _document(text: str) -> tuple[str, int]:
    from megatron.data.errors import DataError

    source, _, number = text.rpartition(":")
    if not source or not number.isdigit():
        raise DataError("--document", f"{text!r} is not SOURCE:NUMBER", "write it as in pile:123")
    return source, int(number)


def _texts(provenance: Provenance, config: Config, text: str, workers: int) -> list[dict]:
    from megatron.data.corpus.progress import Meter
    from megatron.data.errors import DataError
    from megatron.data.text_search import find_text
    from megatron.data.tokenizer import build_tokenizer

    if not text:
        raise DataError("--text", "it is empty", "give some text")
    tokenizer = build_tokenizer(config.tokenizer)
    found = []
    for source in provenance.plan.sources:
        show = Meter(f"searching {source.name}", "tokens").show
        places = list(find_text(source.file, tokenizer, text, workers, show))
        show = Meter(f"looking up where {source.name} was read", "places").show
        for number, (document, start, length) in enumerate(places):
            found.append(_entry(provenance, source.index, document, start, length))
            show(number + 1, len(places))
    return found


def _entry(provenance: Provenance, source: int, document: int, start: int, length: int | None) -> dict:
    seen = provenance.seen(source, document, start, length)
    return {
        "source": provenance.plan.sources[source].name,
        "document": document,
        "start": start,
        "length": length,
        "seen": [{"step": step, "index": index} for step, index in seen],
    }


def show(result: dict) -> None:
    for each in result["places"]:
        tokens = "" if each["length"] is None else f" tokens {each['start']}-{each['start'] + each['length'] - 1}"
        steps = ", ".join(f"{seen['step']} (sequence {seen['index']})" for seen in each["seen"]) or "no step"
        print(f"{each['source']} document {each['document']}{tokens}: {steps}")
    print(f"seen by {result['times']} sequences" if result["places"] else "not in the data")


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
