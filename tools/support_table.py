#!/usr/bin/env python3
"""Write the tables of tested layouts, from tests/layouts.yml: a summary and all of it (docs/layouts.md).

deepy support-table         print both
deepy support-table FILES   put each table between its two markers in these files
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from tests.training.matrix import Case, cases, read  # noqa: E402

NONE = "–"
SUMMARY, GRID = "support summary", "support table"  # the markers: <!-- NAME --> and <!-- /NAME -->


def grid() -> str:
    """Markdown: a row per layout, a column per architecture, and in each cell the recipes that are tested there."""
    matrix = read()
    found, names = cases(matrix), list(matrix["architectures"])
    lines = [f"| layout | ranks | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for layout, entry in matrix["layouts"].items():
        here = [case for case in found if case.layout == layout]
        cells = [_cell([case for case in here if case.architecture == name]) for name in names]
        lines.append(f"| {layout} | {entry['ranks']} | {' | '.join(cells)} |")
    bounds = ["| recipe | losses | gradient norms | weights |", "|---|---|---|---|"]
    for recipe, entry in matrix["recipes"].items():
        allowed = [f"{entry['bounds'][key]:.0e}" for key in ("loss", "norm", "weights")]
        bounds.append(f"| {recipe} | {' | '.join(allowed)} |")
    return "\n".join([
        *lines,
        "",
        "Largest relative errors allowed, against one process of plain PyTorch:",
        "",
        *bounds,
    ])


def summary() -> str:
    """Markdown: a row per architecture, and for each way of cutting a run the sizes that are tested."""
    matrix = read()
    lines = [
        "| architecture | what it has | tensor | pipeline | ZeRO over data | context | folded | expert | together "
        "| recomputed | bf16 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, entry in matrix["architectures"].items():
        cells = _summary([case for case in cases(matrix) if case.architecture == name])
        lines.append(f"| {name} | {entry['about']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _summary(found: list[Case]) -> list[str]:
    places = [CaseSizes.of(case) for case in found]
    sequence = " (sequence too)" if any(case.values.get("parallel", {}).get("sequence") for case in found) else ""
    together = dict.fromkeys(place.axes for place in sorted(places) if place.axes.count("·"))
    modes = {case.values.get("training", {}).get("activation_checkpointing", {}).get("mode") for case in found} - {
        None,
        "none",
    }
    tensor = _several(place.tensor for place in places if place.tensor > 1)
    return [
        tensor + (sequence if tensor != NONE else ""),
        _several(place.pipeline for place in places if place.pipeline > 1),
        _several(place.zero for place in places if place.data > 1),
        _several(place.context for place in places if place.context > 1),
        _several(place.folded for place in places if place.folded > 1),
        _several(place.expert for place in places if place.expert > 1),
        ", ".join(together) or NONE,
        ", ".join(sorted(modes)) or NONE,
        "yes" if any("bf16" in case.recipe for case in found) else NONE,
    ]


@dataclass(frozen=True, order=True)
class CaseSizes:
    """A case's sizes of the axes, and its ZeRO stage."""

    tensor: int
    columns: int
    pipeline: int
    data: int
    context: int
    folded: int
    depth: int
    expert: int
    zero: int

    @classmethod
    def of(cls, case: Case) -> CaseSizes:
        parallel = case.values.get("parallel", {})
        axes = ("tensor", "columns", "pipeline", "context", "folded")
        tensor, columns, pipeline, context, folded = (parallel.get(axis, 1) for axis in axes)
        return cls(
            tensor,
            columns,
            pipeline,
            case.ranks // (tensor * columns * pipeline * context * folded),
            context,
            folded,
            parallel.get("depth", 1),
            parallel.get("expert", 1),
            case.values.get("zero", {}).get("stage", 1),
        )

    @property
    def axes(self) -> str:
        """Which axes have more than one rank: "tp·dp"."""
        sizes = {"tp": self.tensor, "col": self.columns, "pp": self.pipeline, "cp": self.context, "fold": self.folded}
        sizes |= {"depth": self.depth, "dp": self.data // self.depth, "ep": self.expert}
        return "·".join(name for name, size in sizes.items() if size > 1)


def _several(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers)))) or NONE


def _cell(found: list[Case]) -> str:
    return ", ".join(dict.fromkeys(case.recipe for case in found)) or NONE


def section(text: str, name: str) -> str:
    """The part of a text between the markers of that name.

    Raises:
        ValueError: the text does not have both markers, once and in order.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the text needs one line {begin} and, after it, one line {end}")
    return text.partition(begin)[2].partition(end)[0].strip()


def replaced(text: str, name: str, table: str) -> str:
    """The text with the table between the markers of that name."""
    section(text, name)
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="deepy support-table", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "files", nargs="*", help="write each table between its two markers in these files. Without files: print both"
    )
    arguments = parser.parse_args(arguments).files
    if not arguments:
        print(f"{summary()}\n\n{grid()}")
        return 0
    made = {}
    for name in arguments:
        path = Path(name)
        try:
            text = path.read_text(encoding="utf-8")
            made[path] = replaced(replaced(text, SUMMARY, summary()), GRID, grid())
        except (OSError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(lambda: main(sys.argv[1:])))
