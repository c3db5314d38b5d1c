"""Compare predicted with measured memory (--times: time) of small runs on CPU.

The runs cover all architectures and layouts.

    python -m bench plan-table [--cases 48] [--json FILE] [--markdown FILE]
    python -m bench plan-table --times --json FILE [--clock cpu] [--machine machine.yml --device mine]

The runs are of tests/layouts.yml, chosen so that each architecture and each layout is among them. Measured memory is
the bytes of all tensors that live at the fullest moment, counted on real gloo ranks, of the rank that has most. It is
compared with a rehearsal of a rank of each kind and of the last one, and with the plan's formulas. Bytes do not depend
on other work of the machine.

Times do, and the runs need a core for each rank. Take them on a quiet machine, with figures of that machine
(bench/plan/machine.py), or by --clock cpu (bench/plan/step_times.py). They are taken in rounds, which take every run
once. `rehearsed` is by the operations and messages that rehearsals count, where the device has figures of its host.
`planned` is of only the formulas. `corrected` uses the errors of the table's other runs, as predictions of a user's
later runs do.

With --json rows or rounds are written as they are made. Rows of the same device and --steps in the file are kept, so a
table can be stopped and continued. No run is begun after --minutes. The exit status is 1 if a run that was asked for
has no row, since it failed or was not begun. It is 2 if none has.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from bench.plan.step_times import Rounds, round_of, seconds, spread
from bench.runner import Result, grid, share
from megatron.config import Config, resolve
from megatron.config.optimizer_kind import kinds_inside
from megatron.parallel.layout.layout import Layout
from megatron.plan.devices import Cluster, Device, known_devices
from megatron.plan.memory import memory
from megatron.plan.prediction import HistoryEntry, Need, choice_of, correction, kinds_of_layers
from megatron.plan.shapes import Shapes
from megatron.plan.step import StepEstimator
from megatron.rehearsal.command import in_own_process
from megatron.rehearsal.rank import RankCounts, enough_micro_batches, observe, with_micro_batches
from megatron.rehearsal.report import kinds_of_ranks, step_seconds, works
from megatron.testing.ranks import on_ranks
from tests.training.matrix import Case, merged
from tests.training.matrix import cases as every_case

SMALL = {"zero": {"bucket_size": 2000}}  # DeepSpeed's buckets would be larger than all else in models of this size
LONGER = {"training": {"sequence_length": 128, "steps": 64}}  # for times: steps that are more than their fixed costs


def begun(path: Path | None, times: bool) -> set[str]:
    """Names of the runs that a file of rows or rounds has."""
    if path is None or not path.exists():
        return set()
    found = json.loads(path.read_text(encoding="utf-8"))
    return set(found) if times else {row["run"] for row in found}


def chosen(number: int, most: int, first: Collection[str] = ()) -> list[Case]:
    """Runs of at most this number of ranks. First come the runs of a table that was begun. Then come all architectures,
    each on a layout that few others have so far, and then layouts that none has. Optimizers that read whole matrices
    are excluded: they are not rehearsed."""
    taken = list[Case]()
    refused = [name for name, kind in kinds_inside().items() if kind.whole_matrices]
    left = [each for each in every_case() if each.ranks <= most and each.values["optimizer"]["type"] not in refused]
    layouts: Counter[str] = Counter()

    def take(case: Case) -> None:
        left.remove(case)
        taken.append(case)
        layouts[case.layout] += 1

    for case in [each for each in left if each.name in first]:
        take(case)
    there = {each.architecture for each in taken}
    for architecture in dict.fromkeys(each.architecture for each in left if each.architecture not in there):
        own = [each for each in left if each.architecture == architecture]
        take(min(own, key=lambda each: layouts[each.layout]))
    while left and len(taken) < number:
        take(min(left, key=lambda each: layouts[each.layout]))
    return taken


def planned(config: Config, ranks: int, at: Cluster) -> tuple[float | None, float | None]:
    """Bytes of tensors and seconds of a step by the plan's formulas, or None where they do not cover the layout."""
    if config.parallel.expert_tensor not in (None, config.parallel.tensor):
        return None, None
    shapes, choice = Shapes(config, ranks), choice_of(config)
    found = memory(config, shapes, choice, at)
    tensors = sum(size for name, size in found.parts.items() if name not in ("runtime", "fragments"))
    return tensors, StepEstimator(config, shapes, at).step(config, choice).seconds


