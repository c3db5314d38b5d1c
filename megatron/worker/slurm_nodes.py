"""Slurm's short form of lists of hosts: `node[01-03,7],login1` and `rack[1-2]n[1-4]`."""

from __future__ import annotations

import re

_BRACKETS = re.compile(r"\[([^\]]*)\]")


def expand(text: str) -> list[str]:
    """All host names of a node list, in its order.

    Raises:
        ValueError: not a node list.
    """
    return [name for part in _split(text) for name in _expand_one(part)]


def _split(text: str) -> list[str]:
    """The parts between commas that are outside brackets."""
    parts = [part for part in re.split(r",(?![^\[]*\])", text.strip()) if part]
    if not parts or text.count("[") != text.count("]"):
        raise ValueError(f"{text!r} is not a list of nodes")
    return parts


def _expand_one(part: str) -> list[str]:
    match = _BRACKETS.search(part)
    if not match:
        return [part]
    before, after = part[: match.start()], _expand_one(part[match.end() :])
    numbers: list[str] = []
    for each in match.group(1).split(","):
        first, _, last = each.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ValueError(f"{part!r} is not a list of nodes: {each!r} is not a range of numbers")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return [before + number + rest for number in numbers for rest in after]
