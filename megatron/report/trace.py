"""Time of the steps under a profiler, summed over torch's trace by the purpose of each operation.

`megatron.training.hooks.profile` marks the phases of a step and counts the steps. A recomputation marks itself. On a
CPU an operation's time is its own, without the operations that it calls. On a GPU it is that of its kernels, and the
rest is time without a kernel."""

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

FOLDER = "profile"
FACTS = "deepy"  # key of the trace under which the hook leaves its own facts
MARK = "phase: "  # before the name of a phase of `megatron.worker.beacon`
RECOMPUTE = "recompute"

MATRIX = ("mm", "addmm", "_linear_pointwise", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
# Products of activations with activations belong to attention and scans, and so do fused kernels with such products.
ATTENTION = ("bmm", "baddbmm", "attention", "flash", "scan", "wkv", "ssd", "cumsum", "fla::", "mamba")
KERNELS = (("attention", ("flash", "attention", "fmha", "scan", "wkv", "ssd")),
           ("matrix", ("gemm", "cutlass", "nvjet", "cublas")))  # fmt: skip
MESSAGES = ("c10d::", "gloo:", "nccl", "record_param_comms")
CATEGORIES = ("matrix", "attention", "memory", "recompute", "optimizer", "communication", "hooks", "host")
PASSES = ("forward", "backward", "reduce")


@dataclass
class TraceTimes:
    """Times of one rank's profiled steps."""

    steps: int = 0
    window: float = 0.0  # seconds from the first phase to the end of the last one.
    # By category, with the window as their sum. `host` is time without an operation (on a GPU: a kernel).
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    waiting: float = 0.0  # seconds in collectives, part of `host` and `communication`, by the beacon. 0 on a GPU.
    flops: float = 0.0  # of the matrix products, without recomputed ones
    device: bool = False  # whether kernels of a device were counted

    def __add__(self, other: "TraceTimes") -> "TraceTimes":
        seconds = {name: own + other.seconds[name] for name, own in self.seconds.items()}
        return TraceTimes(
            self.steps + other.steps,
            self.window + other.window,
            seconds,
            self.waiting + other.waiting,
            self.flops + other.flops,
            self.device or other.device,
        )


def read_traces(run: str | Path) -> TraceTimes | None:
    """The sum over the traces of a run. None if no trace has the hook's facts.

    Raises:
        ValueError: a trace is damaged.
    """
    found = None
    for path in sorted(Path(run, FOLDER).glob("trace_rank*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if FACTS in content:
                times = sum_trace(content)
                found = times if found is None else found + times
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is no trace that can be read: {type(error).__name__}: {error}") from error
    return found


def sum_trace(content: Mapping[str, Any]) -> TraceTimes:
    facts = content[FACTS]
    spans = [each for each in content["traceEvents"] if each.get("ph") == "X" and "dur" in each]
    marks = sorted((each for each in spans if str(each["name"]).startswith(MARK) and each["cat"] == "user_annotation"),
                   key=lambda each: float(each["ts"]))  # fmt: skip
    if not marks:
        raise ValueError("no phase of a step is marked")
    found = TraceTimes(steps=int(facts["steps"]), waiting=float(facts["waiting"]))
    found.window = sum(float(each["dur"]) for each in marks) / 1e6
    phases = _Phases(marks)
    operations = [each for each in spans if each.get("cat") in ("cpu_op", "user_annotation")]
    kernels = [each for each in spans if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found.device = bool(kernels)
    if kernels:
        _sum_kernels(found, phases, spans, operations, kernels)
    else:
        thread = marks[0]["tid"]
        for event, category, seconds in _own_times(phases, [each for each in operations if each["tid"] == thread]):
            found.seconds[category] += seconds
            found.flops += product_flops(event) if category == "matrix" else 0.0
    rest = found.window - sum(seconds for name, seconds in found.seconds.items() if name != "host")
    found.seconds["host"] = max(0.0, rest)
    found.window = sum(found.seconds.values())
    return found


class _Phases:
    """The phase at a time, in microseconds."""

    def __init__(self, marks: Sequence[Mapping[str, Any]]) -> None:
        self._begins = [float(each["ts"]) for each in marks]
        self._ends = [float(each["ts"]) + float(each["dur"]) for each in marks]
        self._names = [str(each["name"]).removeprefix(MARK) for each in marks]

    def at(self, time: float) -> str | None:
        place = bisect_right(self._begins, time) - 1
        return self._names[place] if place >= 0 and time < self._ends[place] else None


def _category(name: str, phase: str, again: bool, kernel: str = "") -> str:
    if any(word in name or word in kernel for word in MESSAGES):
        return "communication"
    if phase == "optimizer":
        return "optimizer"
    if phase not in PASSES:
        return "hooks"
    if again:
        return "recompute"
    short = name.rpartition("::")[2]
    if short in MATRIX:
        return "matrix"
    if any(word in name for word in ATTENTION):
        return "attention"
    for category, words in KERNELS:
        if any(word in kernel for word in words):
            return category
    return "memory"


def _nested(operations: Iterable[Mapping[str, Any]]) -> Iterable[tuple[Mapping[str, Any], float, bool]]:
    """Operations of a thread, each with its time without the operations that it calls (seconds), and whether it is
    recomputed."""
    order = sorted(operations, key=lambda each: (float(each["ts"]), -float(each["dur"])))
    own = [float(each["dur"]) for each in order]
    again = [False] * len(order)
    stack: list[int] = []
    for place, each in enumerate(order):
        begin = float(each["ts"])
        while stack and float(order[stack[-1]]["ts"]) + float(order[stack[-1]]["dur"]) <= begin:
            stack.pop()
        if stack:
            own[stack[-1]] -= own[place]
        again[place] = each["name"] == RECOMPUTE or (bool(stack) and again[stack[-1]])
        stack.append(place)
    return [(each, max(0.0, seconds) / 1e6, repeats) for each, seconds, repeats in zip(order, own, again)]


def _own_times(
    phases: _Phases, operations: Iterable[Mapping[str, Any]]
) -> Iterable[tuple[Mapping[str, Any], str, float]]:
    """Operations of the training thread, with their categories and their own times in seconds."""
    for event, seconds, again in _nested(operations):
        phase = phases.at(float(event["ts"]))
        if event["cat"] == "user_annotation" or phase is None:  # marks. Their own time is the host's
            continue
        yield event, _category(str(event["name"]), phase, again), seconds


def _sum_kernels(
    found: TraceTimes,
    phases: _Phases,
    spans: Iterable[Mapping[str, Any]],
    operations: Iterable[Mapping[str, Any]],
    kernels: Iterable[Mapping[str, Any]],
) -> None:
    """Kernels by the operation that launched them. Overlapping time counts once, as computation."""
    threads: dict[Any, list[Mapping[str, Any]]] = {}
    for each in operations:
        threads.setdefault(each["tid"], []).append(each)
    lookups = {tid: _Launches(events) for tid, events in threads.items()}
    launched = {
        each["args"]["correlation"]: each for each in spans
        if each.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in each.get("args", {})
    }  # fmt: skip
    counted: set[int] = set()
    work: list[tuple[float, float, str]] = []
    for each in kernels:
        begin, kernel = float(each["ts"]), str(each["name"]).lower()
        launch = launched.get(each.get("args", {}).get("correlation"))
        event, again = (None, False) if launch is None else lookups.get(launch["tid"], _Launches([])).at(launch["ts"])
        phase = phases.at(float(launch["ts"]) if launch is not None else begin)
        if phase is None:
            continue
        category = _category(str(event["name"]) if event is not None else "", phase, again, kernel)
        work.append((begin, begin + float(each["dur"]), category))
        if category == "matrix" and event is not None and id(event) not in counted:
            counted.add(id(event))
            found.flops += product_flops(event)
    last = float("-inf")
    for begin, end, category in _computation_first(work):
        found.seconds[category] += max(0.0, end - max(begin, last)) / 1e6
        last = max(last, end)


def _computation_first(work: Sequence[tuple[float, float, str]]) -> Iterable[tuple[float, float, str]]:
    """Spans in order of time. Messages only have the time without computation."""
    computing = sorted(each for each in work if each[2] != "communication")
    begins = [begin for begin, _, _ in computing]
    found = list(computing)
    for begin, end, category in (each for each in work if each[2] == "communication"):
        at = begin
        for other, until, _ in computing[max(0, bisect_right(begins, begin) - 1) :]:
            if other >= end:
                break
            if other > at:
                found.append((at, other, category))
            at = max(at, until)
        if at < end:
            found.append((at, end, category))
    return sorted(found)


class _Launches:
    """The innermost operation of a thread at a time."""

    def __init__(self, operations: Sequence[Mapping[str, Any]]) -> None:
        self._all = [
            (float(each["ts"]), float(each["ts"]) + float(each["dur"]), each, again)
            for each, _, again in _nested(operations)
        ]
        self._begins = [begin for begin, *_ in self._all]

    def at(self, time: Any) -> tuple[Mapping[str, Any] | None, bool]:
        place = bisect_right(self._begins, float(time)) - 1
        for _, end, event, again in reversed(self._all[max(0, place - 200) : place + 1]):
            if end >= float(time) and event["cat"] == "cpu_op":
                return event, again
        return None, False


def product_flops(event: Mapping[str, Any]) -> float:
    """FLOPs of a matrix product by the shapes of its inputs. 0 if the trace has none."""
    shapes = [each for each in event.get("args", {}).get("Input Dims", []) if isinstance(each, list) and each]
    shapes = [each for each in shapes if all(isinstance(size, int) for size in each) and len(each) >= 2]
    name = str(event["name"]).rpartition("::")[2]
    if name == "addmm":
        shapes = shapes[-2:]
    if len(shapes) < 2:
        return 0.0
    first, second = shapes[0], shapes[1]
    if name == "_linear_pointwise":
        return 2.0 * prod(first) * second[0]
    if name in ("_grouped_mm", "_scaled_grouped_mm"):
        # [rows, K] x [E, K, N], or for a weight's gradient [K, rows] x [rows, N]: each row is in one group
        return 2.0 * prod(first) * second[-1] if len(first) == 2 else 2.0 * prod(second) * first[-2]
    return 2.0 * prod(first) * second[-1]