def counted(values: dict[str, Any], ranks: int) -> RankCounts:
    """On gloo ranks: what a real engine's steps are counted to take."""
    import torch

    from megatron.data.loader import build_loader
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.parallel.layout.mesh import Mesh

    config = resolve(values, ranks=ranks)
    layout = Layout.of(config, ranks)
    config = with_micro_batches(config, layout, enough_micro_batches(config, layout))
    mesh = Mesh.build(layout)
    prepare_deepspeed(torch.device("cpu"))
    loader = build_loader(config, data_rank=mesh.data.rank, data_ranks=mesh.data.size)
    try:
        # torch's attention, as rehearsals have it: they are of GPUs, and tiles of 16 bits are for CPUs
        with mock.patch("megatron.kinds.common.attention.attend.TILED", 0):
            return observe(config, mesh, loader.step)
    finally:
        loader.close()


def memory_row(case: Case, at: Callable[[int], Cluster]) -> dict[str, Any]:
    """Measured, rehearsed and planned bytes of a run."""
    values = merged(case.values, SMALL)
    config = resolve(values, ranks=case.ranks)
    measured = max(each.peak for each in on_ranks(case.ranks, counted, values, case.ranks))
    kinds = {*kinds_of_ranks(config, Layout.of(config, case.ranks)), case.ranks - 1}
    rehearsed = max(in_own_process(config, case.ranks, rank).peak for rank in kinds)
    return {"measured": measured, "rehearsed": rehearsed, "planned": planned(config, case.ranks, at(case.ranks))[0]}


def entry(case: Case, at: Callable[[int], Cluster], measured: float) -> HistoryEntry | None:
    """A run as a user's history has it, with only its time, or None where formulas do not cover it."""
    config = resolve(merged(case.values, LONGER), ranks=case.ranks)
    told = planned(config, case.ranks, at(case.ranks))[1]
    if told is None:
        return None
    alike = ("cpu", config.precision.compute, kinds_of_layers(config), case.ranks)
    return HistoryEntry(*alike, str(choice_of(config)), Need(told, 1.0), Need(measured, 1.0))


def rehearsed_time(case: Case, device: Device) -> float | None:
    """Seconds of a step by a rehearsal, or None without figures of the host."""
    if device.host is None:
        return None
    config, ranks = resolve(merged(case.values, LONGER), ranks=case.ranks), case.ranks
    kinds = kinds_of_ranks(config, Layout.of(config, ranks))
    seen = {rank: in_own_process(config, ranks, rank) for rank in kinds}
    return step_seconds(config, ranks, works(config, ranks, seen), device)


def time_rows(
    cases: Sequence[Case], at: Callable[[int], Cluster], rounds: Rounds, number: int, clock: str
) -> list[dict[str, Any]]:
    """Measured, planned and corrected seconds of a step, of the runs that have all rounds."""
    entries: dict[str, tuple[Case, float, HistoryEntry | None]] = {}
    for case in cases:
        if taken := rounds.whole(case.name, number):
            measured = seconds(taken, clock)
            entries[case.name] = case, measured, entry(case, at, measured)
    rows = []
    for name, (case, measured, own) in entries.items():
        row = {"run": name, "ranks": case.ranks, "measured": measured, "planned": None, "corrected": None}
        if own is not None:
            others = [each for other, (_, _, each) in entries.items() if each is not None and other != name]
            factor, _ = correction(others, own)
            row |= {"planned": own.predicted.seconds, "corrected": own.predicted.seconds * factor.seconds}
        row["rehearsed"] = rehearsed_time(case, at(case.ranks).device)
        rows.append({**row, "spread": spread(rounds.whole(name, number), clock)})
    return rows


