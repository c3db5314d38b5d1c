"""Table and picture of optimizers.yml and optimizers_best.yml, from the JSON of `suite.py ... compare --json`.

    python examples/suites/optimizers.py rates.json best.json picture.png

Of each stack and optimizer it shows the best rate: the one with the lowest mean over its runs, of those with the most
seeds. A dash in the last column is beyond the rates that were tried.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any

LOSS = "validation loss"
Points = dict[float, dict[str, Any]]  # rate -> mean, deviation and number of runs


def read(files: list[str]) -> dict[tuple[str, str], Points]:
    """The losses by (stack, optimizer). Results of later files, with more seeds, replace earlier ones."""
    found: dict[tuple[str, str], Points] = defaultdict(dict)
    for file in files:
        with open(file, encoding="utf-8") as text:
            results = json.load(text)["results"]
        for each in results:
            own = each["values"]
            stack, kind, rate = (own.get("case") or f"{own['stack']}-{own['optimizer']}").split("-")
            if LOSS in each["results"]:
                found[stack, kind][float(rate)] = each["results"][LOSS]
    return found


def best_of(points: Points) -> float:
    most = max(each["runs"] for each in points.values())
    return min((rate for rate in points if points[rate]["runs"] == most), key=lambda rate: points[rate]["mean"])


def table(found: dict[tuple[str, str], Points]) -> str:
    heads = ["stack", "optimizer", "best rate", "loss", "over seeds", "at the next lower and higher rate"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (stack, kind), points in found.items():
        rates, best = sorted(points), best_of(points)
        place, own = rates.index(best), points[best]
        near = [f"{points[rates[i]]['mean']:.3f}" if 0 <= i < len(rates) else "–" for i in (place - 1, place + 1)]
        spread = "–" if own["deviation"] is None else f"± {own['deviation']:.3f} ({own['runs']})"
        lines.append(f"| {stack} | {kind} | {best:g} | {own['mean']:.3f} | {spread} | {', '.join(near)} |")
    return "\n".join(lines)


def draw(found: dict[tuple[str, str], Points], file: str) -> None:
    """A panel per stack: losses over rates."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    stacks = list(dict.fromkeys(stack for stack, _ in found))
    _, panels = plt.subplots(1, len(stacks), figsize=(4.2 * len(stacks), 3.6), sharey=True, squeeze=False)
    for panel, stack in zip(panels[0], stacks):
        for (own, kind), points in found.items():
            if own == stack:
                rates = sorted(points)
                means, bars = ([points[rate][name] or 0.0 for rate in rates] for name in ("mean", "deviation"))
                panel.errorbar(rates, means, bars, marker="o", capsize=3, label=kind)
        panel.set(xscale="log", xlabel="peak rate", title=stack)
        panel.xaxis.set_minor_formatter(NullFormatter())
    panels[0][0].set_ylabel("validation loss (nats per byte)")
    panels[0][0].legend(fontsize=8)
    plt.tight_layout()
    plt.savefig(file, dpi=110)


if __name__ == "__main__":
    losses = read(sys.argv[1:-1])
    print(table(losses))
    draw(losses, sys.argv[-1])
