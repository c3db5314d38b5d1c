#!/usr/bin/env python3
"""Summarise the training data that checkpoints recite, from the results of `deepy extract`.

    deepy memorisation runs/my/memorisation/step_00001000              one checkpoint, or several
    deepy memorisation EARLY... LATE --predict                         how well early sets predict the last

With --predict the sequences that the last folder's checkpoint recites are the truth, and each other folder's a
prediction of it. The tool prints precision, recall and false positives over the sequences that both have. The folders
may belong to different models of a suite that have read the same data.

Exit status 2: there are no such results, or they cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)


def main(arguments: list[str] | None = None) -> int:
    """Print the results and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="RESULTS", help="a folder that `deepy extract` has written"
    )
    parser.add_argument("--predict", action="store_true", help="report how well the other sets predict the last one")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document and nothing else on standard output"
    )
    options = parser.parse_args(arguments)
    if options.predict and len(options.results) < 2:
        parser.error("--predict needs at least two folders of results, and the last one is the truth")
    from megatron.evaluation.memorisation.summary import ResultError

    try:
        found = _predictions(options.results) if options.predict else _summaries(options.results)
    except (ResultError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        json.dumps([facts for facts, _ in found], indent=1) if options.json else "\n\n".join(text for _, text in found)
    )
    return 0


def _summaries(folders: list[Path]) -> list[tuple[dict[str, Any], str]]:
    from megatron.evaluation.memorisation.summary import summary_of

    found = [(folder, summary_of(folder)) for folder in folders]
    return [({"results": str(folder), **each.facts()}, f"{folder}\n{each.text()}") for folder, each in found]


def _predictions(folders: list[Path]) -> list[tuple[dict[str, Any], str]]:
    from megatron.evaluation.memorisation.summary import predict

    found = []
    for folder in folders[:-1]:
        each = predict(folder, folders[-1])
        rates = {"precision": each.precision, "recall": each.recall, "false positive rate": each.false_positive_rate}
        told = ", ".join(f"{name} {'unknown' if rate is None else f'{rate:.4f}'}" for name, rate in rates.items())
        facts = {"early": str(folder), "late": str(folders[-1]), **vars(each)}
        facts |= {name.replace(" ", "_"): rate for name, rate in rates.items()}
        counts = f"{each.hits:,} recited by both, {each.false_alarms:,} by only the early one, {each.misses:,} by only "
        counts += f"the late one, of {each.sequences:,} sequences"
        found.append((facts, f"{folder} foretells {folders[-1]}: {told}\n  {counts}"))
    return found


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
