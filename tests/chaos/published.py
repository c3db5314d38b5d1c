"""One table of several calls of tools/chaos.py, for docs/reliability.md.

python -m tests.chaos.published FILE ...      files that `chaos.py --json` has printed
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.trials.chaos import HEAD, Event, Round, aligned, rows, summary


def published(calls: Sequence[Mapping[str, Any]]) -> str:
    """A row for each layout and kind of fault, over all calls of a layout."""
    cells: list[tuple[str, ...]] = [(HEAD[0], "where (seeds)", *HEAD[1:])]
    ends = []
    for place in dict.fromkeys(call["where"] for call in calls):
        here = [call for call in calls if call["where"] == place]
        seeds = ", ".join(map(str, sorted({call["seed"] for call in here})))
        rounds = [
            Round(each["number"], [Event(**event) for event in each["events"]], each["problems"])
            for call in here
            for each in call["rounds"]
        ]
        cells += [(row[0], f"{place} ({seeds})", *row[1:]) for row in rows(rounds)]
        ends.append(f"{place}: {summary(rounds)}")
    return "\n".join([*aligned(cells), "", *ends])


if __name__ == "__main__":
    print(published([json.loads(Path(each).read_text(encoding="utf-8")) for each in sys.argv[1:]]))
