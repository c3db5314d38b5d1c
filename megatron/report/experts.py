"""The load of the experts as a picture: at the last record, and over the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .figures import HeatMap, save_heat_maps
from .jsonl import read_lines, sound_metrics

COLUMNS = 400  # steps that are drawn. More would be thinner than a pixel
Item = TypeVar("Item")


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` items, evenly spaced, with the first and the last one."""
    count = min(len(items), most)
    return [items[index * (len(items) - 1) // max(count - 1, 1)] for index in range(count)]


def loads_over_even_share(moe: Mapping[str, Mapping[str, Any]]) -> list[list[float]]:
    """Rows of equal length, one per layer: each expert's load over an even share, padded with nan."""
    rows = [[share * len(each["load"]) for share in each["load"]] for each in moe.values()]
    widest = max(map(len, rows))
    return [[*row, *[float("nan")] * (widest - len(row))] for row in rows]


def save_expert_load(metrics: Path, picture: Path, title: str) -> bool:
    """Draw experts.png of a metrics.jsonl: each expert's load over an even share at the last record, and the largest of
    each layer over the steps.

    Returns:
        False, without a picture, if the run has no experts.
    """
    records = [(record["step"], record["moe"]) for record in read_lines(metrics, sound_metrics) if "moe" in record]
    if not records:
        return False
    layers, now = list(records[-1][1]), loads_over_even_share(records[-1][1])
    shown = evenly(records, COLUMNS)
    over = [[moe[layer]["max_over_mean"] for _, moe in shown] for layer in layers]
    most = max(2.0, *(value for row in over for value in row[len(row) // 2 :]))
    last = HeatMap(
        f"load of each expert over an even share, step {records[-1][0]}", now, "expert", "layer", None, layers
    )
    span = (shown[0][0], shown[-1][0])
    largest = HeatMap("largest load of a layer over an even share", over, "step", "layer", span, layers)
    save_heat_maps(picture, [last, largest], title=title, most=most)
    return True
