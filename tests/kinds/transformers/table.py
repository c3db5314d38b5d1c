"""Train every causal language model of the installed transformers, and write the table of docs/any_model.md.

python -m tests.kinds.transformers.table            train all types that the page does not have yet
python -m tests.kinds.transformers.table qwen3 ...  these types again. The other rows stay
python -m tests.kinds.transformers.table --gaps     the types with a gap again
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Collection
from typing import Any

from tests.kinds.transformers.steps import by_engine, by_torch, differences, values_of
from tests.kinds.transformers.tiny import TYPES, tiny
from tests.paths import ROOT

PAGE = ROOT / "docs" / "any_model.md"
BEGIN, END = "<!-- table of types, written by tests/kinds/transformers/table.py -->", "<!-- end of the table -->"
BOUND = 1e-5
WAYS: dict[str, tuple[int, int, dict[str, int]]] = {  # ranks, ZeRO stage, layout
    "one rank": (1, 0, {}),
    "ZeRO 3 on 2 ranks": (2, 3, {}),
    "tensor 2": (2, 0, {"tensor": 2}),
    "pipeline 2": (2, 0, {"pipeline": 2}),
}


def compare(name: str, ways: Collection[str] = tuple(WAYS)) -> dict[str, Any]:
    """The class of a type, and by each of these ways the largest relative difference of losses and weights, or the
    reason why it is not trained."""
    from megatron.config import ConfigError, resolve
    from megatron.kinds.transformers.facts import FactsError, facts_of
    from megatron.testing import on_ranks

    found: dict[str, Any] = {}
    try:
        options = tiny(name)
        values = values_of(name, options)
        resolved = resolve(values)
        facts = facts_of(resolved.model.transformers.model_dump())
        found |= {"class": facts.class_name, "documents": facts.documents}
        losses, weights = by_torch(values)
    except (ConfigError, FactsError) as error:
        return {"reason": _brief(getattr(error, "problems", [error])[0])}
    except Exception as error:  # of a class of transformers
        return {**found, "reason": f"transformers: {type(error).__name__}: {_brief(error)}"}
    for way in ways:
        ranks, stage, parallel = WAYS[way]
        run = values_of(name, options, stage, parallel)
        try:
            resolve(run, ranks=ranks)  # the ranks do it again, and their errors are texts
            *numbers, worst = differences(on_ranks(ranks, by_engine, run, ranks), losses, weights)
            found |= {way: max(numbers), f"{way}: worst": worst}
        except ConfigError as error:
            found[f"{way}: reason"] = _brief(error.problems[0])
        except Exception as error:
            found[f"{way}: reason"] = _brief(error)
    if any(found.get(way, 0.0) > BOUND for way in WAYS):
        other = by_torch(values, rounded=True)
        parts = [(name, slice(None), each) for name, each in other[1].items()]
        found["rounding"] = max(differences([(other[0], parts)], losses, weights)[:2])
    return found


def _brief(error: Any) -> str:
    """A rule, or the last line of a traceback without the fix, which is the same in all rows."""
    text = " ".join(str(getattr(error, "rule", error)).strip().splitlines()[-1].split())
    text = text.removeprefix("megatron.worker.place.StartError: ")
    text = text.partition("must be 1: ")[2].partition(": use parallel")[0] or text
    return text if len(text) <= 140 else f"{text[:137]}..."


DIFFERS = "differs"
ROUNDING = "One more rounding of the initial weights changes the plain loop by"


def begin(way: str) -> str:
    """Of a sentence about this way."""
    return f"{way[0].upper()}{way[1:]}:"


def row(name: str, found: dict[str, Any]) -> list[str]:
    """The cells of a type."""
    cells = [f"{found[way]:.0e}" if way in found else "–" for way in WAYS]
    apart = "yes" if found.get("documents") else "no" if "documents" in found else "–"
    reasons = [f"{begin(way)} {found[f'{way}: reason']}" for way in WAYS if f"{way}: reason" in found]
    differs = [way for way in WAYS if found.get(way, 0.0) > max(BOUND, found.get("rounding", 0.0))]
    reasons += [f"{begin(way)} {DIFFERS}" for way in differs]
    reasons += [f"{ROUNDING} {found['rounding']:.0e}"] if "rounding" in found else []
    reason = (found.get("reason") or ". ".join(reasons)).strip().replace("|", "/").replace(";", ",")
    return [name, found.get("class", ""), *cells, apart, reason]


def rows_of_page() -> dict[str, list[str]]:
    """The cells of each row, by type."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells for cells in rows[1:]}


def table(rows: dict[str, list[str]]) -> str:
    """The table's text."""
    import transformers

    numbers = list(zip(*(cells[2 : 2 + len(WAYS)] for cells in rows.values())))
    differs = [cells[-1] for cells in rows.values()]
    exact = {
        way: sum(cell != "–" and f"{begin(way)} {DIFFERS}" not in reason for cell, reason in zip(column, differs))
        for way, column in zip(WAYS, numbers)
    }
    head = (
        f"Types of transformers {transformers.__version__}: {len(rows)}. Equal to a plain loop of torch: "
        + ", ".join(f"{count} ({way})" for way, count in exact.items())
        + f". Their differences are at most {BOUND:g}, but for {sum(ROUNDING in each for each in differs)} "
        "types, which one more rounding of the initial weights changes more."
    )
    heads = ["type", "class", *WAYS, "documents apart", "reason"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([
        textwrap.fill(head, 120),
        "",
        *lines,
        *(f"| {' | '.join(rows[each])} |" for each in sorted(rows)),
    ])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--gaps", action="store_true")
    options = parser.parse_args(arguments)
    rows = {name: cells for name, cells in rows_of_page().items() if name in TYPES}
    gaps = [name for name, cells in rows.items() if options.gaps and "–" in cells[2 : 2 + len(WAYS)]]
    for name in [*options.types, *gaps] or [each for each in TYPES if each not in rows]:
        rows[name] = row(name, compare(name))
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}", encoding="utf-8")
        print(*rows[name], sep=" | ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
