"""Slurm's short form of lists of hosts: `node[01-03,7],login1` and `rack[1-2]n[1-4]`."""

from __future__ import annotations

import re

_BRACKETS = re.compile(r"\[([^\]]*)\]")
MOST = 1_000_000  # hosts of a list. No cluster has more


def expand(text: str) -> list[str]:
    """All host names of a node list, in its order.

    Raises:
        ValueError: not a node list, or one of more than `MOST` hosts.
    """
    names: list[str] = []
    for part in _split(text):
        names += _expand_one(part)
        _limit(part, len(names))
    return names


def _limit(part: str, count: int) -> None:
    if count > MOST:
        raise ValueError(f"{part!r} gives {count:,} hosts, and a list of nodes must have at most {MOST:,}")


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
        _limit(part, len(numbers) + int(last or first) - int(first) + 1 if len(first) + len(last) < 40 else MOST + 1)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    _limit(part, len(numbers) * len(after))
    return [before + number + rest for number in numbers for rest in after]
