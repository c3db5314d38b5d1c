"""Train every causal language model of the installed transformers, and write the table of docs/any_model.md.

python -m tests.kinds.transformers.table FILE            train all types that FILE does not have yet
python -m tests.kinds.transformers.table FILE --write    write the table from FILE
python -m tests.kinds.transformers.table FILE qwen3 ...  only these types, again
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path
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
        try:
            answers = on_ranks(ranks, by_engine, values_of(name, options, stage, parallel), ranks)
            *numbers, worst = differences(answers, losses, weights)
            found |= {way: max(numbers), f"{way}: worst": worst}
        except ConfigError as error:
            found[f"{way}: reason"] = _brief(error.problems[0])
        except Exception as error:
            found[f"{way}: reason"] = _brief(str(error).strip().splitlines()[-1])
    if any(found.get(way, 0.0) > BOUND for way in WAYS):
        other = by_torch(values, rounded=True)
        parts = [(name, slice(None), each) for name, each in other[1].items()]
        found["rounding"] = max(differences([(other[0], parts)], losses, weights)[:2])
    return found


def _brief(error: Any) -> str:
    text = " ".join(str(getattr(error, "rule", error)).split())
    return text if len(text) <= 160 else f"{text[:157]}..."


def table(results: dict[str, dict[str, Any]]) -> str:
    """The table's text."""
    import transformers

    exact = {
        way: [
            name for name, each in results.items() if way in each and each[way] <= max(BOUND, each.get("rounding", 0))
        ]
        for way in WAYS
    }
    head = (
        f"Types of transformers {transformers.__version__}: {len(results)}. Equal to a plain loop of torch: "
        + ", ".join(f"{len(names)} ({way})" for way, names in exact.items())
        + f". Their differences are at most {BOUND:g}, but for {sum('rounding' in each for each in results.values())} "
        "types, which one more rounding of the initial weights changes more."
    )
    heads = ["type", "class", *WAYS, "documents apart", "reason"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, each in sorted(results.items()):
        cells = [f"{each[way]:.0e}" if way in each else "–" for way in WAYS]
        cells.append("yes" if each.get("documents") else "no" if "documents" in each else "–")
        reasons = [f"{way}: {each[f'{way}: reason']}" for way in WAYS if f"{way}: reason" in each]
        reasons += [f"{way}: differs" for way in WAYS if way in each and name not in exact[way]]
        reason = each.get("reason", "") or ". ".join(reasons)
        if "rounding" in each:
            reason += f" one more rounding of the initial weights changes the plain loop by {each['rounding']:.0e}"
        reason = reason.strip().replace("|", "/").replace(";", ",")
        rows.append(f"| {name} | {each.get('class', '')} | {' | '.join(cells)} | {reason} |")
    return "\n".join([textwrap.fill(head, 120), "", *rows])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    results = json.loads(options.file.read_text()) if options.file.exists() else {}
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}", encoding="utf-8")
        return 0
    for name in options.types or [each for each in TYPES if each not in results]:
        results[name] = compare(name)
        draft = options.file.with_suffix(".draft")
        draft.write_text(json.dumps(results, indent=1, sort_keys=True))
        os.replace(draft, options.file)
        print(name, results[name], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
