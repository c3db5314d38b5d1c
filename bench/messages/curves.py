"""Measured curves of collectives as a file, a table and a picture, and compared with other programs' figures."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.config.problems import UserError
from megatron.parallel.messages.curve import OPERATIONS, CostCurve
from megatron.parallel.messages.traffic import wire_bytes
from megatron.report.communication import readable_bytes
from megatron.report.communication import table as columns

from .collectives import Measured

PARTS = {"devices", "networks", "measured", "collectives", "algorithms"}  # of a machine.yml
# What "size" is in OSU's tables, as a share of nccl-tests' S in a group of n ranks.
_OSU = {"all_gather": lambda n: n, "all_to_all": lambda n: n}


def present(path: str | Path) -> dict[str, Any]:
    """Content that a machine.yml has so far.

    Raises:
        UserError: there is a file of another kind.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} is there and cannot be read: {error}") from error
    if not isinstance(values, dict) or not set(values) <= PARTS:
        raise UserError(f"{path} exists and is no file of a machine: give another --output")
    return values


def put(path: str | Path, values: Mapping[str, Any]) -> None:
    """Put something into a machine.yml, which appears whole or not at all. Devices are added to the file's devices, and
    each other entry replaces the file's entry."""
    before, path = present(path), Path(path)
    if isinstance(before.get("devices"), dict) and "devices" in values:
        values = {**values, "devices": {**before["devices"], **values["devices"]}}
    text = yaml.safe_dump({**before, **values}, sort_keys=False, default_flow_style=None, width=120)
    beside = path.with_name(path.name + ".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def table(found: Measured) -> str:
    """Every point, and the line through each curve."""
    facts = found.facts
    lines = [
        f"{facts['backend']} on {facts['device']} ({facts['processor']}), torch {facts['torch']}, "
        f"{facts['ranks']} ranks on {facts['hosts']} host{'s' * (facts['hosts'] > 1)}, {facts['date']}",
        "algbw is S / t, busbw as nccl-tests defines it, of medians. t = alpha + S / beta is fitted to the medians",
    ]
    rows, fits = [], []
    for curve in found.curves:
        which = f"{curve.group} x{curve.together}"
        for size, low, median, high in curve.points:
            rate = size / median / 1e9
            bus = rate * wire_bytes(curve.operation, curve.ranks, 1)
            times = [f"{1e6 * each:.1f}" for each in (low, median, high)]
            rows.append([
                curve.operation,
                which,
                curve.ranks,
                readable_bytes(size),
                *times,
                f"{rate:.3f}",
                f"{bus:.3f}",
            ])
        alpha, beta = curve.fit()
        speed = "-" if math.isinf(beta) else f"{beta / 1e9:.3f}"
        fits.append([curve.operation, which, curve.ranks, f"{1e6 * alpha:.1f}", speed])
    heads = ["operation", "groups", "ranks", "S", "p10 us", "median us", "p90 us", "algbw GB/s", "busbw GB/s"]
    fitted = columns(["operation", "groups", "ranks", "alpha us", "beta GB/s"], fits)
    return "\n".join([*lines, columns(heads, rows), "", fitted])


def draw(path: str | Path, found: Measured) -> None:
    """Bus bandwidth over size, a panel for each operation, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from megatron.report.figures import write_figure

    names = list(dict.fromkeys(curve.operation for curve in found.curves))
    wide = min(3, len(names))
    high = -(-len(names) // wide)
    figure = Figure(figsize=(5 * wide, 3.6 * high), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(high, wide, squeeze=False).flatten()
    for axes, name in zip(panels, names):
        for place, curve in enumerate(each for each in found.curves if each.operation == name):
            factor = wire_bytes(name, curve.ranks, 1) / 1e9
            at = [size for size, *_ in curve.points]
            low, middle, high_ = (
                [factor * size / point[n] for size, point in zip(at, curve.points)] for n in (3, 2, 1)
            )
            label = f"{curve.group}, {curve.ranks} ranks, {curve.together} at once"
            axes.plot(at, middle, marker="o", markersize=3, color=f"C{place}", label=label)
            axes.fill_between(at, low, high_, color=f"C{place}", alpha=0.2)
        axes.set(title=name, xscale="log", yscale="log", xlabel="S, bytes", ylabel="bus bandwidth, GB/s")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    facts = found.facts
    figure.suptitle(f"{facts['backend']} on {facts['processor'] if facts['device'] == 'cpu' else facts['device']}")
    write_figure(figure, path)


def foreign(text: str, operation: str, ranks: int) -> list[tuple[int, float]]:
    """(S, seconds) from the output of nccl-tests (out of place) or of the OSU micro-benchmarks.

    Raises:
        ValueError: it is neither.
    """
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d", line)]
    if "algbw" in text:  # size count type redop root time algbw busbw #wrong ..., where size is S, time in microseconds
        types = ("float", "double", "half", "bfloat16", "int8", "uint8", "int32", "uint32", "int64", "uint64", "fp8")
        found = [(int(row[0]), float(row[5]) * 1e-6) for row in rows if len(row) > 6 and row[2].startswith(types)]
    elif "OSU" in text and "Latency" in text:
        factor = _OSU.get(operation, lambda n: 1)(ranks)
        found = [(int(row[0]) * factor, float(row[1]) * 1e-6) for row in rows if len(row) >= 2]
    else:
        raise ValueError("it must be the output of nccl-tests (with algbw) or of an OSU latency benchmark")
    found = [(size, seconds) for size, seconds in found if size > 0 and seconds > 0]
    if not found:
        raise ValueError("it has no line with a size and a time")
    return found


def compared(curves: Sequence[CostCurve], word: str) -> dict[str, Any]:
    """`OPERATION=FILE`: another program's times, and the largest group's curve of this operation.

    Raises:
        UserError: the file or the operation is unknown.
    """
    operation, _, path = word.partition("=")
    own = [each for each in curves if each.operation == operation]
    if operation not in OPERATIONS or not own or not path:
        raise UserError(f"--compare must be OPERATION=FILE with a measured operation, not {word!r}")
    curve = max(own, key=lambda each: (each.ranks, -each.together))
    try:
        theirs = foreign(Path(path).read_text(encoding="utf-8"), operation, curve.ranks)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error
    low, high = curve.points[0][0], curve.points[-1][0]
    rows = [
        {"bytes": size, "seconds": curve.seconds(size), "theirs": seconds, "ratio": curve.seconds(size) / seconds}
        for size, seconds in theirs
        if low <= size <= high
    ]
    lines = [
        [
            readable_bytes(each["bytes"]),
            f"{1e6 * each['seconds']:.1f}",
            f"{1e6 * each['theirs']:.1f}",
            f"{each['ratio']:.2f}",
        ]
        for each in rows
    ]
    title = f"{operation} in {curve.group}, {curve.ranks} ranks, compared with {path}"
    text = f"{title}\n{columns(['S', 'us', 'theirs us', 'ratio'], lines)}" if lines else f"{title}: no size in common"
    return {"operation": operation, "group": curve.group, "ranks": curve.ranks, "rows": rows, "text": text}
