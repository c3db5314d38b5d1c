#!/usr/bin/env python
"""Filter and deduplicate texts by a recipe.

    deepy data curate python_stdlib --output data/stdlib --workers 4
    deepy data curate fineweb --source web=crawl --output data/web
    deepy data curate my.yml --check

The output is the same for any number of workers. A run that was killed continues when it is started again.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Files here hide modules of the library.
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    from megatron.extras import require

    require("datatrove")

import argparse  # noqa: E402

from tools.data.command import run_tool  # noqa: E402


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a recipe, or the name of a ready one: fineweb (docs/curation.md)"
    )
    parser.add_argument("--output", metavar="FOLDER", help="in place of the recipe's output")
    parser.add_argument(
        "--source",
        action="append",
        metavar="NAME=PATH",
        help="in place of the recipe's sources, may be repeated. Other keys of a source of that name stay",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="in place of the recipe's workers")
    parser.add_argument("--check", action="store_true", help="only report the recipe's mistakes")
    parser.add_argument("--verbose", action="store_true", help="with datatrove's log on standard error")
    return parser


def main(given: argparse.Namespace) -> dict:
    from megatron.curation.recipe import read_recipe
    from megatron.data.errors import DataError
    from megatron.installation import configuration_file

    if wrong := [each for each in given.source or () if not all(each.partition("=")[::2])]:
        raise DataError("--source", f"{wrong[0]!r} is not NAME=PATH", "write it as in web=crawl")
    sources = [dict(zip(("name", "path"), each.split("=", 1))) for each in given.source or ()]
    overrides = {"output": given.output, "workers": given.workers, "sources": sources or None}
    path = configuration_file(given.recipe) or configuration_file(f"curation/{given.recipe}") or given.recipe
    recipe = read_recipe(path, {name: value for name, value in overrides.items() if value is not None})
    if given.check:
        return {"stages": [each.title for each in recipe.stages]}
    from megatron.curation.run import run

    report = run(recipe, quiet=not given.verbose)
    return {"output": recipe.section.output, **report}


def show(result: dict) -> None:
    if "started" in result:
        print(f"submitted to Slurm: {', '.join(result['started'])}")
    elif "kept" not in result:
        print(f"no mistakes, stages: {', '.join(result['stages']) or 'none'}")
    else:
        entered, kept = sum(result["documents"].values()), sum(result["kept"].values())
        for stage in result["stages"]:
            gone = sum(sum(each.values()) for each in result["removed"].get(stage, {}).values())
            print(f"{stage:28} removed {gone:,}")
            for what, sources in sorted(result["noted"].get(stage, {}).items()):
                print(f"{'':28} {what}: {sum(sources.values()):,}")
        broken = sum(sum(each.values()) for each in result["quarantined"].values())
        print(f"{entered:,} documents read, {kept:,} kept, {broken:,} records or files quarantined")
        print(f"page: {result['output'].rstrip('/')}/report.html")


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
