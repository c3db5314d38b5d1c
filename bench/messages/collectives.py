"""Measure collectives in the groups of a run, for bench/communication.py."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.layout.layout import AXES
from megatron.parallel.layout.mesh import Axis
from megatron.parallel.messages.curve import CostCurve
from megatron.training.algorithms import processor
from megatron.training.world import World

WARM_UP, FEWEST, MOST = 3, 8, 200  # operations of a point
GROWTH = 4  # of a size to the next


@dataclass(frozen=True)
class Measured:
    """What was found.

    Attributes:
        facts: of the machine: device, processor, backend, torch, hosts, ranks, layout, date.
    """

    facts: dict[str, Any]
    curves: tuple[CostCurve, ...]

    def document(self) -> dict[str, Any]:
        """For machine.yml."""
        return {"measured": self.facts, "collectives": [curve.document() for curve in self.curves]}


def sizes(least: int, most: int) -> list[int]:
    """From the one to the other."""
    found = [least]
    while found[-1] * GROWTH <= most:
        found.append(found[-1] * GROWTH)
    return found


def measure(world: World, operations: Sequence[str], least: int, most: int, seconds: float) -> Measured:
    """Measure every operation in every group, by itself and with the other groups of its axis. All ranks call it."""
    hosts = world.communicator.gather(socket.gethostname())
    curves = []
    for name, axis in axes_of(world).items():
        ranks = axis.ranks if axis.group is not None else ()
        groups = sorted(set(map(tuple, world.communicator.gather(list(ranks)))) - {()})
        for chosen in [groups[:1], groups] if len(groups) > 1 else [groups]:
            for operation in operations:
                points = []
                for size in sizes(least, most):
                    own = None
                    if tuple(ranks) in chosen:
                        own = point(operation, axis, size, seconds, world.device)
                    found = [
                        (tuple(key), times) for key, times in world.communicator.gather([list(ranks), own]) if times
                    ]
                    points.append(slowest(found))
                spread = max(len({hosts[rank] for rank in group}) for group in chosen)
                members = len(chosen[0])
                place = (2, len(chosen) * (members // 2)) if operation == "send" else (members, len(chosen))
                curves.append(CostCurve(operation, name, place[0], spread, place[1], tuple(points)))
    return Measured(_facts(world, len(set(hosts))), tuple(curves))


def axes_of(world: World) -> dict[str, Axis]:
    """The groups of this run: one of all ranks, and those along each axis with several ranks. Each set has one name."""
    mesh, layout = world.mesh, world.mesh.layout
    found = {name: getattr(mesh, name) for name in (*AXES, "replicas", "expert", "expert_data")}
    present = {
        name: world.communicator.gather(list(axis.ranks if axis.group is not None else ()))
        for name, axis in found.items()
    }
    kept: dict[str, Axis] = {}
    known: list[list[list[int]]] = []
    for name, groups in present.items():
        if any(groups) and groups not in known:
            known.append(groups)
            kept[name] = found[name]
    everyone = list(range(layout.world_size))
    if [everyone] * layout.world_size not in known:
        kept["world"] = Axis(mesh.rank, layout.world_size, dist.group.WORLD, tuple(everyone))
    return kept


def point(operation: str, axis: Axis, size: int, seconds: float, device: torch.device) -> list[tuple[int, float]]:
    """[(bytes, seconds of an operation)] of this rank. All ranks of the group call it."""
    assert axis.group is not None
    run, actual = operation_of(operation, axis, size, device)
    for _ in range(WARM_UP):
        run()
    dist.barrier(axis.group)
    first = times_of(device, run, FEWEST)
    count = torch.tensor([seconds / max(sorted(first)[FEWEST // 2], 1e-7)], device=device)
    dist.all_reduce(count, dist.ReduceOp.MIN, axis.group)
    more = int(min(max(count.item() - FEWEST, 0), MOST))
    dist.barrier(axis.group)
    times = times_of(device, run, more) if more >= FEWEST else first
    return [(actual, each) for each in times]


def operation_of(operation: str, axis: Axis, size: int, device: torch.device) -> tuple[Callable[[], None], int]:
    """A function that does it once in bytes of nccl-tests' S (rounded so that ranks share evenly), and the bytes.

    A `send` goes to and fro between neighbours, each in its direction at the same time. Its time is of one way.
    """
    n, group, rank = axis.size, axis.group, axis.rank
    elements = max(1, -(-size // (4 * n))) * n
    if operation in ("all_reduce", "broadcast", "send"):
        elements = max(1, size // 4)
    whole = torch.ones(elements, device=device)
    part = torch.ones(elements // n, device=device)
    other = torch.empty_like(whole)

    def send() -> None:
        # Neighbours in pairs. In a group of odd size the last rank sends nothing.
        peer = rank ^ 1
        if peer < n:
            for sends in (rank < peer, rank > peer):
                if sends:
                    dist.send(whole, group=group, group_dst=peer)
                else:
                    dist.recv(other, group=group, group_src=peer)

    runs: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, group=group, group_src=0),
        "send": send,
    }
    return runs[operation], elements * 4


def times_of(device: torch.device, run: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each of many operations, by events on a device without waiting for any, or else by the clock."""
    if device.type == "cpu":
        marks = [time.perf_counter()]
        for _ in range(count):
            run()
            marks.append(time.perf_counter())
        return [b - a for a, b in zip(marks, marks[1:])]
    module = torch.get_device_module(device)
    events = [module.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    module.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:])]


def slowest(found: Sequence[tuple[tuple[int, ...], list[list[float]]]]) -> tuple[int, float, float, float]:
    """A point from each rank's times: the mean over a group's ranks of the n-th operation. Of several groups it is the
    one with the longest median."""
    groups: dict[tuple[int, ...], list[list[list[float]]]] = {}
    for key, times in found:
        groups.setdefault(key, []).append(times)
    best = None
    for members in groups.values():
        means = sorted(sum(each[1] for each in together) / len(together) for together in zip(*members))
        at = [means[min(len(means) - 1, int(share * len(means)))] for share in (0.1, 0.5, 0.9)]
        if best is None or at[1] > best[2]:
            best = (int(members[0][0][0]), *at)
    assert best is not None
    return best


def _facts(world: World, hosts: int) -> dict[str, Any]:
    device = world.device
    name = torch.get_device_module(device).get_device_name(device) if device.type != "cpu" else "cpu"
    return {
        "device": name,
        "processor": processor(),
        "backend": dist.get_backend(),
        "torch": str(torch.__version__),
        "hosts": hosts,
        "ranks": world.mesh.layout.world_size,
        "layout": {axis: size for axis in (*AXES, "expert") if (size := getattr(world.mesh.layout, axis)) != 1},
        "date": date.today().isoformat(),
    }
