#!/usr/bin/env python3
"""List the ready configurations that `deepy train NAME` takes.

    deepy list                  all of them, with the first line of each file
    deepy list llama moe        those whose name has one of these words

Names of `layouts/` are parts: deepy train pythia/70m layouts/bf16. `--json` prints one JSON document. Exit status
2 means that no name has the word.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from megatron.installation import configuration_names, near_names, root  # noqa: E402

PARTS = ("family", "suite")  # what the files of a family extend


def about(name: str) -> str:
    """The first line of a configuration, if it is a comment."""
    first = (root() / "configs" / f"{name}.yml").read_text(encoding="utf-8").partition("\n")[0]
    return first[1:].strip() if first.startswith("#") else ""


def main(arguments: list[str] | None = None) -> int:
    """Print the names. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="part of a name")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args(arguments)
    names = [name for name in configuration_names() if name.rpartition("/")[2] not in PARTS]
    found = [name for name in names if not options.words or any(word.lower() in name for word in options.words)]
    if not found:
        near = near_names(" ".join(options.words))
        print(f"no ready configuration has that name. Near are {', '.join(near) or 'none'}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([{"name": name, "about": about(name)} for name in found], indent=2))
        return 0
    width = max(map(len, found))
    print("\n".join(f"{name:{width}}  {about(name)}".rstrip() for name in found))
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
