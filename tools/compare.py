#!/usr/bin/env python3
"""Compare runs: loss curves in one picture, last losses, differences of configurations.

    deepy compare runs/a runs/b [runs/c ...] [--output compare.png] [--json]

Exit status 2: a run has no metrics, or its files are damaged.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from megatron.config import ConfigError  # noqa: E402
from megatron.config.admitted import add_flag  # noqa: E402
from megatron.config.file_access import OutputError, keep_inputs, writing  # noqa: E402
from megatron.config.problems import UserError, aligned  # noqa: E402
from megatron.config.show.difference import described, differences  # noqa: E402
from megatron.report.curve import History, smoothed  # noqa: E402
from megatron.report.figures import save_lines  # noqa: E402


def read(runs: list[str]) -> dict[str, History]:
    """The metrics of each run, by its folder as the user named it."""
    found = {}
    for run in runs:
        try:
            found[run] = History.read(Path(run, "metrics.jsonl"))
        except (OSError, ValueError) as error:
            raise UserError(f"{run} has no metrics that can be read: {error}") from error
        if not found[run].training:
            raise UserError(f"{run} has no training step in its metrics.jsonl")
    return found


def last_losses(history: History) -> dict[str, Any]:
    """The end of a run: its last step, the running mean of the training loss there, and validation losses."""
    losses = [record["loss"] for record in history.training if record["loss"] is not None]
    tail = losses[-max(len(losses) // 20, 1) :]
    return {
        "step": history.training[-1]["step"],
        "training": sum(tail) / len(tail) if tail else None,
        "averaged": len(tail),
        "validation": {
            name: {"step": points[-1][0], "loss": points[-1][1], "best": min(loss for _, loss in points)}
            for name, points in history.validation.items()
        },
    }


def draw(histories: dict[str, History], path: str) -> None:
    """Draw training losses as running means over pale curves, and validation losses with marks, one colour per
    curve."""
    raw, curves = smoothed({name: each.curves()["training"] for name, each in histories.items()})
    marked = {}
    for run, history in histories.items():
        for name, points in history.curves().items():
            if name != "training":
                marked[f"{run}: {name}"] = points
    faint = raw if len(raw) == len(curves) else {}  # pale curves have their means' colours: all, or none
    save_lines(path, {**curves, **marked}, title="", x="step", y="loss (nats per token)", marked=[*marked], faint=faint)


def table(ends: dict[str, dict[str, Any]]) -> list[str]:
    """Lines: a run each, with the end of its losses."""
    sets = list(dict.fromkeys(name for end in ends.values() for name in end["validation"]))
    names = ["validation" if name == "validation" else f"val. {name}" for name in sets]
    rows = [["run", "last step", "training", *names]]
    for run, end in ends.items():
        found = [end["validation"].get(name, {}).get("loss") for name in sets]
        losses = ["-" if each is None else f"{each:.4f}" for each in (end["training"], *found)]
        rows.append([run, str(end["step"]), *losses])
    return aligned(rows)


def main(arguments: list[str] | None = None) -> int:
    """Compare runs and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, two or more")
    parser.add_argument("--output", default="compare.png", help="the picture (default: compare.png)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_flag(parser)
    options = parser.parse_args(arguments)
    runs = list(dict.fromkeys(each.rstrip(os.sep) or os.sep for each in options.runs))
    if len(runs) < 2:
        parser.error("name two or more runs")
    try:
        inputs = [Path(run, name) for run in runs for name in ("metrics.jsonl", "config.yml")]
        keep_inputs([options.output], [each for each in inputs if each.is_file()])
        histories = read(runs)
        settings = {run: described(run) for run in runs}
        with writing(options.output):
            draw(histories, options.output)
    except (ConfigError, OutputError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    ends = {run: last_losses(history) for run, history in histories.items()}
    unlike = {run: differences(settings[runs[0]], settings[run]) for run in runs[1:]}
    if options.json:
        found = {run: [each.to_json() for each in one] for run, one in unlike.items()}
        print(json.dumps({"runs": ends, "differences": found, "picture": options.output}, indent=2))
        return 0
    lines = table(ends)
    for run, changed in unlike.items():
        lines += ["", f"{len(changed)} values differ (- {runs[0]}, + {run})", *map(str, changed)]
    print("\n".join([*lines, "", f"curves: {options.output}"]))
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
