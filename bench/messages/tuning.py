"""Measure each algorithm of a collective in the groups of a run, and choose, for bench/communication.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist

from megatron.config.arithmetic.algorithm_table import (
    BACKEND,
    MARGIN,
    OPERATIONS,
    OTHER,
    AlgorithmTable,
    best,
    candidates,
)
from megatron.parallel.layout.mesh import Axis
from megatron.parallel.messages.account import Recorder
from megatron.parallel.messages.traffic import Tally
from megatron.parallel.transport.hierarchy import places_by_host
from megatron.parallel.transport.routes import ALL_GATHER, Router, Routes
from megatron.report.communication import readable_bytes, table
from megatron.training.algorithms import job_facts
from megatron.training.world import World

from .collectives import WARM_UP, axes_of, operation_of, sizes, times_of

BURST = 8  # gathers that are asked for one after the other, and then waited for
ROUNDS = 5  # turns of each algorithm, in an order that goes round


@dataclass(frozen=True)
class TuningPoint:
    """One size of an operation in the groups of one form, which all worked at the same time.

    Attributes:
        seconds: of each algorithm, the median over the rounds of the slowest rank's mean.
        crossing: bytes that all ranks together send to other hosts for one operation in every group, by algorithm.
        rounds: seconds of each algorithm in each round.
        link: bytes that the network interfaces of all hosts say they sent for one operation, by algorithm, with what
            the network's protocols add. 0 where ranks talk past them (InfiniBand) or on one machine.
    """

    operation: str
    hosts: int
    ranks: int
    size: int
    seconds: dict[str, float]
    crossing: dict[str, int]
    rounds: dict[str, list[float]]
    link: dict[str, int]

    def ratios(self, algorithm: str) -> list[float]:
        """Seconds of the backend's own algorithm over another's, round by round."""
        return [a / b for a, b in zip(self.rounds[BACKEND], self.rounds[algorithm])]


@dataclass(frozen=True)
class Tuned:
    """Measured points, and the table that follows."""

    points: tuple[TuningPoint, ...]
    table: AlgorithmTable

    def document(self) -> dict[str, Any]:
        """For machine.yml."""
        return {"algorithms": self.table.document()}


def tune(
    world: World,
    hosts: Sequence[Hashable],
    least: int,
    most: int,
    seconds: float,
    others: Sequence[str] = (),
    operations: Sequence[str] = OPERATIONS,
    pairs: Sequence[Hashable] = (),
) -> Tuned:
    """Every algorithm of every operation in every form of group. All ranks call it.

    Args:
        hosts: of each rank, a name.
        seconds: for each algorithm and size, about.
        others: names of further backends to try.
        pairs: of each rank, a name, for algorithms in three levels. May be empty.
    """
    found: dict[tuple[int, int], tuple[str, Axis]] = {}
    for name, axis in axes_of(world).items():
        ranks = axis.ranks if axis.group is not None else ()
        forms = {_form(tuple(each), hosts) for each in world.communicator.gather(list(ranks)) if each}
        for form in forms - {None}:
            if form is not None and len(forms) == 1:
                found.setdefault(form, (name, axis))
    points, joins = [], {}
    choices: dict[tuple[str, int, int], tuple[tuple[int, str], ...]] = {}
    for (over, size), (_, axis) in sorted(found.items()):
        if ALL_GATHER in operations:
            joins[ALL_GATHER, over, size] = _join_below(world, hosts, axis, (over, size), sizes(least, most), seconds)
            choices[ALL_GATHER, over, size] = ((0, BACKEND),)
        for operation in operations:
            names = [*candidates(operation, over, bool(pairs)), *(OTHER + each for each in others)]
            if len(names) == 1:
                continue
            measured = [
                _point(world, hosts, pairs, axis, operation, (over, size), names, each, seconds)
                for each in sizes(least, most)
            ]
            points += measured
            choices[operation, over, size] = best((each.size, each.seconds) for each in measured)
    return Tuned(tuple(points), AlgorithmTable(job_facts(world, list(hosts)), choices, joins))


def _join_below(
    world: World, hosts: Sequence[Hashable], axis: Axis, form: tuple[int, int], tried: Sequence[int], seconds: float
) -> int:
    """The first size at which several gathers are not faster as one, or beyond the last, with all groups at once."""
    ranks, key = axis.size, (ALL_GATHER, *form)
    for size in tried:
        block = torch.ones(max(1, size // (4 * ranks)), device=world.device)
        table = AlgorithmTable({}, {key: ((0, BACKEND),)}, {key: size + 4 * ranks})
        groups = [axis.ranks] if axis.group is not None else []
        router = Router(Routes(table, hosts), groups, world.mesh.rank, world.mesh.timeout)
        once = partial(_burst, axis, block)
        count = _count(world, once, seconds / ROUNDS)
        rounds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(ROUNDS):
            for joined in (turn % 2 == 0, turn % 2 == 1):
                with router.installed() if joined else nullcontext():
                    rounds[joined].append(_slowest(world, sum(times_of(world.device, once, count)) / count))
        if statistics.median(rounds[True]) > (1 - MARGIN) * statistics.median(rounds[False]):
            return size
    return tried[-1] + 1


def _burst(axis: Axis, block: torch.Tensor) -> None:
    if axis.group is None:
        return
    results = [block.new_empty(axis.size * block.numel()) for _ in range(BURST)]
    handles = [dist.all_gather_into_tensor(each, block, group=axis.group, async_op=True) for each in results]
    for handle in handles:
        if handle is not None:
            handle.wait()


def _form(ranks: tuple[int, ...], hosts: Sequence[Hashable]) -> tuple[int, int] | None:
    places = places_by_host(ranks, hosts)
    return (len(places), len(ranks)) if places is not None and len(ranks) > 1 else None


def _point(
    world: World,
    hosts: Sequence[Hashable],
    pairs: Sequence[Hashable],
    axis: Axis,
    operation: str,
    form: tuple[int, int],
    names: Sequence[str],
    size: int,
    seconds: float,
) -> TuningPoint:
    """Algorithms take turns, all groups at the same time."""
    once, actual = operation_of(operation, axis, size, world.device)
    ways = {name: _way(world, hosts, pairs, axis, form, name) for name in names}
    crossing = {}
    for name, way in ways.items():
        with way():
            crossing[name] = _crossing(world, hosts, once)
    count = _count(world, once, seconds / ROUNDS)
    rounds: dict[str, list[float]] = {name: [] for name in names}
    names_of_hosts = world.communicator.gather(gethostname())
    first = names_of_hosts.index(gethostname()) == world.mesh.rank
    sent = dict.fromkeys(names, 0)
    for turn in range(ROUNDS):
        for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
            with ways[name]():
                dist.barrier()
                before = transmitted() if first else 0
                dist.barrier()
                times = times_of(world.device, once, count)
            rounds[name].append(_slowest(world, sum(times) / count))
            if first:
                sent[name] += transmitted() - before
    medians = {name: statistics.median(each) for name, each in rounds.items()}
    every = world.communicator.gather(sent)
    link = {name: sum(each[name] for each in every) // (ROUNDS * count) for name in names}
    return TuningPoint(operation, *form, actual, medians, crossing, rounds, link)


def transmitted() -> int:
    """Bytes that this host's network interfaces have sent so far, but for the one to itself."""
    files = Path("/sys/class/net").glob("*/statistics/tx_bytes")
    return sum(int(each.read_text()) for each in files if each.parts[-3] != "lo")


