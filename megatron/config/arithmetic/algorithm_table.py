"""Which algorithm a collective uses, by operation, the hosts of its group and its size: `algorithms` of a machine.yml.

No torch. Sizes are nccl-tests' S."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..problems import counted

BACKEND = "backend"  # what the group does without a table
OTHER = "backend:"  # and the name of another backend
TWO_LEVEL, RING, RECURSIVE = "two_level", "two_level_ring", "two_level_recursive"
DOUBLING = "two_level_doubling"  # of all-reduces only
LEVELS = (TWO_LEVEL, RING, RECURSIVE, DOUBLING)
# Among pairs first, and then the second name among the others.
THREE = {f"three{name.removeprefix('two')}": name for name in LEVELS}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MARGIN = 0.05  # of the time, by which another way must be faster than the backend's own
JOINED = ("all_gather",)  # whose small messages may be joined
FACTS = ("ranks", "hosts", "backend", "device")


def candidates(operation: str, hosts: int, pairs: bool = True) -> tuple[str, ...]:
    """The algorithms for groups over a number of hosts, the backend's own first.

    Args:
        pairs: whether a host has several pairs of ranks.
    """
    if hosts == 1:
        return (BACKEND,)
    two: tuple[str, ...] = (TWO_LEVEL,)
    if operation != "all_to_all":
        two = (TWO_LEVEL, RING) + ((RECURSIVE,) if hosts & (hosts - 1) == 0 else ())
        two += (DOUBLING,) if operation == "all_reduce" else ()
    return (BACKEND, *two) + (tuple(name for name, base in THREE.items() if base in two) if pairs else ())


@dataclass(frozen=True)
class AlgorithmTable:
    """Choices for one machine and one number of ranks.

    Attributes:
        facts: what it was made on: ranks and hosts of the job, backend, device.
        choices: (operation, hosts, ranks of a group) -> [(bytes, algorithm from that size on)], by rising size.
        joins: the same -> bytes below which asynchronous messages are joined.
    """

    facts: Mapping[str, Any]
    choices: Mapping[tuple[str, int, int], tuple[tuple[int, str], ...]] = field(default_factory=dict)
    joins: Mapping[tuple[str, int, int], int] = field(default_factory=dict)

    def choose(self, operation: str, hosts: int, ranks: int, size: int) -> str:
        """The algorithm of a call of `size` bytes."""
        steps = self.choices.get((operation, hosts, ranks), ())
        at = bisect_right(steps, size, key=lambda step: step[0])
        return steps[at - 1][1] if at else BACKEND

    @property
    def needs_pairs(self) -> bool:
        """Whether it may choose an algorithm in three levels."""
        return any(name in THREE for steps in self.choices.values() for _, name in steps)

    def algorithms(self, hosts: int, ranks: int) -> frozenset[str]:
        """All that it may choose in groups of this form."""
        found = (steps for (_, *form), steps in self.choices.items() if form == [hosts, ranks])
        return frozenset(name for steps in found for _, name in steps) - {BACKEND}

    def document(self) -> dict[str, Any]:
        """For machine.yml."""
        rows = [
            {"operation": operation, "hosts": hosts, "ranks": ranks, "choices": [list(step) for step in steps]}
            | ({"join_below": below} if (below := self.joins.get((operation, hosts, ranks))) else {})
            for (operation, hosts, ranks), steps in self.choices.items()
        ]
        return {**self.facts, "table": rows}

    @classmethod
    def of(cls, document: Any) -> "AlgorithmTable":
        """What `document` gave.

        Raises:
            ValueError: it is none of these. The message has the rule.
        """
        if not isinstance(document, dict) or not isinstance(document.get("table"), list):
            raise ValueError("algorithms must have a table, as bench/communication.py --tune writes it")
        facts: dict[str, Any] = {name: document.get(name) for name in FACTS}
        if not all(type(facts[name]) is int and 0 < facts[name] <= 10**6 for name in ("ranks", "hosts")):
            raise ValueError("algorithms must have the ranks and hosts of the job as whole numbers")
        if not all(isinstance(facts[name], str) for name in ("backend", "device")):
            raise ValueError("algorithms must have the names of the backend and the device")
        rows = dict(map(_row, document["table"]))
        joins = {key: below for key, each in zip(rows, document["table"]) if (below := _join(each))}
        return cls(facts, rows, joins)

    def differs(self, facts: Mapping[str, Any]) -> list[str]:
        """The known facts in which a job differs from the job of the table, as sentences."""
        names = {"ranks": "ranks", "hosts": "hosts", "backend": "the backend", "device": "the device"}
        return [
            f"{names[name]}: {self.facts[name]} in the table, {facts[name]} in this job"
            for name in FACTS
            if name in facts and facts[name] != self.facts[name]
        ]


def _row(row: Any) -> tuple[tuple[str, int, int], tuple[tuple[int, str], ...]]:
    if not isinstance(row, dict):
        raise ValueError("each entry of a table must have operation, hosts, ranks and choices")
    operation, hosts, ranks, steps = (row.get(name) for name in ("operation", "hosts", "ranks", "choices"))
    if operation not in OPERATIONS:
        raise ValueError(f"operation must be one of {', '.join(OPERATIONS)}, not {operation!r}")
    if type(hosts) is not int or type(ranks) is not int or not 1 <= hosts <= ranks or ranks % hosts:
        raise ValueError(f"ranks of a group must be a multiple of its hosts, and whole numbers: {ranks!r} on {hosts!r}")
    if not isinstance(steps, list) or not steps:
        raise ValueError(f"choices of {operation} must be a list of [bytes, algorithm]")
    for step in steps:
        if not (isinstance(step, list) and len(step) == 2 and type(step[0]) is int and step[0] >= 0):
            raise ValueError(f"a choice must be [bytes, algorithm]: {step!r}")
        known = candidates(operation, hosts)
        other = isinstance(step[1], str) and step[1].startswith(OTHER) and step[1].removeprefix(OTHER).isalnum()
        if step[1] not in known and not other:
            raise ValueError(
                f"an algorithm of {operation} over {counted(hosts, 'host')} must be one of "
                f"{', '.join(known)} or backend:NAME, not {step[1]!r}"
            )
    if any(a[0] >= b[0] for a, b in zip(steps, steps[1:])):
        raise ValueError(f"choices of {operation} must be in the order of their bytes")
    return (operation, hosts, ranks), tuple((size, name) for size, name in steps)


def _join(row: Mapping[str, Any]) -> int:
    """Size below which messages are joined, or 0."""
    below = row.get("join_below", 0)
    if type(below) is not int or below < 0:
        raise ValueError(f"join_below must be a number of bytes, not {below!r}")
    if below and row["operation"] not in JOINED:
        raise ValueError(f"join_below must be of {', '.join(JOINED)}, not of {row['operation']}")
    return below


def read_table(path: str | Path) -> AlgorithmTable:
    """The algorithms of a machine.yml.

    Raises:
        OSError: it cannot be read.
        ValueError: it has none, or they are damaged.
    """
    try:
        return table_of(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def table_of(text: str) -> AlgorithmTable:
    """The algorithms in the text of a machine.yml.

    Raises:
        ValueError: it has none, or they are damaged.
    """
    try:
        values = yaml.safe_load(text)
    except (RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"it must be YAML: {error}") from error
    found = values.get("algorithms") if isinstance(values, dict) else None
    if found is None:
        raise ValueError("it must have `algorithms`, as bench/communication.py --tune writes them")
    return AlgorithmTable.of(found)


def best(points: Iterable[tuple[int, Mapping[str, float]]], margin: float = MARGIN) -> tuple[tuple[int, str], ...]:
    """The fastest algorithm at each size, by measured seconds: the backend's own, unless another takes less by the
    share `margin`. A choice holds from its size to the next one's, and the first also below."""
    steps: list[tuple[int, str]] = []
    for size, seconds in sorted(points, key=lambda point: point[0]):
        name = min(seconds, key=seconds.__getitem__)
        if seconds[name] > (1 - margin) * seconds[BACKEND]:
            name = BACKEND
        if not steps or steps[-1][1] != name:
            steps.append((size if steps else 0, name))
    return tuple(steps)
