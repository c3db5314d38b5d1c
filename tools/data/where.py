#!/usr/bin/env python
"""List the steps at which a run reads a document or a text.

deepy data where runs/pythia --document pile:123
deepy data where runs/pythia --text "to be or not to be"

A chain of stages is searched as a whole.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Files here hide modules of the library.
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
import contextlib  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

from megatron.suite.stages import CHAIN  # noqa: E402
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
    parser.add_argument("--name", help="name of the validation or test set")
    add_shared(parser, "--workers", "processes that search for a text (default: %(default)s)")
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron.data.provenance import Provenance, run_config

    if os.path.isfile(os.path.join(given.run, CHAIN)):
        return _stages(given)
    config = run_config(given.run)
    provenance = Provenance(config, given.split, given.name, run_left_out(given.run))
    places = _document(given.document) if given.document else None
    found = []
    if places:
        source = provenance.source(places[0])
        found.append(_entry(provenance, source, places[1], 0, None))
    else:
        found += _texts(provenance, config, given.text, given.workers)
        found += _samples(provenance, config, given.text) if config.data.synthetic != "none" else []
    return {"run": given.run, "places": found, "times": sum(len(each["seen"]) for each in found)}


def _stages(given: argparse.Namespace) -> dict:
    """The places of a text in the runs of all stages, and the stages whose weights follow from them."""
    from megatron.config.file_access import read_json
    from megatron.data.errors import DataError

    if given.text is None:
        raise DataError("--document", "the stages of a chain have documents of their own", "give --text, or a stage")
    stages, times = {}, 0
    listed = read_json(Path(given.run) / CHAIN)["stages"]
    for each in listed:
        folder = os.path.join(given.run, each["stage"])
        if not each["trains"] or not os.path.isfile(os.path.join(folder, "config.yml")):
            continue
        found = main(argparse.Namespace(**{**vars(given), "run": folder}))
        stages[each["stage"]] = {"places": found["places"], "times": found["times"], "then": _later(listed, each)}
        times += found["times"]
    return {"run": given.run, "stages": stages, "times": times}


def _later(stages: list[dict], stage: dict) -> list[str]:
    """The stages that follow from a stage, directly or not."""
    reached = {stage["stage"]}
    for each in stages:  # parents come first
        reached |= {each["stage"]} if reached & set(each["parents"]) else set()
    return [each["stage"] for each in stages if each["stage"] in reached - {stage["stage"]}]


def _samples(provenance: Provenance, config: Config, text: str) -> list[dict]:
    """The samples with a text in one of their documents, of a source that is no token file: preferences, or rollouts.

    Steps whose samples are not made yet have read none.
    """
    import hashlib

    import numpy as np

    from megatron.data.errors import NotMadeYet
    from megatron.data.tokenizer import build_tokenizer

    tokenizer, seen, known = build_tokenizer(config.tokenizer), [], dict[bytes, bool]()

    def has(number: int) -> bool:
        sample = provenance.plan.sample(number)
        begins = [] if sample.begins is None else np.flatnonzero(sample.begins).tolist()
        key = hashlib.sha256(sample.tokens.tobytes() + repr(begins).encode()).digest()
        if key not in known:
            parts = [part[part < tokenizer.size].tolist() for part in np.split(sample.tokens, begins)]
            known[key] = any(text in tokenizer.decode(part) for part in parts)
        return known[key]

    with contextlib.suppress(NotMadeYet):
        for step in range(provenance.plan.steps):
            numbers = [provenance.number(step, index) for index in range(provenance.plan.batches.size(step))]
            seen += [{"step": step, "index": index} for index, number in enumerate(numbers) if has(number)]
    place = {"source": config.data.synthetic, "document": None, "start": 0, "length": None, "seen": seen}
    return [place] if seen else []


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
        **provenance.origin(source, document),
    }


def show(result: dict) -> None:
    for stage, found in result.get("stages", {}).items():
        print(f"{stage}: seen by {found['times']} sequences")
        _show_places(found["places"], "  ")
        if found["times"] and found["then"]:
            print(f"  its weights are in {', '.join(found['then'])}")
    if "stages" not in result:
        _show_places(result["places"])
        print(f"seen by {result['times']} sequences" if result["places"] else "not in the data")


def _show_places(places: list[dict], indent: str = "") -> None:
    for each in places:
        tokens = "" if each["length"] is None else f" tokens {each['start']}-{each['start'] + each['length'] - 1}"
        steps = ", ".join(f"{seen['step']} (sequence {seen['index']})" for seen in each["seen"]) or "no step"
        document = "" if each["document"] is None else f" document {each['document']}"
        origin = f" (from {each['input']})" if each.get("input") else ""
        print(f"{indent}{each['source']}{document}{tokens}: {steps}{origin}")


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
