#!/usr/bin/env python
"""Report the overlap of an evaluation set with a run's data, and the first step that reads it.

deepy data overlap runs/pythia --examples questions.jsonl --fields question,answer
deepy data overlap runs/pythia --tasks arc_easy,piqa --json
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Files here hide modules of the library.
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import asdict  # noqa: E402

from tools.data.command import run_left_out, run_tool  # noqa: E402

ROWS = 20  # examples that are printed


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run", metavar="RUN", help="the run's directory, or its config.yml")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--examples", metavar="FILE", help="JSON lines (.jsonl), or a text whose paragraphs are the examples"
    )
    what.add_argument("--tasks", metavar="NAME,...", help="tasks of the evaluation harness, as for `deepy evaluate`")
    add("--fields", metavar="NAME,...", help="of the JSON lines (default: text, or context,continuation)")
    add("--include-path", action="append", default=[], metavar="FOLDER", help="a folder of task files")
    add("--by", default="words", choices=["words", "tokens"], help="default: %(default)s")
    add("--n", type=int, metavar="N", help="default: GPT-3's for words (8 to 13), 11 for tokens")
    add("--documents", type=int, default=3, metavar="N", help="named of each example (default: %(default)s)")
    add("--workers", type=int, help="processes for large files (default: one for each core)")
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron.data.errors import DataError
    from megatron.data.overlap.search import OverlapSearch
    from megatron.data.provenance import Provenance, run_config
    from megatron.data.tokenizer import build_tokenizer

    if given.documents < 1 or (given.workers is not None and given.workers < 1):
        raise DataError("--documents, --workers", "both must be at least 1", "omit them for the defaults")
    config = run_config(given.run)
    examples = _examples(given)
    provenance = Provenance(config, left_out=run_left_out(given.run))
    search = OverlapSearch(provenance, build_tokenizer(config.tokenizer), examples, given.by, given.n)
    found = search.run(given.documents, given.workers, _show)
    long_enough = [each for each in found if each.ngrams]
    return {
        "run": given.run,
        "by": given.by,
        "n": search.n,
        "examples": len(found),
        "too_short": len(found) - len(long_enough),
        "overlapping": sum(each.found > 0 for each in long_enough),
        "read": sum(each.read > 0 for each in long_enough),
        "overlaps": [
            {
                "example": each.name,
                "ngrams": each.ngrams,
                "share": each.found / each.ngrams if each.ngrams else None,
                "read_share": each.read / each.ngrams if each.ngrams else None,
                "covered": each.covered / each.length if each.ngrams else None,
                "first_step": each.first_step,
                "documents": [asdict(match) for match in each.matches],
            }
            for each in found
        ],
    }


def _examples(given: argparse.Namespace) -> list[tuple[str, str]]:
    from megatron.data.errors import DataError
    from megatron.data.overlap.search import read_examples

    fields = tuple(filter(None, (given.fields or "").split(",")))
    if given.examples:
        return read_examples(given.examples, fields)
    from megatron.evaluation.select import Request, problems

    requests = [Request(name) for name in given.tasks.split(",") if name]
    if wrong := problems(requests, tuple(given.include_path)):
        raise DataError("--tasks", "; ".join(wrong), "name tasks that evaluate.py knows")
    from megatron.evaluation.harness import texts

    return list(texts(requests, tuple(given.include_path)))


def _show(source: str) -> Callable[[int, int], None]:
    from megatron.data.corpus.progress import Meter

    return Meter(f"reading {source}", "tokens").show


def show(result: dict) -> None:
    checked = result["examples"] - result["too_short"]
    print(f"{result['n']}-grams of {result['by']}: {checked:,} of {result['examples']:,} examples are long enough")
    print(f"{result['overlapping']:,} have one in the token files, {result['read']:,} one that the run reads")
    rows = sorted((each for each in result["overlaps"] if each["share"]), key=lambda each: -each["share"])
    for each in rows[:ROWS]:
        step = "never read" if each["first_step"] is None else f"first read at step {each['first_step']}"
        best = each["documents"][0]
        place = f"{best['source']} document {best['document']} tokens {best['start']}-"
        print(f"  {each['example']}: {each['share']:.1%}, {step}, {place}{best['start'] + best['length'] - 1}")
    if len(rows) > ROWS:
        print(f"  and {len(rows) - ROWS:,} more: --json has all")


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
