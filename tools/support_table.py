#!/usr/bin/env python3
"""The table of what is proven to train right, from tests/layouts.yml, for the README.

    python tools/support_table.py            print it
    python tools/support_table.py README.md  put it between the file's two markers
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.training.matrix import Case, cases, read  # noqa: E402

BEGIN, END = "<!-- support table -->", "<!-- /support table -->"


def render() -> str:
    """Markdown: a row per layout, a column per architecture, and in each cell the recipes that are tested there."""
    matrix = read()
    found, names = cases(matrix), list(matrix["architectures"])
    about = "; ".join(f"**{name}**: {entry['about']}" for name, entry in matrix["architectures"].items())
    lines = [f"| layout | ranks | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for layout, entry in matrix["layouts"].items():
        here = [case for case in found if case.layout == layout]
        cells = [_cell([case for case in here if case.architecture == name]) for name in names]
        lines.append(f"| {layout} | {entry['ranks']} | {' | '.join(cells)} |")
    bounds = "; ".join(f"{recipe}: losses {entry['bounds']['loss']:.0e}, gradient norms {entry['bounds']['norm']:.0e}, "
                       f"weights {entry['bounds']['weights']:.0e}" for recipe, entry in matrix["recipes"].items())
    measured = f"Largest relative errors allowed, against one process of plain PyTorch: {bounds}."
    return "\n".join([*lines, "", measured, "", f"Architectures: {about}."])


def _cell(found: list[Case]) -> str:
    return ", ".join(dict.fromkeys(case.recipe for case in found)) or "–"


def section(text: str) -> str:
    """What stands between the markers of a text.

    Raises:
        ValueError: it does not have both.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text needs one line {BEGIN} and, after it, one line {END}")
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def replaced(text: str) -> str:
    """The text with the table between its markers."""
    section(text)
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{render()}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> int:
    if not arguments:
        print(render())
        return 0
    for name in arguments:
        path = Path(name)
        try:
            path.write_text(replaced(path.read_text()))
        except (OSError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
