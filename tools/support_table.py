#!/usr/bin/env python3
"""Write the tables of tested layouts, from tests/layouts.yml.

The README has a summary, docs/layouts.md all of it.

python tools/support_table.py         print both
python tools/support_table.py FILES   put the one that belongs there between each file's two markers
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from tests.training.matrix import Case, cases, read  # noqa: E402

NONE = "–"
PROSE = 120  # columns of a line of text in the documentation
BEGIN, END = "<!-- support table -->", "<!-- /support table -->"


def grid() -> str:
    """Markdown: a row per layout, a column per architecture, and in each cell the recipes that are tested there."""
    matrix = read()
    found, names = cases(matrix), list(matrix["architectures"])
    lines = [f"| layout | ranks | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for layout, entry in matrix["layouts"].items():
        here = [case for case in found if case.layout == layout]
        cells = [_cell([case for case in here if case.architecture == name]) for name in names]
        lines.append(f"| {layout} | {entry['ranks']} | {' | '.join(cells)} |")
    bounds = "; ".join(
        f"{recipe}: losses {entry['bounds']['loss']:.0e}, gradient norms {entry['bounds']['norm']:.0e}, "
        f"weights {entry['bounds']['weights']:.0e}"
        for recipe, entry in matrix["recipes"].items()
    )
    measured = f"Largest relative errors allowed, against one process of plain PyTorch: {bounds}."
    return "\n".join([*lines, "", *textwrap.wrap(measured, PROSE, break_on_hyphens=False)])


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
        "yes" if any(case.recipe == "bf16" for case in found) else NONE,
    ]


@dataclass(frozen=True, order=True)
class CaseSizes:
    """A case's sizes of the axes, and its ZeRO stage."""

    tensor: int
    pipeline: int
    data: int
    context: int
    folded: int
    expert: int
    zero: int

    @classmethod
    def of(cls, case: Case) -> CaseSizes:
        parallel = case.values.get("parallel", {})
        axes = ("tensor", "pipeline", "context", "folded")
        tensor, pipeline, context, folded = (parallel.get(axis, 1) for axis in axes)
        return cls(
            tensor,
            pipeline,
            case.ranks // (tensor * pipeline * context * folded),
            context,
            folded,
            parallel.get("expert", 1),
            case.values.get("zero", {}).get("stage", 1),
        )

    @property
    def axes(self) -> str:
        """Which axes have more than one rank: "tp·dp"."""
        sizes = {"tp": self.tensor, "pp": self.pipeline, "cp": self.context, "fold": self.folded, "dp": self.data}
        sizes["ep"] = self.expert
        return "·".join(name for name, size in sizes.items() if size > 1)


def _several(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers)))) or NONE


def _cell(found: list[Case]) -> str:
    return ", ".join(dict.fromkeys(case.recipe for case in found)) or NONE


def table_for(path: Path) -> str:
    """What stands in a file: the summary in the README, the grid elsewhere."""
    return summary() if path.name == "README.md" else grid()


def section(text: str) -> str:
    """What stands between the markers of a text.

    Raises:
        ValueError: it does not have both.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text needs one line {BEGIN} and, after it, one line {END}")
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def replaced(text: str, table: str) -> str:
    """The text with the table between its markers."""
    section(text)
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> int:
    if not arguments:
        print(f"{summary()}\n\n{grid()}")
        return 0
    made = {}
    for name in arguments:
        path = Path(name)
        try:
            made[path] = replaced(path.read_text(encoding="utf-8"), table_for(path))
        except (OSError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(lambda: main(sys.argv[1:])))
