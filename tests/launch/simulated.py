"""Ranks that run a program of collectives in memory, until no rank can continue: the true cause is known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from megatron.worker.beacon import ranks_text

PHASES = ("forward", "backward", "reduce", "optimizer", "exchange")
KINDS = ("stopped", "loop", "skipped", "shapes", "disk", "deadlock", "read", "cable")
LIMIT = 100.0


@dataclass
class Line:
    """One line of a rank's program: work in a phase, or a collective."""

    phase: str
    step: int
    group: str = ""
    operation: str = "all_reduce"
    elements: int = 64
    stuck: bool = False


@dataclass
class Member:
    lines: list[Line]
    at: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    called: dict[int, list] = field(default_factory=dict)  # by step
    new: bool = False
    inside: bool = False
    since: float = 0.0


@dataclass
class Scene:
    """A fault in a run.

    Attributes:
        told: the report of an agent for each rank.
        guilty: the ranks at fault. One must be named, and no others.
    """

    kind: str
    told: list[dict[str, Any]]
    guilty: set[int]
    hosts: list[str]


def scene(seed: int, kind: str) -> Scene:
    """A run of 4 to 8 ranks that comes to a standstill because of a fault of this kind."""
    draw = random.Random(f"{seed} {kind}")
    tensor, data = draw.choice([(1, 4), (2, 2), (2, 3), (2, 4), (4, 2)])
    ranks = tensor * data
    groups = {"world": list(range(ranks))}
    for index in range(data):
        groups[f"tensor{index}"] = list(range(index * tensor, (index + 1) * tensor))
    for index in range(tensor):
        groups[f"data{index}"] = list(range(index, ranks, tensor))
    guilty, step = draw.randrange(ranks), draw.randrange(1, 3)
    hosts = [f"node{1 + rank // max(tensor, ranks // 2)}" for rank in range(ranks)]
    members = [Member(_program(rank, tensor, steps=4)) for rank in range(ranks)]
    culprits, cut = _inject(draw, kind, members, guilty, step, groups, hosts)
    _run(members, groups, cut)
    told = [_told(rank, each, groups, kind == "stopped" and rank == guilty) for rank, each in enumerate(members)]
    return Scene(kind, told, culprits, hosts)


def _program(rank: int, tensor: int, steps: int) -> list[Line]:
    lines = []
    for step in range(steps):
        lines.append(Line("data", step))
        for phase in ("forward", "backward"):
            lines.append(Line(phase, step))
            lines += [Line(phase, step, f"tensor{rank // tensor}", elements=64 + index) for index in range(2)]
        lines += [Line("reduce", step, f"data{rank % tensor}", elements=500 + index) for index in range(2)]
        lines += [Line("optimizer", step), Line("optimizer", step, f"data{rank % tensor}", "all_gather", 300)]
        lines.append(Line("exchange", step, "world", elements=14))
    return lines


def _inject(draw, kind, members, guilty, step, groups, hosts) -> tuple[set[int], set[int]]:
    """Change the guilty rank's program. Returns who is at fault, and ranks behind a cut cable."""
    lines = members[guilty].lines
    calls = [index for index, line in enumerate(lines) if line.step == step and len(groups.get(line.group, ())) > 1]
    if kind in ("stopped", "loop"):
        index = draw.choice([index for index, line in enumerate(lines) if line.step == step and not line.group])
        lines[index].stuck = True
    elif kind in ("disk", "read"):
        next(line for line in lines if line.step == step and line.phase == "data").stuck = True
    elif kind == "skipped":
        del lines[draw.choice(calls)]
    elif kind == "shapes":
        line = lines[draw.choice([index for index in calls if lines[index].operation == "all_reduce"])]
        line.elements += 1
    elif kind == "deadlock":
        first, second = f"deadlock a{guilty}", f"deadlock b{guilty}"
        other = (guilty + 1) % len(members)
        groups[first] = groups[second] = sorted((guilty, other))
        for rank, order in ((guilty, (first, second)), (other, (second, first))):
            at = next(
                i for i, line in enumerate(members[rank].lines) if line.step == step and line.phase == "optimizer"
            )
            members[rank].lines[at:at] = [Line("optimizer", step, group) for group in order]
        return {guilty, other}, set()
    elif kind == "cable":
        cut = {rank for rank, host in enumerate(hosts) if host == hosts[-1]}
        return set(range(len(members))), cut
    return {guilty}, set()


def _run(members: list[Member], groups: dict[str, list[int]], cut: set[int]) -> None:
    """Until no rank can continue. Members meet in the n-th call of a group. Calls that do not agree, or would have to
    cross a cut cable (from the second step on), never end."""
    moved = True
    while moved:
        moved = False
        for each in members:
            while each.at < len(each.lines):
                line = each.lines[each.at]
                if line.stuck:
                    break
                if line.group:
                    if not each.inside:
                        each.inside, moved = True, True
                        each.calls[line.group] = each.calls.get(line.group, 0) + 1
                        now, before = each.called.setdefault(line.step, []), each.called.get(line.step - 1)
                        now.append((line.group, line.operation, line.elements))
                        each.new = before is not None and before[len(now) - 1 : len(now)] != now[-1:]
                    break
                each.at, moved = each.at + 1, True
        for name, ranks in groups.items():
            here = [members[rank] for rank in ranks]
            lines = [each.lines[each.at] if each.at < len(each.lines) else None for each in here]
            if not all(each.inside and line.group == name for each, line in zip(here, lines) if line) or None in lines:
                continue
            alike = len({(line.operation, line.elements) for line in lines}) == 1
            across = 0 < len(cut & set(ranks)) < len(ranks) and lines[0].step >= 1
            if alike and not across and len({each.calls[name] for each in here}) == 1:
                for each in here:
                    each.inside, each.at, moved = False, each.at + 1, True


def _told(rank: int, member: Member, groups: dict[str, list[int]], stopped: bool) -> dict[str, Any]:
    line = member.lines[min(member.at, len(member.lines) - 1)]
    calls = [
        {
            "key": name,
            "name": name,
            "members": ranks_text(groups[name]),
            "operation": line.operation if member.inside and line.group == name else "all_reduce",
            "elements": line.elements,
            "number": number,
            "peer": -1,
            "new": member.new,
            "inside": member.inside and line.group == name,
            "age": LIMIT + 10,
        }
        for name, number in member.calls.items()
    ]
    place = {"rank": rank, "pid": 1000 + rank, "state": "stopped" if stopped else "waiting", "calls": calls}
    return {**place, "step": line.step, "phase": line.phase, "age": LIMIT + 20, "limit": LIMIT}
