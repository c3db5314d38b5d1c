"""The load of the experts as a picture: who works now, and how evenly over the run."""

from __future__ import annotations

from pathlib import Path

from .figures import HeatMap, save_heat_maps
from .jsonl import read_lines, sound_metrics

COLUMNS = 400  # steps that are drawn; more would be thinner than a pixel


def save_expert_load(metrics: Path, picture: Path, title: str) -> bool:
    """Draw experts.png of a metrics.jsonl: each expert's load over an even share at the last record, and the largest of
    each layer over the steps.

    Returns:
        False, and draws nothing, where the run has no experts.
    """
    records = [(record["step"], record["moe"]) for record in read_lines(metrics, sound_metrics) if "moe" in record]
    if not records:
        return False
    layers = list(records[-1][1])
    now = [[share * len(records[-1][1][layer]["load"]) for share in records[-1][1][layer]["load"]] for layer in layers]
    widest = max(map(len, now))
    now = [[*row, *[float("nan")] * (widest - len(row))] for row in now]
    shown = [
        records[index * (len(records) - 1) // max(min(len(records), COLUMNS) - 1, 1)]
        for index in range(min(len(records), COLUMNS))
    ]
    over = [[moe[layer]["max_over_mean"] for _, moe in shown] for layer in layers]
    most = max(2.0, *(value for row in over for value in row[len(row) // 2 :]))
    save_heat_maps(
        picture,
        [
            HeatMap(
                f"load of each expert over an even share, step {records[-1][0]}", now, "expert", "layer", rows=layers
            ),
            HeatMap(
                "largest load of a layer over an even share", over, "step", "layer", (shown[0][0], shown[-1][0]), layers
            ),
        ],
        title=title,
        most=most,
    )
    return True
