"""Measured times of collectives on a machine: the `collectives` of a machine.yml. No torch.

Sizes are nccl-tests' S. `algorithm bandwidth` is S over the time. `bus bandwidth` is the same times the operation's
factor (PERFORMANCE.md of nccl-tests), which is comparable with the speed of a link."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .traffic import wire_bytes

POINT = ("bytes", "p10", "median", "p90")  # bytes, and seconds that 10, 50 and 90 % of the operations took
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True)
class CostCurve:
    """One operation in groups of one kind."""

    operation: str  # as in `traffic.Call`
    group: str  # the axis whose groups were measured
    ranks: int  # of a group
    hosts: int  # number of hosts of a group
    together: int  # number of groups (of a send, pairs) that worked at the same time
    points: tuple[tuple[int, float, float, float], ...]  # as `POINT`, by rising size

    def seconds(self, size: float) -> float:
        """Seconds of one operation of `size` bytes.

        Between points the logarithm of the time is linear in that of the size. Below the first point the time is its
        time. Above the last one the bandwidth is that of the last two points, or of the last where times fall."""
        sizes = [point[0] for point in self.points]
        if size <= sizes[0]:
            return self.points[0][2]
        at = bisect_right(sizes, size)
        if at == len(sizes):
            (large, last), before = (self.points[-1][0], self.points[-1][2]), self.points[-2:]
            slope = (last - before[0][2]) / (large - before[0][0]) if len(before) == 2 else 0.0
            return last + (size - large) * max(slope, last / large / 2)
        (x0, _, y0, _), (x1, _, y1, _) = self.points[at - 1], self.points[at]
        share = math.log(size / x0) / math.log(x1 / x0)
        return math.exp(math.log(y0) + share * math.log(y1 / y0))

    def bus_bandwidth(self, size: float) -> float:
        """Bytes per second."""
        return wire_bytes(self.operation, self.ranks, 1) * size / self.seconds(size)

    def fit(self) -> tuple[float, float]:
        """(α seconds, β bytes per second) of the line α + S / β through the medians. See `line`."""
        return line([(size, median) for size, _, median, _ in self.points])

    def document(self) -> dict[str, Any]:
        """For machine.yml."""
        alpha, beta = self.fit()
        facts = {name: getattr(self, name) for name in ("operation", "group", "ranks", "hosts", "together")}
        return facts | {
            "alpha": float(f"{alpha:.6g}"),
            "beta": None if math.isinf(beta) else float(f"{beta:.6g}"),
            "points": [[size, *(float(f"{each:.4g}") for each in times)] for size, *times in self.points],
        }

    @classmethod
    def of(cls, document: Any) -> "CostCurve":
        """Read a `document`.

        Raises:
            ValueError: it is damaged. The message has the rule.
        """
        if not isinstance(document, dict):
            raise ValueError("a measured collective must have an operation, a group, ranks, hosts, together and points")
        operation, group = document.get("operation"), document.get("group")
        if operation not in OPERATIONS or not isinstance(group, str):
            raise ValueError(f"operation must be one of {', '.join(OPERATIONS)}, and group a name: {operation!r}")
        counts: dict[str, Any] = {name: document.get(name) for name in ("ranks", "hosts", "together")}
        if not all(type(each) is int and 0 < each <= 10**6 for each in counts.values()) or counts["ranks"] == 1:
            raise ValueError("ranks (at least 2), hosts and together must be whole numbers")
        points = document.get("points")
        if not isinstance(points, list) or not points:
            raise ValueError("points must be a list of [bytes, p10, median, p90]")
        for point in points:
            right = isinstance(point, list) and len(point) == len(POINT) and type(point[0]) is int
            if not right or not all(type(each) in (int, float) and 0 < each < 1e15 for each in point):
                raise ValueError(f"a point must be [bytes, p10, median, p90] with positive numbers: {point!r}")
        sizes = [point[0] for point in points]
        if any(a >= b for a, b in zip(sizes, sizes[1:])):
            raise ValueError("points must be in the order of their bytes")
        times = tuple((size, float(low), float(median), float(high)) for size, low, median, high in points)
        return cls(operation, group, points=times, **counts)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(α, β) of t = α + S / β through (S, t), by the least squares of (α + S / β - t) / t. Neither is negative."""
    w = [1 / (t * t) for _, t in points]
    sw, sx = sum(w), sum(a * s for a, (s, _) in zip(w, points))
    sy, sxx = sum(a * t for a, (_, t) in zip(w, points)), sum(a * s * s for a, (s, _) in zip(w, points))
    sxy = sum(a * s * t for a, (s, t) in zip(w, points))
    determinant = sw * sxx - sx * sx
    slope = (sw * sxy - sx * sy) / determinant if determinant > 1e-12 * sw * sxx else 0.0
    alpha = (sy - slope * sx) / sw
    if alpha < 0:
        alpha, slope = 0.0, sxy / sxx
    if slope <= 0:
        return sy / sw, math.inf
    return alpha, 1 / slope


def choose_curve(
    curves: Iterable[CostCurve], operation: str, ranks: int, hosts: int, group: str = ""
) -> CostCurve | None:
    """The curve for an operation in groups of `ranks` ranks on `hosts` hosts.

    A curve with the group's name comes first, then the one with the most groups at the same time, as in a run."""
    found = [each for each in curves if (each.operation, each.ranks, each.hosts) == (operation, ranks, hosts)]
    return max(found, key=lambda each: (each.group == group, each.together), default=None)


def read_curves(path: str | Path) -> tuple[CostCurve, ...]:
    """The collectives of a machine.yml.

    Raises:
        OSError: it cannot be read.
        ValueError: it has none, or they are damaged.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        found = values.get("collectives") if isinstance(values, dict) else None
        if not isinstance(found, list) or not found:
            raise ValueError("it must have a list of `collectives`, as bench/communication.py writes it")
        return tuple(map(CostCurve.of, found))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