_routers: dict[tuple[tuple[int, ...], str], Router] = {}


def _way(
    world: World, hosts: Sequence[Hashable], pairs: Sequence[Hashable], axis: Axis, form: tuple[int, int], name: str
) -> Callable[[], AbstractContextManager[None]]:
    """Within it, all operations of an axis go by one algorithm."""
    if name == BACKEND:
        return nullcontext
    key = (axis.ranks, name)
    if key not in _routers:
        known = (each for each in OPERATIONS if name in candidates(each, form[0]) or name.startswith(OTHER))
        always = AlgorithmTable({}, {(each, *form): ((0, name),) for each in known})
        _routers[key] = Router(Routes(always, hosts, pairs), [axis.ranks], world.mesh.rank, world.mesh.timeout)
    return _routers[key].installed


def _crossing(world: World, hosts: Sequence[Hashable], once: Callable[[], None]) -> int:
    """Bytes to other hosts of one operation, over all ranks, by the account. It also warms up."""
    recorder = Recorder(world.mesh, hosts=list(hosts))
    recorder.install()
    try:
        once()
        sent: Tally = recorder.crossing.take()
    finally:
        recorder.remove()
    for _ in range(WARM_UP - 1):
        once()
    return sum(world.communicator.gather(sum(size for _, _, size in sent)))