def markdown(rows: Sequence[dict[str, Any]], times: bool) -> str:
    """The table, and the errors in one line."""
    unit, size = ("ms", 1e-3) if times else ("KiB", 1024.0)
    columns = ["rehearsed", "planned", "corrected"] if times else ["rehearsed", "planned"]
    head = ["run", "ranks", f"measured, {unit}", *(word for each in columns for word in (each, "error"))]
    cells = [head]
    for row in rows:
        cells.append([row["run"], str(row["ranks"]), f"{row['measured'] / size:,.1f}"])
        for each in columns:
            told = row[each]
            cells[-1] += ["", ""] if told is None else [f"{told / size:,.1f}", f"{told / row['measured'] - 1:+.1%}"]
    lines = [grid(cells)]
    for each in columns:
        errors = [abs(row[each] / row["measured"] - 1) for row in rows if row[each] is not None]
        if errors:
            lines.append(f"\n{each}: {len(errors)} runs, median error {median(errors):.1%}, largest {max(errors):.1%}")
    return "\n".join(lines)


def kept(path: Path | None) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows that an earlier start has made, by run and by what they measure."""
    if path is None or not path.exists():
        return {}
    return {(row["run"], row["what"]): row for row in json.loads(path.read_text(encoding="utf-8"))}


def memory_of(
    cases: Sequence[Case], at: Callable[[int], Cluster], options: argparse.Namespace, until: float
) -> list[dict[str, Any]]:
    """Rows of memory, made until a time."""
    done, rows = kept(options.json), []
    for case in cases:
        row, settings = done.get((case.name, "bytes")), {"device": at(case.ranks).device.model_dump()}
        if row is not None and row.get("settings") != settings:
            row = None
        if row is None and time.monotonic() < until:
            row = {"run": case.name, "ranks": case.ranks, "what": "bytes", "settings": settings}
            row |= memory_row(case, at)
            done[case.name, "bytes"] = row
            print(row, file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps([*done.values()], indent=1) + "\n", encoding="utf-8")
        if row is not None:
            rows.append(row)
    return rows


def times_of(
    cases: Sequence[Case], at: Callable[[int], Cluster], options: argparse.Namespace, until: float
) -> list[dict[str, Any]]:
    """Rows of times, of rounds taken until a time."""
    rounds, by_name = Rounds(options.json, until), {case.name: case for case in cases}

    def measure(name: str) -> dict[str, float]:
        case = by_name[name]
        return round_of(resolve(merged(case.values, LONGER), ranks=case.ranks), case.ranks, options.steps)

    settings = {name: {"ranks": case.ranks, "steps": options.steps, **LONGER} for name, case in by_name.items()}
    rounds.take(settings, measure, options.rounds)
    return time_rows(cases, at, rounds, options.rounds, options.clock)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=48, help="runs, at least the number of architectures and layouts")
    parser.add_argument("--only", default="", help="runs whose names have this word")
    parser.add_argument("--times", action="store_true", help="times of steps instead of memory")
    parser.add_argument("--steps", type=int, default=8, help="of a run in a round, after the first ones (default: 8)")
    share(parser, "--rounds", "--clock", "--machine", rounds=3)
    parser.add_argument("--device", default="cpu", help="whose figures the times are predicted with")
    parser.add_argument("--minutes", type=float, default=120.0, help="no run is begun after them (default: 120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows as they are made. Rows in it are kept")
    parser.add_argument("--markdown", type=Path, metavar="FILE")


def measure(given: argparse.Namespace) -> Result | int:
    """Make rows and write them."""
    device = known_devices(given.machine)[0][given.device]

    def at(ranks: int) -> Cluster:
        return Cluster(device, known_devices()[1]["ib400"], ranks, ranks)

    until = time.monotonic() + 60 * given.minutes
    # Ranks that share a core wait for each other's work, which no formula knows.
    most = len(os.sched_getaffinity(0)) if given.times else 2**20
    first = begun(given.json, given.times)
    cases = [each for each in chosen(given.cases, most, first) if given.only in each.name]
    rows = (times_of if given.times else memory_of)(cases, at, given, until)
    if not rows:
        print("no run was begun: give more --minutes, or another --only", file=sys.stderr)
        return 2
    text = markdown(rows, given.times)
    if given.markdown:
        given.markdown.write_text(text + "\n", encoding="utf-8")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"processor time: {sum(each.ru_utime + each.ru_stime for each in used):.0f} s", file=sys.stderr)
    missing = sorted({each.name for each in cases} - {row["run"] for row in rows})
    if missing:
        print(f"{len(missing)} of {len(cases)} runs have no row: {'; '.join(missing)}", file=sys.stderr)
    return Result(rows, text, int(bool(missing)))