def _count(world: World, once: Callable[[], None], seconds: float) -> int:
    """How often it can be done in the time, on all ranks the same: from once to 50 times."""
    dist.barrier()
    longest = _slowest(world, sum(times_of(world.device, once, 2)) / 2)
    return int(min(max(seconds / max(longest, 1e-7), 1), 50))


def _slowest(world: World, seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=world.device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def tuned_table(found: Tuned) -> str:
    """Each point: the chosen algorithm, its time and the backend's own, and the bytes to other hosts."""
    facts, rows = found.table.facts, []
    for each in found.points:
        name = found.table.choose(each.operation, each.hosts, each.ranks, each.size)
        ratios = sorted(each.ratios(name))
        rows.append([
            each.operation, f"{each.ranks} on {each.hosts}", readable_bytes(each.size), name,
            *(f"{1e3 * each.seconds[one]:.3f}" for one in (BACKEND, name)),
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            *(readable_bytes(each.crossing[one]) for one in (BACKEND, name)),
            *(readable_bytes(each.link[one]) if each.link[one] else "-" for one in (BACKEND, name)),
        ])  # fmt: skip
    heads = ["operation", "ranks", "S", "chosen", "backend ms", "chosen ms", "times faster", "between hosts", "chosen",
             "interfaces", "chosen"]  # fmt: skip
    joined = [
        f"all_gather of {ranks} ranks on {hosts} hosts: joined below {readable_bytes(below)}"
        for (_, hosts, ranks), below in found.table.joins.items()
    ]
    title = f"{facts['backend']} on {facts['device']}, {facts['ranks']} ranks on {facts['hosts']} hosts"
    return "\n".join([title, table(heads, rows), *joined])


def draw_tuned(path: str | Path, found: Tuned) -> None:
    """Time over size of every algorithm, and below the bytes of all ranks to other hosts, as a PNG.

    The bytes are by the hosts' network interfaces, or by the account where these say nothing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from megatron.report.figures import write_figure

    panels = list(dict.fromkeys((each.operation, each.hosts, each.ranks) for each in found.points))
    figure = Figure(figsize=(4 * len(panels), 6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(panels), squeeze=False)
    for column, (operation, hosts, ranks) in enumerate(panels):
        points = [each for each in found.points if (each.operation, each.hosts, each.ranks) == panels[column]]
        at = [each.size for each in points]
        for name in points[0].seconds:
            times = [1e3 * each.seconds[name] for each in points]
            (line,) = axes[0][column].plot(at, times, marker="o", markersize=3, label=name)
            low, high = ([1e3 * choose(each.rounds[name]) for each in points] for choose in (min, max))
            axes[0][column].fill_between(at, low, high, color=line.get_color(), alpha=0.2)
            linked = all(sum(each.link.values()) for each in found.points)
            seen = [(each.link if linked else each.crossing)[name] / each.size for each in points]
            axes[1][column].plot(at, seen, color=line.get_color())
        axes[0][column].set(title=f"{operation}, {ranks} ranks on {hosts} hosts", xscale="log", yscale="log")
        axes[0][column].set(ylabel="ms" if column == 0 else None)
        axes[1][column].set(xscale="log", xlabel="S, bytes", ylim=0)
        axes[1][column].set(ylabel="bytes between hosts / S" if column == 0 else None)
        for each in axes[:, column]:
            each.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    write_figure(figure, path)
